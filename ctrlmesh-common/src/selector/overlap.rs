//! Can any labels satisfy a set of requirements at once?
//!
//! Labels are independent of each other, so it is decided key by key: either the label may be missing, or some value
//! that a label may have satisfies all that is asked of it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Condition, Requirement};

/// Whether some labels satisfy all of `requirements`.
pub(super) fn satisfiable<'a>(requirements: impl Iterator<Item = &'a Requirement>) -> bool {
    let mut by_key: BTreeMap<&str, Vec<&Condition>> = BTreeMap::new();
    for requirement in requirements {
        by_key.entry(requirement.key()).or_default().push(requirement.condition());
    }
    by_key.values().all(|conditions| label_satisfiable(conditions))
}

fn label_satisfiable(conditions: &[&Condition]) -> bool {
    let admits = |value: Option<&str>| conditions.iter().all(|condition| condition.admits(value));
    if admits(None) {
        return true;
    }
    if conditions.contains(&&Condition::DoesNotExist) {
        return false;
    }
    match candidates(conditions) {
        Some(values) => values.into_iter().any(|value| admits(Some(value))),
        None => range_satisfiable(conditions),
    }
}

/// The values to which the conditions restrict the label; `None` where they name none.
fn candidates<'a>(conditions: &[&'a Condition]) -> Option<BTreeSet<&'a str>> {
    conditions.iter().find_map(|condition| match condition {
        Condition::Equals(value) => Some(BTreeSet::from([value.as_str()])),
        Condition::In(values) => Some(values.iter().map(String::as_str).collect()),
        _ => None,
    })
}

/// Whether an integer lies within every bound. A label's value has no sign, so it is at least 0; and it may have
/// leading zeros, so finitely many forbidden values never exhaust one integer.
fn range_satisfiable(conditions: &[&Condition]) -> bool {
    let (mut above, mut below) = (-1_i64, None);
    for condition in conditions {
        match condition {
            Condition::GreaterThan(bound) => above = above.max(*bound),
            Condition::LessThan(bound) => {
                below = Some(below.map_or(*bound, |least: i64| least.min(*bound)));
            }
            _ => {}
        }
    }
    match (above.checked_add(1), below) {
        (Some(least), Some(below)) => least < below,
        (Some(_), None) => true,
        (None, _) => false,
    }
}
