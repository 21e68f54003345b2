//! Finds ShardingConfigs of one operator that could own the same object or pod.
//!
//! It also finds roots whose shards would have the name of an existing config.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::ShardingConfig;

use super::{Problem, Report};
use crate::rules::object_name::name;

mod claim;
mod affiliation;
mod pods;
mod unowned;

use affiliation::{Affiliation, Relation, Workload};
use claim::{Budget, BudgetExceeded, Claim, Named, STEPS, UNNAMED};
pub(in crate::rules::validate) use pods::{of_pods, of_selectors, of_targets};

/// For all ShardingConfigs of a namespace.
const ALL_STEPS: usize = 4 * STEPS;

/// What makes two ShardingConfigs comparable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum OperatorKey<'a> {
    Lock(&'a str),
    Workload(Workload<'a>),
    Prefix(&'a str),
}

/// Compares `config` with the other shards of its operator.
pub(super) fn with_others(config: &ShardingConfig, others: &[&ShardingConfig], report: &mut Report) {
    let near: Vec<&ShardingConfig> = others.iter().copied().chain([config]).collect();
    let (mine, claim) = (Affiliation::of(config, &near), Claim::of(config));
    let mut budget = Budget::of(STEPS);
    // One warning is enough.
    let mut suspected = false;
    for other in others {
        let theirs = Affiliation::of(other, &near);
        names(&mine, &theirs, other, report);
        let Some(relation) = mine.to(&theirs) else { continue };
        if relation != Relation::Unknown {
            let theirs = Claim::of(other);
            report.errors.extend(compared(config, &claim, other, &theirs, relation, &mut budget));
        } else if !suspected && let Ok(Some(resource)) = claim.common(&Claim::of(other), &mut budget) {
            suspected = true;
            let conflict = could_own(resource, other);
            report.warning(share_field(config), format!("{conflict}, if both are of one operator; name the lock of each one's operator in spec.controller.leaderElectionName to have it checked"));
        }
    }
}

/// Warns of hashes that neither `config`, a manual shard, nor another shard of its operator has. `keys` are
/// further hash labels.
pub(super) fn hashes(config: &ShardingConfig, others: &[&ShardingConfig], keys: &[&str], report: &mut Report) {
    let near: Vec<&ShardingConfig> = others.iter().copied().chain([config]).collect();
    let mine = Affiliation::of(config, &near);
    if !mine.is_by_hand() || !mine.is_known() {
        return;
    }
    let of_operator = others
        .iter()
        .filter(|other| mine.to(&Affiliation::of(other, &near)).is_some_and(|relation| relation != Relation::Unknown));
    let theirs: Vec<Claim<'_>> = of_operator.map(|other| Claim::of(other)).collect();
    let claim = Claim::of(config);
    if let Ok(Some(((_, resource), hashes))) = unowned::unowned(&claim, &theirs, keys, &mut Budget::of(STEPS)) {
        let resource = if resource == UNNAMED { "resources that are not named" } else { resource };
        report.warning("spec.limits", format!("the hashes {hashes} of {resource} belong to nobody: neither this shard nor another of its operator has them"));
    }
}

/// The `configs` that cannot be in force beside earlier ones, by index, with the reason. All are of one
/// namespace, of which `near` are all configs.
pub fn superseded(configs: &[&ShardingConfig], near: &[&ShardingConfig]) -> Vec<(usize, Problem)> {
    let affiliations: Vec<Affiliation<'_>> = configs.iter().map(|config| Affiliation::of(config, near)).collect();
    let mut claims: Vec<Option<Claim<'_>>> = configs.iter().map(|_| None).collect();
    let mut in_force: BTreeMap<OperatorKey<'_>, Vec<usize>> = BTreeMap::new();
    let mut budget = Budget::of(ALL_STEPS);
    let mut superseded = Vec::new();
    for (at, config) in configs.iter().enumerate() {
        let of_one = operator_keys(&affiliations[at]);
        let before = of_one.iter().filter_map(|key| in_force.get(key)).flatten();
        let before: BTreeSet<usize> = before.copied().collect();
        let problem = before.into_iter().find_map(|first| {
            let relation = affiliations[at].to(&affiliations[first])?;
            for one in [at, first] {
                claims[one].get_or_insert_with(|| Claim::of(configs[one]));
            }
            let (mine, theirs) = (claims[at].as_ref()?, claims[first].as_ref()?);
            compared(config, mine, configs[first], theirs, relation, &mut budget)
        });
        match problem {
            Some(problem) => superseded.push((at, problem)),
            None => of_one.into_iter().for_each(|one| in_force.entry(one).or_default().push(at)),
        }
    }
    superseded
}

fn operator_keys<'a>(affiliation: &Affiliation<'a>) -> Vec<OperatorKey<'a>> {
    let lock = affiliation.lock().map(OperatorKey::Lock);
    let workloads = affiliation.workloads().map(OperatorKey::Workload);
    lock.into_iter().chain(workloads).chain(affiliation.prefix().map(OperatorKey::Prefix)).collect()
}

/// Why `config` cannot be in force beside `other`.
fn compared(
    config: &ShardingConfig,
    claim: &Claim<'_>,
    other: &ShardingConfig,
    others: &Claim<'_>,
    relation: Relation,
    budget: &mut Budget,
) -> Option<Problem> {
    let name = name(&other.metadata);
    let problem = |field: &str, message| Some(Problem { field: field.to_owned(), message });
    match relation {
        Relation::Unknown => None,
        Relation::Target => problem(
            target_field(config),
            format!("is the target of root {name:?} too; one root divides all pods of its target"),
        ),
        Relation::Prefix => {
            problem("spec.root.prefix", format!("is that of root {name:?} too; their shards would have the same names"))
        }
        Relation::Same => match claim.common(others, budget) {
            Ok(None) => None,
            Ok(Some(resource)) => {
                let conflict = could_own(resource, other);
                let message = format!("{conflict}, of the same operator; their selectors must exclude each other");
                problem(share_field(config), message)
            }
            Err(BudgetExceeded) => problem(
                share_field(config),
                format!(
                    "names too many resources and values to be compared with ShardingConfig {name:?}, of the same operator; write fewer"
                ),
            ),
        },
    }
}

/// No other config can have the name of a root's shard.
fn names(mine: &Affiliation<'_>, theirs: &Affiliation<'_>, other: &ShardingConfig, report: &mut Report) {
    let name = name(&other.metadata);
    if mine.would_make(theirs) {
        report.error("spec.root.prefix", format!("would make a shard called {name:?}, and there is a ShardingConfig of that name that is not of this root; choose another prefix, or delete it"));
    }
    if theirs.would_make(mine) {
        report.error("metadata.name", format!("is what root {name:?} calls one of its shards; choose another"));
    }
}

fn could_own((group, resource): Named<'_>, other: &ShardingConfig) -> String {
    let resource = shown(group, resource);
    format!("could own {resource} as ShardingConfig {:?}", name(&other.metadata))
}

fn share_field(config: &ShardingConfig) -> &'static str {
    if config.spec.root.is_some() { "spec.root" } else { "spec.limits" }
}

fn shown(group: &str, resource: &str) -> String {
    match (group, resource) {
        (_, UNNAMED) => "objects of a resource that is not named".to_owned(),
        ("" | UNNAMED, resource) => format!("the same {resource}"),
        (group, resource) => format!("the same {resource}.{group}"),
    }
}

fn target_field(config: &ShardingConfig) -> &'static str {
    match &config.spec.root {
        Some(root) if root.target_deployment.is_some() => "spec.root.targetDeployment",
        _ => "spec.root.targetStatefulSet",
    }
}

#[cfg(test)]
mod tests;
