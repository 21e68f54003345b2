//! Decides which of two operators stays in force if both could own the same object.
//!
//! Admission refuses such configs. But it knows only what its replica has seen, may be down, and can be
//! bypassed; so compiling checks again. An operator in force stays in force, and of two such the older one: a
//! second owner never gets a policy.
//!
//! The policies of an operator can change without an edit: by a new namespace, other label keys, or another
//! version of the manager. Then nothing is in force, and the accepted config stays.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;

use super::near::Near;
use super::{Drafts, Operator, Trouble, operator, record};
use crate::rules::validate;

/// Highest precedence first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Precedence {
    /// The status has the hash of these policies.
    InForce,
    /// In its present generation.
    Accepted,
    /// In an earlier generation.
    AcceptedBefore,
    NotAccepted,
}

/// The operators that lose against another one, by index, with the reason. `drafts` is `None` for operators
/// that get no new policy anyway.
pub(super) fn superseded(
    operators: &[Operator<'_>],
    drafts: &[Option<Drafts>],
    near: &Near<'_>,
) -> Vec<(usize, Trouble)> {
    let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        if drafts[at].is_some() {
            by_namespace.entry(operator.namespace()).or_default().push(at);
        }
    }
    let mut losers = Vec::new();
    // A single operator has no rival.
    for mut rivals in by_namespace.into_values().filter(|rivals| rivals.len() > 1) {
        rivals.sort_by_cached_key(|at| {
            let operator = &operators[*at];
            let meta = &operator.config().metadata;
            let created_at = meta.creation_timestamp.as_ref().map(|time| time.0);
            // A config from a file has no creation time, and comes last, by name.
            (precedence(operator, drafts[*at].as_ref()), created_at.is_none(), created_at, meta.name.clone())
        });
        let configs: Vec<&ShardingConfig> = rivals.iter().map(|at| operators[*at].config()).collect();
        let superseded = validate::superseded(&configs, &near.to(configs[0]).configs).into_iter();
        losers.extend(superseded.map(|(one, problem)| {
            let message = format!("{problem}; no new policy is sent until they do");
            (rivals[one], operator::trouble(configs[one], message))
        }));
    }
    losers
}

fn precedence(operator: &Operator<'_>, drafts: Option<&Drafts>) -> Precedence {
    if drafts.is_some_and(|drafts| record::is_written(operator, drafts)) {
        return Precedence::InForce;
    }
    let conditions = operator.status().into_iter().flat_map(|status| &status.conditions);
    let mut accepted = conditions.filter(|one| one.type_ == "Accepted" && one.status == "True");
    match accepted.next() {
        Some(one) if one.observed_generation == operator.config().metadata.generation => Precedence::Accepted,
        Some(_) => Precedence::AcceptedBefore,
        None => Precedence::NotAccepted,
    }
}

#[cfg(test)]
mod tests;
