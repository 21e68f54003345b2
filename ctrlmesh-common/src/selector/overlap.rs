//! Decides whether any labels satisfy a set of requirements at once.
//!
//! Labels are independent of each other, so each key is decided alone: either the label may be missing, or some valid
//! value satisfies all requirements on the key.

use std::collections::{BTreeMap, BTreeSet};

use super::syntax::MAX_NAME_BYTES;
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

/// Whether a value satisfies conditions of which none names the values that it may have.
///
/// Without bounds one always does: values are forbidden one by one, and there are more than anybody can list. With
/// bounds an integer has to lie within them. A label's value has no sign, so it is at least 0; and it may have zeros in
/// front, so each integer can be written in at least 45 ways, and a free one is found soon.
fn range_satisfiable(conditions: &[&Condition]) -> bool {
    let (mut least, mut most) = (0_i64, i64::MAX);
    let mut bounded = false;
    for condition in conditions {
        match condition {
            Condition::GreaterThan(i64::MAX) | Condition::LessThan(i64::MIN) => return false,
            Condition::GreaterThan(bound) => (bounded, least) = (true, least.max(bound + 1)),
            Condition::LessThan(bound) => (bounded, most) = (true, most.min(bound - 1)),
            _ => {}
        }
    }
    let free = |value: &str| conditions.iter().all(|condition| condition.admits(Some(value)));
    !bounded
        || (least..=most).any(|integer| {
            let digits = integer.to_string().len();
            (digits..=MAX_NAME_BYTES).any(|width| free(&format!("{integer:0width$}")))
        })
}
