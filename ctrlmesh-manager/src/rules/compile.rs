//! Compiles ShardingConfigs and pods into one policy per pod.
//!
//! Pure, and independent of the order of its input. It also gives, per operator, what has to be written into
//! the status. Shards are derived from their root, not read from the cluster: nothing waits for them to be
//! written, and manual edits of them have no effect.
//!
//! All pods of an operator have one epoch. It is written into the status of the root (or of the standalone
//! ShardingConfig) with a hash of the policies. So all replicas know the same epoch for the same policies,
//! and no epoch grows without a change.
//!
//! An invalid ShardingConfig, or a pod that two of them select, changes nothing: the last policy stays, and
//! the problem is reported. If two configs could own the same object, the one in force or accepted earlier
//! stays.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::{Policy, Redirect};
use ctrlmesh_common::wire::MAX_POLICY_BYTES;
use serde::{Deserialize, Serialize};

use crate::rules::pod::{Member, PodName};
use crate::rules::shard::Labelling;

mod sent;
mod placement;
mod operator;
mod record;
mod clashes;

pub use operator::{Operator, operators};
pub use sent::Sent;
use sent::{Kept, Written};

/// The input of [`compile`].
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    pub configs: &'a [ShardingConfig],
    /// Pods that are not enrolled are passed over.
    pub members: &'a [Member],
    pub namespaces: &'a BTreeSet<String>,
    /// By `NAMESPACE/NAME`; `StatefulSets` that are missing begin at 0.
    pub first_ordinals: &'a BTreeMap<String, u32>,
    pub labelling: &'a Labelling,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compiled {
    /// An enrolled pod that is missing here keeps its last policy.
    #[serde(default)]
    pub policies: BTreeMap<PodName, CompiledPolicy>,
    /// Valid operators, by the `NAMESPACE/NAME` of the root or standalone ShardingConfig.
    #[serde(default)]
    pub operators: BTreeMap<String, Record>,
    #[serde(default)]
    pub troubles: Vec<Trouble>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CompiledPolicy {
    /// `None` if no ShardingConfig selects the pod; then it sees nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// `NAMESPACE/NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// resourceVersion of the operator's ShardingConfig, or 0. The greater is newer, whichever replica
    /// compiled it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub version: u64,
    pub policy: Policy,
    #[serde(skip)]
    kept: Kept,
}

/// What is to be written into the status of a root or standalone ShardingConfig.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    pub epoch: u64,
    /// Hash of all policies of the operator.
    pub policy_digest: String,
    /// Whether the status has it already. Until then no pod gets the policies.
    #[serde(default)]
    pub written: bool,
    /// Of a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ownership: Option<Ownership>,
    /// Shards of a root, each with the hash of its policy.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shards: BTreeMap<String, String>,
    /// Shards of a root without a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Trouble {
    /// `KIND NAMESPACE/NAME`.
    pub object: String,
    /// The ShardingConfigs concerned, by `NAMESPACE/NAME`.
    pub configs: Vec<String>,
    pub message: String,
}

impl CompiledPolicy {
    /// For a pod that no ShardingConfig selects.
    pub fn nothing() -> Self {
        Self::new(None, None, 0, Policy::nothing())
    }

    pub fn new(shard: Option<String>, operator: Option<String>, version: u64, policy: Policy) -> Self {
        Self { shard, operator, version, policy, kept: Kept::default() }
    }

    /// Adds what depends on the pod. `owners` is the operator's table, which says for whom the pod writes.
    fn of(mut self, pod: &Member, owners: Option<&Ownership>) -> Self {
        self.policy.redirect = pod.redirect;
        self.policy.fail_open = pod.fail_open;
        if let Some(fence) = self.policy.fence.as_mut().filter(|_| !pod.uid.is_empty()) {
            fence.owner = owners.and_then(|table| table.pod_uids.get(&pod.uid)).cloned();
        }
        let container = pod.container.clone();
        self.policy.container = container.filter(|_| pod.redirect == Redirect::Sidecar);
        self.kept = Kept::default();
        self
    }

    pub fn sent(&self) -> Arc<Sent> {
        self.kept.0.clone().unwrap_or_else(|| Arc::new(Sent::of(&self.policy)))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(version: &u64) -> bool {
    *version == 0
}

/// `before` is what the pods were told last.
pub fn compile(world: World<'_>, before: &BTreeMap<PodName, CompiledPolicy>) -> Compiled {
    let (operators, mut troubles) = operators(world);
    let mut compiled = Compiled::default();
    let mut policies = policies(&operators, &mut troubles);
    let mut superseded = BTreeSet::new();
    for (at, trouble) in clashes::superseded(&operators, &policies, world) {
        policies[at] = None;
        superseded.insert(at);
        troubles.push(trouble);
    }
    let records = operators.iter().zip(policies).map(|(operator, policies)| {
        let policies = policies?;
        let record = record::of(operator, &policies, world.configs);
        let (epoch, changed_at) = (record.epoch, record::changed_at(operator, &record));
        compiled.operators.insert(operator.full_name(), record);
        let current = |(shard, draft): (_, Draft)| (shard, in_epoch(draft.policy, epoch, changed_at));
        Some(policies.into_iter().map(current).collect())
    });
    let contents: Vec<Option<BTreeMap<String, Policy>>> = records.collect();
    let mut written: Vec<Written<'_>> = contents.iter().map(|_| Written::default()).collect();
    for (pod, mut shards) in shards_of_pods(world.members, &operators) {
        let last = before.get(&pod.name);
        if shards.len() > 1 {
            shards.retain(|(at, _)| !superseded.contains(at));
        }
        let told = match shards[..] {
            [] if operators.iter().any(|one| one.may_have(pod, last)) => last.cloned(),
            [] => Some(CompiledPolicy::nothing().of(pod, None)),
            [(at, shard)] => match &contents[at] {
                Some(policies) => policies.get(shard).map(|policy| {
                    let record = compiled.operators.get(&operators[at].full_name());
                    let owners = record.and_then(|record| record.ownership.as_ref());
                    let mut told = operators[at].tells(shard, policy).of(pod, owners);
                    told.kept.0 = Some(written[at].of(shard, pod, &told.policy));
                    told
                }),
                None => last.cloned(),
            },
            [(_, one), (_, other), ..] => {
                troubles.push(selected_by_two(pod, one, other));
                last.cloned()
            }
        };
        compiled.policies.extend(told.map(|told| (pod.name.clone(), told)));
    }
    troubles.extend(world.members.iter().filter_map(bypassed));
    troubles.sort();
    troubles.dedup();
    compiled.troubles = troubles;
    compiled
}

/// Indices of `operators` that get no new policy because another one has precedence.
pub fn superseded(operators: &[Operator<'_>], world: World<'_>) -> BTreeSet<usize> {
    let policies = policies(operators, &mut Vec::new());
    clashes::superseded(operators, &policies, world).into_iter().map(|(at, _)| at).collect()
}

/// `None` for an operator that gets no new policy.
fn policies(operators: &[Operator<'_>], troubles: &mut Vec<Trouble>) -> Vec<Option<Policies>> {
    let mut of = |operator: &Operator<'_>| {
        let policies = || operator.policies().and_then(|policies| sendable(operator, policies));
        let policies = operator.valid.then(policies).transpose();
        policies.unwrap_or_else(|trouble| {
            troubles.push(trouble);
            None
        })
    };
    operators.iter().map(&mut of).collect()
}

/// What may be sent now: nothing new of an operator whose status is not written yet.
pub fn tellable(compiled: &Compiled, before: &BTreeMap<PodName, CompiledPolicy>) -> BTreeMap<PodName, CompiledPolicy> {
    let told = compiled.policies.iter().filter_map(|(pod, told)| {
        let record = told.operator.as_ref().and_then(|operator| compiled.operators.get(operator));
        let written = record.is_none_or(|record| record.written);
        let told = if written { Some(told) } else { before.get(pod) };
        told.map(|told| (pod.clone(), told.clone()))
    });
    told.collect()
}

fn in_epoch(mut policy: Policy, epoch: u64, changed_at: Option<u64>) -> Policy {
    policy.epoch = epoch;
    for limit in &mut policy.limits {
        limit.changed_at = changed_at;
    }
    policy
}

/// Refuses policies that are too large to be sent.
fn sendable(operator: &Operator<'_>, policies: BTreeMap<String, Policy>) -> Result<Policies, Trouble> {
    let policies = policies.into_iter().map(|(shard, policy)| {
        // Maps, strings, lists and numbers always serialise.
        let text = serde_json::to_string(&policy).unwrap_or_default();
        (shard, Draft { policy, text })
    });
    let policies: Policies = policies.collect();
    let large = policies.iter().find_map(|(shard, draft)| {
        let bytes = draft.text.len();
        (bytes > MAX_POLICY_BYTES).then_some((shard, bytes))
    });
    let Some((shard, bytes)) = large else { return Ok(policies) };
    let config = operator.full_name();
    Err(Trouble {
        object: format!("ShardingConfig {config}"),
        configs: vec![config],
        message: format!(
            "the policy of shard {shard:?} would have {bytes} bytes, and at most {MAX_POLICY_BYTES} are allowed: list fewer namespaces, values or resources"
        ),
    })
}

/// By shard.
type Policies = BTreeMap<String, Draft>;

/// A policy without an epoch.
#[derive(Clone, Debug, PartialEq)]
struct Draft {
    policy: Policy,
    /// The policy as JSON.
    text: String,
}

/// Index of the operator, and name of the shard.
type ShardRef<'a> = (usize, &'a str);

/// Enrolled pods by name, each with the shards that select it.
fn shards_of_pods<'a>(members: &'a [Member], operators: &'a [Operator<'_>]) -> Vec<(&'a Member, Vec<ShardRef<'a>>)> {
    let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        by_namespace.entry(operator.namespace()).or_default().push(at);
    }
    let shards = |pod: &Member| {
        let near = by_namespace.get(pod.name.namespace.as_str()).into_iter().flatten();
        near.filter_map(|at| Some((*at, operator::name(operators[*at].shard_of(pod)?)))).collect()
    };
    let mut members: Vec<&Member> = members.iter().filter(|pod| pod.enrolled()).collect();
    members.sort_by_key(|pod| &pod.name);
    members.into_iter().map(|pod| (pod, shards(pod))).collect()
}

/// A pod that asks for a proxy, but was admitted without one.
fn bypassed(pod: &Member) -> Option<Trouble> {
    let is_bypassed = pod.wants_proxy() && !pod.enrolled() && !pod.terminating;
    is_bypassed.then(|| Trouble {
        object: format!("Pod {}", pod.name),
        configs: Vec::new(),
        message: "asks to be served, but was admitted without what it needs for that, or cannot be: it is not; make it anew, with the label in its template"
            .to_owned(),
    })
}

fn selected_by_two(pod: &Member, one: &str, other: &str) -> Trouble {
    Trouble {
        object: format!("Pod {}", pod.name),
        configs: [one, other].map(|name| format!("{}/{name}", pod.name.namespace)).into(),
        message: format!("is of ShardingConfig {one:?} and of {other:?}; a pod can be in one shard only"),
    }
}

#[cfg(test)]
mod tests;
