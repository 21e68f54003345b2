//! Compiles the policy of a pod as the manager does, and says how far it is in force.
//!
//! Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::compile::{Compiled, CompiledPolicy, compile};
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shared::each;
use kube::ResourceExt as _;
use serde::Serialize;

use super::world::NamespaceWorld;

/// The policy of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PolicyState {
    pub(super) state: Stage,
    /// The ShardingConfig that sets the epoch, as `NAMESPACE/NAME`. Absent: none selects the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) operator: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shard: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) epoch: Option<u64>,
    /// The epoch that the pod's proxy has acknowledged. Absent: the status has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) acknowledged_epoch: Option<i64>,
    /// What is wrong with the objects that it is compiled from.
    pub(super) troubles: Vec<String>,
}

/// How far a policy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Stage {
    /// The manager sends it.
    Sent,
    /// The manager sends it once the status of the ShardingConfig has its epoch. Until then, the last policy holds.
    NotWritten,
    /// Nothing new follows from what there is: the last policy holds, and is not known.
    LastPolicy,
    /// The pod has no proxy.
    NotEnrolled,
}

/// `None` beside a pod that has no proxy, or whose policy is not known.
pub(super) fn policy(world: &NamespaceWorld, pod: &Member) -> (PolicyState, Option<Arc<CompiledPolicy>>) {
    let mut state = PolicyState {
        state: Stage::NotEnrolled,
        operator: None,
        shard: None,
        epoch: None,
        acknowledged_epoch: None,
        troubles: Vec::new(),
    };
    let compiled = compile(world.snapshot.world(), &BTreeMap::new());
    let of_pod = format!("Pod {}", pod.name);
    if !pod.enrolled() {
        state.troubles = troubles(&compiled, &[of_pod]);
        return (state, None);
    }
    let Some(policy) = compiled.policies.get(&pod.name).cloned() else {
        state.state = Stage::LastPolicy;
        state.troubles = compiled.troubles.iter().map(|one| format!("{}: {}", one.object, one.message)).collect();
        return (state, None);
    };
    let record = policy.operator.as_ref().and_then(|operator| compiled.operators.get(operator));
    state.state = if record.is_none_or(|record| record.written) { Stage::Sent } else { Stage::NotWritten };
    state.epoch = policy.operator.as_ref().map(|_| policy.policy.epoch);
    state.acknowledged_epoch = acknowledged(world, pod, policy.shard.as_deref());
    let operator = policy.operator.as_ref().map(|operator| format!("ShardingConfig {operator}"));
    state.troubles = troubles(&compiled, &[Some(of_pod), operator].into_iter().flatten().collect::<Vec<_>>());
    state.operator.clone_from(&policy.operator);
    state.shard.clone_from(&policy.shard);
    (state, Some(policy))
}

fn troubles(compiled: &Compiled, objects: &[String]) -> Vec<String> {
    let of = compiled.troubles.iter().filter(|trouble| objects.contains(&trouble.object));
    of.map(|trouble| format!("{}: {}", trouble.object, trouble.message)).collect()
}

/// By the status of the shard.
fn acknowledged(world: &NamespaceWorld, pod: &Member, shard: Option<&str>) -> Option<i64> {
    let is_shard = |config: &&ShardingConfig| Some(config.name_any().as_str()) == shard;
    let shard = each(&world.snapshot.configs).find(is_shard)?;
    let mut pods = shard.status.iter().flat_map(|status| &status.pods);
    pods.find(|one| one.name == pod.name.name)?.epoch
}

impl PolicyState {
    pub(super) fn sentences(&self) -> Vec<String> {
        let mut said = Vec::new();
        let (operator, shard) =
            (self.operator.as_deref().unwrap_or_default(), self.shard.as_deref().unwrap_or_default());
        let epoch = self.epoch.unwrap_or_default();
        said.push(match (self.state, &self.operator) {
            (Stage::NotEnrolled, _) => {
                "The pod is not enrolled: no proxy is in its way, and every request passes as it is.".to_owned()
            }
            (Stage::LastPolicy, _) => {
                let said = "No new policy follows from what is in the cluster.";
                format!("{said} The pod keeps its last one, which only its proxy knows.")
            }
            (_, None) => "No ShardingConfig selects the pod: it sees no object.".to_owned(),
            (Stage::Sent, _) => format!("The pod is of shard {shard} of {operator}. Its policy has epoch {epoch}."),
            (Stage::NotWritten, _) => format!(
                "The pod is of shard {shard} of {operator}. Its next policy is not in the status yet. Until the manager \
                 has written it, the last one holds; the steps below go by the next one."
            ),
        });
        if self.state == Stage::Sent && self.operator.is_some() {
            let newest = i64::try_from(epoch).ok();
            said.push(match self.acknowledged_epoch {
                Some(acknowledged) if Some(acknowledged) == newest => {
                    "Its proxy has acknowledged that epoch.".to_owned()
                }
                Some(acknowledged) => {
                    format!("Its proxy has acknowledged epoch {acknowledged} only, and goes by that.")
                }
                None => "Whether its proxy has that epoch is not known: the status names none.".to_owned(),
            });
        }
        said.extend(self.troubles.iter().cloned());
        said
    }
}
