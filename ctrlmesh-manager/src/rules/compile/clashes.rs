//! Which operators stand in each other's way, and which of them yields?
//!
//! The admission refuses what could own the same object as another; but it sees only what its replica has seen, may be
//! away, and can be told to look the other way. So it is looked again here. Who is in force already stays in force, so
//! that nothing new is told to anybody as long as it would make a second owner; of those, the older one stays.
//!
//! What an operator is told can change without anybody's edit: by a namespace that is new, by other keys of labels, by
//! another version of the manager. Then nothing is in force, and who was accepted stays.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;

use super::placement::namespace;
use super::{Operator, Policies, Trouble, World, operator, record};
use crate::rules::validate;

/// What speaks for an operator, the most first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Precedence {
    /// Its pods are told just this already.
    InForce,
    /// It was accepted as it stands.
    Accepted,
    /// It was accepted, and has been edited since.
    AcceptedBefore,
    /// It was never accepted, or is not any more.
    NotAccepted,
}

/// The operators, by number, that are told nothing new because of another, and why; `policies` are what the shards of
/// each would be told, none where nothing is anyway.
pub(super) fn superseded(
    operators: &[Operator<'_>],
    policies: &[Option<Policies>],
    world: World<'_>,
) -> Vec<(usize, Trouble)> {
    let mut near: BTreeMap<&str, Vec<&ShardingConfig>> = BTreeMap::new();
    for config in world.configs {
        near.entry(namespace(config)).or_default().push(config);
    }
    let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        if policies[at].is_some() {
            by_namespace.entry(operator.namespace()).or_default().push(at);
        }
    }
    let mut all = Vec::new();
    // Where there is one only, there is nothing to compare.
    for (namespace, mut some) in by_namespace.into_iter().filter(|(_, some)| some.len() > 1) {
        some.sort_by_cached_key(|at| {
            let operator = &operators[*at];
            let meta = &operator.config().metadata;
            let born = meta.creation_timestamp.as_ref().map(|time| time.0);
            // What was read from a file has no time: it comes after what has one, by name.
            (standing(operator, policies[*at].as_ref()), born.is_none(), born, meta.name.clone())
        });
        let configs: Vec<&ShardingConfig> = some.iter().map(|at| operators[*at].config()).collect();
        let of_namespace = near.get(namespace).map_or(&[][..], Vec::as_slice);
        let superseded = validate::superseded(&configs, of_namespace).into_iter();
        all.extend(superseded.map(|(one, problem)| {
            let message = format!("{problem}; nothing new is told until they do");
            (some[one], operator::trouble(configs[one], message))
        }));
    }
    all
}

fn standing(operator: &Operator<'_>, policies: Option<&Policies>) -> Precedence {
    if policies.is_some_and(|policies| record::is_written(operator, policies)) {
        return Precedence::InForce;
    }
    let conditions = operator.status().into_iter().flat_map(|status| &status.conditions);
    let mut accepted = conditions.filter(|one| one.type_ == "Accepted" && one.status == "True");
    match accepted.next() {
        Some(one) if one.observed_generation == operator.config().metadata.generation => {
            Precedence::Accepted
        }
        Some(_) => Precedence::AcceptedBefore,
        None => Precedence::NotAccepted,
    }
}
