//! Reads what is to move: slots, or a namespace.
//!
//! Pure.

use ctrlmesh_common::slots::{Slot, SlotSet};

use super::error::SteerError;

/// What is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Slots(SlotSet),
    Namespace(String),
}

impl What {
    /// From slots such as `5` or `0-3,7`, or the name of a namespace. With `namespace/` before it, a name that is a
    /// number counts as such, too.
    ///
    /// # Errors
    /// It is neither.
    pub(super) fn read(text: &str) -> Result<Self, SteerError> {
        let not_slots = || SteerError::NotSlots { text: text.to_owned() };
        match text.split_once('/') {
            Some(("namespace" | "namespaces" | "ns", name)) if !name.is_empty() => Ok(Self::Namespace(name.to_owned())),
            Some(("slot" | "slots", slots)) => ranges(slots).map(Self::Slots).ok_or_else(not_slots),
            Some(_) => Err(not_slots()),
            None if text.is_empty() => Err(not_slots()),
            // No name begins or ends with a comma or hyphen, and a name of digits and hyphens is rare.
            None if text.chars().all(|one| one.is_ascii_digit() || matches!(one, ',' | '-')) => {
                ranges(text).map(Self::Slots).ok_or_else(not_slots)
            }
            None => Ok(Self::Namespace(text.to_owned())),
        }
    }
}

/// `None`: it is not a list of slots and ranges of slots.
fn ranges(text: &str) -> Option<SlotSet> {
    let parts = text.split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (Slot, Slot) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then(|| SlotSet::ALL.iter().filter(|slot| (first..=last).contains(slot)).collect::<SlotSet>())
    });
    parts.collect::<Option<Vec<_>>>().map(|parts| parts.into_iter().fold(SlotSet::EMPTY, SlotSet::union))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(numbers: &[u8]) -> What {
        What::Slots(numbers.iter().map(|number| Slot::try_from(i64::from(*number)).unwrap()).collect())
    }

    #[test]
    fn slots_are_numbers_and_ranges() {
        for (text, expected) in [("5", slots(&[5])), ("0-2,7", slots(&[0, 1, 2, 7])), ("slot/31", slots(&[31]))] {
            assert_eq!(What::read(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn other_words_are_namespaces() {
        for (text, name) in [("shop", "shop"), ("namespace/5", "5"), ("ns/team-5", "team-5"), ("5th-team", "5th-team")]
        {
            assert_eq!(What::read(text).unwrap(), What::Namespace(name.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_neither_is_refused() {
        for text in ["32", "7-3", "1,", "", "pod/a", "ns/", "slot/a", "01"] {
            assert!(matches!(What::read(text), Err(SteerError::NotSlots { .. })), "{text}");
        }
    }
}
