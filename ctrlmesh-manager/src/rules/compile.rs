//! Compiles ShardingConfigs, CircuitBreakers, FaultInjections and pods into one policy per pod.
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

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::MAX_POLICY_BYTES;
use serde::{Deserialize, Serialize};

use crate::rules::balance::{RootLoads, SlotOwners};
use crate::rules::breaker::Breaker;
use crate::rules::evidence::Evidences;
use crate::rules::injection::Injection;
use crate::rules::object_name;
use crate::rules::pod::{Member, PodName};
use crate::rules::shard::Labelling;
use crate::rules::shared::{Shared, each};

mod policy;
mod placement;
mod owning;
mod handover;
mod sees;
mod standby;
mod operator;
mod record;
mod clashes;
mod egress;
mod guards;
mod webhook;
mod near;
mod members;

use guards::Guarded;
use near::Near;
pub use operator::Operator;
pub use policy::CompiledPolicy;
use policy::ShardPolicies;
use webhook::Webhooks;
pub use webhook::without_room as webhook_without_room;

/// The input of [`compile`].
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    pub configs: &'a [Shared<ShardingConfig>],
    pub breakers: &'a [Breaker],
    pub injections: &'a [Injection],
    /// Pods that are not enrolled are passed over.
    pub members: &'a [Shared<Member>],
    pub namespaces: &'a BTreeSet<String>,
    /// By `NAMESPACE/NAME`; `StatefulSets` that are missing begin at 0.
    pub first_ordinals: &'a BTreeMap<String, u32>,
    pub labelling: &'a Labelling,
    /// Pods that do not ask for a proxy, by namespace. A namespace that is missing is not known yet.
    pub unenrolled: &'a BTreeMap<String, Vec<Shared<Member>>>,
    /// What is proved about roots that are fenced.
    pub evidence: &'a Evidences,
    /// Whether ownership is decided here. If not, it is what stands in the tables: somebody else may know more.
    pub leads: bool,
    /// UIDs of pods that have come back only just: their elastic shards own nothing while others do.
    pub held_back: &'a BTreeSet<String>,
    /// UIDs of pods that wait for their lock.
    pub waiting: &'a BTreeSet<String>,
    /// Of roots that are divided by load.
    pub loads: &'a RootLoads,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compiled {
    /// An enrolled pod that is missing here keeps its last policy.
    #[serde(default)]
    pub policies: PoliciesByPod,
    /// Valid operators, by the `NAMESPACE/NAME` of the root or standalone ShardingConfig.
    #[serde(default)]
    pub operators: BTreeMap<String, Record>,
    #[serde(default)]
    pub troubles: Vec<Trouble>,
}

pub type PoliciesByPod = BTreeMap<PodName, Arc<CompiledPolicy>>;

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
    /// What a root that is fenced waits for, before everything is where it wants it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<String>,
    /// Whether the status of such a root has another table.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves: bool,
    /// The owners that its slots are to have, where such a root is divided by load.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub wanted: SlotOwners,
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

impl Trouble {
    /// That of the object.
    pub fn namespace(&self) -> &str {
        self.object.split_once(' ').map_or("", |(_kind, name)| object_name::namespace_in(name))
    }
}

impl Compiled {
    /// Takes away what is of these namespaces, and gives it.
    #[must_use]
    pub fn take(&mut self, namespaces: &BTreeSet<String>) -> Self {
        let is_of = |name: &str| namespaces.contains(object_name::namespace_in(name));
        Self {
            policies: self.policies.extract_if(.., |pod, _| namespaces.contains(&pod.namespace)).collect(),
            operators: self.operators.extract_if(.., |operator, _| is_of(operator)).collect(),
            troubles: self.troubles.extract_if(.., |trouble| namespaces.contains(trouble.namespace())).collect(),
        }
    }

    /// Adds what is of other namespaces.
    pub fn add(&mut self, other: Self) {
        self.policies.extend(other.policies);
        self.operators.extend(other.operators);
        self.troubles.extend(other.troubles);
        self.troubles.sort();
    }
}

/// `before` are the policies that pods got last.
pub fn compile(world: World<'_>, before: &PoliciesByPod) -> Compiled {
    let near = Near::of(world);
    let (operators, mut troubles) = operator::of(world, &near);
    let mut compiled = Compiled::default();
    let mut drafts = drafts(&operators, &mut troubles);
    let mut superseded = BTreeSet::new();
    for (at, trouble) in clashes::superseded(&operators, &drafts, &near) {
        drafts[at] = None;
        superseded.insert(at);
        troubles.push(trouble);
    }
    let shard_policies = operators.iter().zip(drafts).map(|(operator, drafts)| {
        let drafts = drafts?;
        let record = record::of(operator, &drafts, &near.to(operator.config()).configs);
        let (epoch, changed_at) = (record.epoch, record::changed_at(operator, &record));
        compiled.operators.insert(operator.full_name(), record);
        let drafts = drafts.into_iter().map(|(shard, draft)| (shard, in_epoch(draft.policy, epoch, changed_at)));
        Some(ShardPolicies::new(operator.full_name(), operator.version(), drafts.collect(), operator.owners()))
    });
    let mut shard_policies: Vec<Option<ShardPolicies<'_>>> = shard_policies.collect();
    let mut own_policies = Vec::new();
    for (pod, mut shards) in shards_of_pods(world.members, &operators) {
        let last = before.get(&pod.name);
        if shards.len() > 1 {
            shards.retain(|(at, _)| !superseded.contains(at));
        }
        let policy = match shards[..] {
            [] if operators.iter().any(|one| one.may_have(pod, last.map(Arc::as_ref))) => last.cloned(),
            [] => Some(Arc::new(CompiledPolicy::nothing_for(pod, members::members_of(pod, world.configs, last)))),
            [(at, shard)] => match &mut shard_policies[at] {
                Some(policies) => policies.compile(shard, pod, operators[at].is_owner(pod, shard)),
                None => last.cloned(),
            },
            [(_, one), (_, other), ..] => {
                troubles.push(selected_by_two(pod, one, other));
                last.cloned()
            }
        };
        own_policies.extend(policy.map(|policy| (pod, policy)));
    }
    let shard_policies: Vec<_> = shard_policies.iter().flatten().collect();
    let webhooks = Webhooks::new(&operators, &shard_policies, &own_policies);
    compiled.policies = with_additions(&own_policies, webhooks, world, &mut troubles);
    troubles.extend(each(world.members).filter_map(bypassed));
    troubles.sort();
    troubles.dedup();
    compiled.troubles = troubles;
    compiled
}

/// Adds what changes nothing that a pod sees or owns: webhooks, and in the room that is left what CircuitBreakers and
/// FaultInjections give.
fn with_additions<'a>(
    own_policies: &'a [MemberPolicy<'_>],
    mut webhooks: Webhooks<'a>,
    world: World<'_>,
    troubles: &mut Vec<Trouble>,
) -> PoliciesByPod {
    let mut guarded = Guarded::new(world.breakers, world.injections);
    let policies = own_policies.iter().map(|(pod, policy)| {
        let policy = guarded.guard(webhooks.add(policy), pod);
        (pod.name.clone(), policy)
    });
    let policies = policies.collect();
    troubles.extend(webhooks.into_troubles().chain(guarded.into_troubles()));
    policies
}

/// The operators by namespace and name, and the problems of their ShardingConfigs.
pub fn operators(world: World<'_>) -> (Vec<Operator<'_>>, Vec<Trouble>) {
    operator::of(world, &Near::of(world))
}

/// Indices of `operators` that get no new policy because another one has precedence.
pub fn superseded(operators: &[Operator<'_>], world: World<'_>) -> BTreeSet<usize> {
    let drafts = drafts(operators, &mut Vec::new());
    clashes::superseded(operators, &drafts, &Near::of(world)).into_iter().map(|(at, _)| at).collect()
}

/// The policies of an operator's shards, by shard. They have no epoch yet: it follows from their digests.
type Drafts = BTreeMap<String, CompiledPolicy>;

/// `None` for an operator that gets no new policy.
fn drafts(operators: &[Operator<'_>], troubles: &mut Vec<Trouble>) -> Vec<Option<Drafts>> {
    let mut of = |operator: &Operator<'_>| {
        let drafts = || {
            let drafts = operator.drafts()?;
            check_sizes(operator, &drafts)?;
            Ok(drafts)
        };
        let drafts = (operator.valid && operator.is_known()).then(drafts).transpose();
        drafts.unwrap_or_else(|trouble| {
            troubles.push(trouble);
            None
        })
    };
    operators.iter().map(&mut of).collect()
}

/// The policies that may be sent now. Of an operator whose status is not written yet, only guards, faults, egress rules
/// and webhooks are new.
pub fn sendable(compiled: &Compiled, before: &PoliciesByPod) -> PoliciesByPod {
    // By the addresses of the last policy and of the new one. Pods that share both share the result.
    let mut renewed: HashMap<(usize, usize), Arc<CompiledPolicy>> = HashMap::new();
    let mut renew = |last: &Arc<CompiledPolicy>, policy: &Arc<CompiledPolicy>| {
        let key = [last, policy].map(|one| Arc::as_ptr(one).addr()).into();
        let with_additions = || {
            let renewed = last.with_additions_of(policy);
            if renewed.json().len() > MAX_POLICY_BYTES { last.clone() } else { renewed }
        };
        renewed.entry(key).or_insert_with(with_additions).clone()
    };
    let policies = compiled.policies.iter().filter_map(|(pod, policy)| {
        let record = policy.operator.as_ref().and_then(|operator| compiled.operators.get(operator));
        let is_written = record.is_none_or(|record| record.written);
        let policy = if is_written { Some(policy.clone()) } else { before.get(pod).map(|last| renew(last, policy)) };
        policy.map(|policy| (pod.clone(), policy))
    });
    policies.collect()
}

fn in_epoch(mut policy: Policy, epoch: u64, changed_at: Option<u64>) -> Policy {
    policy.epoch = epoch;
    for limit in &mut policy.limits {
        limit.changed_at = changed_at;
    }
    policy
}

/// Refuses policies that are too large to be sent.
fn check_sizes(operator: &Operator<'_>, drafts: &Drafts) -> Result<(), Trouble> {
    let large = drafts.iter().find_map(|(shard, draft)| {
        let bytes = draft.json().len();
        (bytes > MAX_POLICY_BYTES).then_some((shard, bytes))
    });
    let Some((shard, bytes)) = large else { return Ok(()) };
    let config = operator.full_name();
    Err(Trouble {
        object: format!("ShardingConfig {config}"),
        configs: vec![config],
        message: format!(
            "the policy of shard {shard:?} would have {bytes} bytes, and at most {MAX_POLICY_BYTES} are allowed: list fewer namespaces, values or resources"
        ),
    })
}

/// An enrolled pod, and what it sees and owns.
type MemberPolicy<'a> = (&'a Member, Arc<CompiledPolicy>);

/// Index of the operator, and name of the shard.
type ShardRef<'a> = (usize, &'a str);

/// Enrolled pods by name, each with the shards that select it.
fn shards_of_pods<'a>(
    members: &'a [Shared<Member>],
    operators: &'a [Operator<'_>],
) -> Vec<(&'a Member, Vec<ShardRef<'a>>)> {
    let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        by_namespace.entry(operator.namespace()).or_default().push(at);
    }
    let shards = |pod: &Member| {
        let near = by_namespace.get(pod.name.namespace.as_str()).into_iter().flatten();
        near.filter_map(|at| Some((*at, object_name::name(&operators[*at].shard_of(pod)?.metadata)))).collect()
    };
    let mut members: Vec<&Member> = each(members).filter(|pod| pod.enrolled()).collect();
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
