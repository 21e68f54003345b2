//! Computes which objects join and leave when one selector replaces another.
//!
//! The objects that A matches and B does not are those of A where B's first requirement fails, or where the first holds
//! and the second fails, and so on. Each case is a selector, and no two of them match the same object.

use std::collections::BTreeSet;

use ctrlmesh_common::selector::{Condition, Requirement, Selector};

/// Selectors for what joins and for what leaves; no object matches two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Objects that only the new selector matches.
    pub joins: Vec<Selector>,
    /// Objects that only the old selector matches.
    pub leaves: Vec<Selector>,
}

/// The difference of two selectors; `None` where no selector can say it (the negation of `>` and `<`).
pub fn difference(old: &Selector, new: &Selector) -> Option<Difference> {
    Some(Difference { joins: minus(new, old)?, leaves: minus(old, new)? })
}

/// What `one` matches and `other` does not.
fn minus(one: &Selector, other: &Selector) -> Option<Vec<Selector>> {
    let mut selectors = Vec::new();
    let mut so_far = one.clone();
    for requirement in other.requirements() {
        if so_far.requirements().contains(requirement) {
            continue;
        }
        let negated: Selector = [negated(requirement)?].into_iter().collect();
        let matched = simplified(&so_far.clone().and(&negated));
        selectors.extend(matched.filter(|matched| matched.overlaps(&Selector::everything())));
        so_far = so_far.and(&[requirement.clone()].into_iter().collect());
    }
    Some(selectors)
}

fn negated(requirement: &Requirement) -> Option<Requirement> {
    let condition = match requirement.condition().clone() {
        Condition::Equals(value) => Condition::NotEquals(value),
        Condition::NotEquals(value) => Condition::Equals(value),
        Condition::In(values) => Condition::NotIn(values),
        Condition::NotIn(values) => Condition::In(values),
        Condition::Exists => Condition::DoesNotExist,
        Condition::DoesNotExist => Condition::Exists,
        Condition::GreaterThan(_) | Condition::LessThan(_) => return None,
    };
    Requirement::new(requirement.key(), condition).ok()
}

/// Requirements on one key that are sets become one; `None` where nothing is left of it.
fn simplified(selector: &Selector) -> Option<Selector> {
    let mut kept: Vec<Requirement> = Vec::new();
    for requirement in selector.requirements() {
        let merged = kept.iter().enumerate().find_map(|(at, one)| Some((at, merged(one, requirement)?)));
        match merged {
            Some((_, values)) if values.is_empty() => return None,
            Some((at, values)) => {
                kept[at] = Requirement::new(requirement.key(), Condition::In(values)).ok()?;
            }
            None => kept.push(requirement.clone()),
        }
    }
    Some(kept.into_iter().collect())
}

/// The values that two requirements on one key leave, where one of them names values.
fn merged(one: &Requirement, other: &Requirement) -> Option<BTreeSet<String>> {
    let (named, filter) = match (values(one), values(other)) {
        (Some(values), _) => (values, other),
        (None, Some(values)) => (values, one),
        (None, None) => return None,
    };
    let same = one.key() == other.key();
    same.then(|| named.into_iter().filter(|value| filter.condition().admits(Some(value))).collect())
}

fn values(requirement: &Requirement) -> Option<BTreeSet<String>> {
    match requirement.condition() {
        Condition::Equals(value) => Some(BTreeSet::from([value.clone()])),
        Condition::In(values) => Some(values.clone()),
        _ => None,
    }
}
