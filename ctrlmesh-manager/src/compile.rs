//! What is each pod's proxy told?
//!
//! Pure: takes ShardingConfigs, pods, namespaces and what was told before; gives one policy per pod and one ownership
//! table per root, whatever the order in which it is given them. Shards are made from their root here too, so that
//! nothing waits for them to be written, and what somebody edited by hand is told to nobody.
//!
//! An epoch grows only where a policy says something else than before. A ShardingConfig that is wrong, or a pod that two
//! of them select, changes nothing: the last good policy stays, and the trouble is told.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::share;
use serde::{Deserialize, Serialize};

use crate::pod::{Member, PodName};
use crate::shard::Labelling;

mod operator;

pub use operator::{Operator, operators};

/// What there is.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// The ShardingConfigs of all namespaces.
    pub configs: &'a [ShardingConfig],
    /// The pods of all namespaces; those that are not enrolled are passed over.
    pub members: &'a [Member],
    /// The namespaces.
    pub namespaces: &'a BTreeSet<String>,
    /// How objects are labelled.
    pub labelling: &'a Labelling,
}

/// What follows from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compiled {
    /// What each pod's proxy is told. A pod of no shard is not there.
    #[serde(default)]
    pub policies: BTreeMap<PodName, Told>,
    /// The ownership table of each root, by `NAMESPACE/NAME`.
    #[serde(default)]
    pub ownership: BTreeMap<String, Ownership>,
    /// The shards of each root that have no pod, because there are more shards than pods, or not the right ones.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unserved: BTreeMap<String, Vec<String>>,
    /// What is wrong.
    #[serde(default)]
    pub troubles: Vec<Trouble>,
}

/// What one pod's proxy is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Told {
    /// The ShardingConfig from which it follows.
    pub shard: String,
    /// The policy.
    pub policy: Policy,
}

/// What is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Trouble {
    /// `KIND NAMESPACE/NAME`.
    pub object: String,
    /// What is wrong with it.
    pub message: String,
}

/// Compiles `world`; `before` is what the pods were told last.
pub fn compile(world: World<'_>, before: &BTreeMap<PodName, Told>) -> Compiled {
    let (operators, mut troubles) = operators(world);
    let mut compiled = Compiled::default();
    let members = placed(world.members, &operators);
    let epochs = next_epochs(&operators, &members, before);
    for (pod, places) in members {
        let last = before.get(&pod.name);
        let told = match places[..] {
            [] => {
                let kept = |last: &&Told| operators.iter().any(|one| one.failed(pod, &last.shard));
                last.filter(kept).cloned()
            }
            [(at, config)] if operators[at].valid => {
                tell(config, pod, last, epochs[at], &mut troubles)
            }
            [_] => last.cloned(),
            [(_, one), (_, other), ..] => {
                troubles.push(selected_twice(pod, one, other));
                last.cloned()
            }
        };
        compiled.policies.extend(told.map(|told| (pod.name.clone(), told)));
    }
    for operator in &operators {
        let Some((root, table)) = operator.root().zip(operator.table()) else { continue };
        let unserved = operator.unserved();
        if !unserved.is_empty() {
            compiled.unserved.insert(root.clone(), unserved);
        }
        compiled.ownership.insert(root, table);
    }
    troubles.sort();
    troubles.dedup();
    compiled.troubles = troubles;
    compiled
}

/// By number of the operator, a shard.
type Place<'a> = (usize, &'a ShardingConfig);

/// The pods that are enrolled, in order, each with the shards that it is of.
fn placed<'a>(
    members: &'a [Member],
    operators: &'a [Operator<'_>],
) -> Vec<(&'a Member, Vec<Place<'a>>)> {
    let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        by_namespace.entry(operator.namespace()).or_default().push(at);
    }
    let places = |pod: &Member| {
        let near = by_namespace.get(pod.name.namespace.as_str()).into_iter().flatten();
        near.filter_map(|at| Some((*at, operators[*at].shard_of(pod)?))).collect()
    };
    let mut members: Vec<&Member> = members.iter().filter(|pod| pod.enrolled()).collect();
    members.sort_by_key(|pod| &pod.name);
    members.into_iter().map(|pod| (pod, places(pod))).collect()
}

/// By operator, the epoch of what changes now: later than all that its pods were told.
fn next_epochs(
    operators: &[Operator<'_>],
    members: &[(&Member, Vec<Place<'_>>)],
    before: &BTreeMap<PodName, Told>,
) -> Vec<u64> {
    let mut epochs: Vec<u64> = operators.iter().map(|operator| operator.epoch).collect();
    for (pod, places) in members {
        let last = before.get(&pod.name).map_or(0, |last| last.policy.epoch);
        for (at, _) in places {
            epochs[*at] = epochs[*at].max(last);
        }
    }
    epochs.into_iter().map(|epoch| epoch.saturating_add(1)).collect()
}

/// The policy of `pod` in the shard `config`; the last one, epoch and all, where it says the same.
fn tell(
    config: &ShardingConfig,
    pod: &Member,
    last: Option<&Told>,
    epoch: u64,
    troubles: &mut Vec<Trouble>,
) -> Option<Told> {
    let mut failed = |message: String| {
        troubles.push(Trouble { object: operator::object(config), message });
        last.cloned()
    };
    let mut policy = match share::policy(config, &pod.name.namespace) {
        Ok(policy) => policy,
        Err(error) => return failed(error.to_string()),
    };
    if let Err(error) = policy.check() {
        return failed(error.to_string());
    }
    let known = last.map(|last| &last.policy);
    for limit in &mut policy.limits {
        let same = known.iter().flat_map(|known| &known.limits).find(|known| {
            known.selector == limit.selector && known.relate_resources == limit.relate_resources
        });
        limit.changed_at = same.and_then(|known| known.changed_at);
    }
    policy.epoch = known.map_or(0, |known| known.epoch);
    if known != Some(&policy) {
        policy.epoch = epoch.max(policy.epoch.saturating_add(1));
    }
    Some(Told { shard: operator::name(config).to_owned(), policy })
}

fn selected_twice(pod: &Member, one: &ShardingConfig, other: &ShardingConfig) -> Trouble {
    Trouble {
        object: format!("Pod {}", pod.name),
        message: format!(
            "is of ShardingConfig {:?} and of {:?}; a pod can be in one shard only",
            operator::name(one),
            operator::name(other)
        ),
    }
}

#[cfg(test)]
mod tests;
