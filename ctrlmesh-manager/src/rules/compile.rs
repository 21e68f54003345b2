//! What is each pod's proxy told?
//!
//! Pure: takes what is in the cluster and what was told last; gives one policy per pod, and per operator what has to be
//! written into its status, whatever the order in which it is given them. Shards are made from their root here too, so
//! that nothing waits for them to be written, and what somebody edited by hand is told to nobody.
//!
//! All pods of an operator are told one epoch, which is written into the status of its root (or of the ShardingConfig
//! that stands by itself) together with a hash of what they are told. So every replica of the manager, and every one
//! that is started later, knows the same epoch for the same policy, and no epoch grows without a change.
//!
//! A ShardingConfig that is wrong, or a pod that two of them select, changes nothing: the last good policy stays, and
//! the trouble is told. So it does where two that are there could own the same object, whatever let them pass: the one
//! that is in force, or was accepted, stays.

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

/// What there is.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// The ShardingConfigs of all namespaces.
    pub configs: &'a [ShardingConfig],
    /// The pods of all namespaces; those that are not enrolled are passed over.
    pub members: &'a [Member],
    /// The namespaces.
    pub namespaces: &'a BTreeSet<String>,
    /// The first ordinal of each `StatefulSet`, by `NAMESPACE/NAME`; 0 for those that are not there.
    pub first_ordinals: &'a BTreeMap<String, u32>,
    /// How objects are labelled.
    pub labelling: &'a Labelling,
}

/// What follows from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compiled {
    /// What each pod's proxy is told. Of an enrolled pod that is not there nothing can be said: it keeps what it has.
    #[serde(default)]
    pub policies: BTreeMap<PodName, Told>,
    /// The operators whose ShardingConfigs are valid, by the `NAMESPACE/NAME` of the root or only ShardingConfig.
    #[serde(default)]
    pub operators: BTreeMap<String, Record>,
    /// What is wrong.
    #[serde(default)]
    pub troubles: Vec<Trouble>,
}

/// What one pod's proxy is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Told {
    /// The ShardingConfig from which it follows; none where no ShardingConfig selects the pod, and it sees nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// The operator, by `NAMESPACE/NAME`; none where there is no shard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// The resourceVersion of the operator's ShardingConfig from which it follows; 0 where there is none. Of two that
    /// follow from the same one, the greater is newer, whichever replica compiled it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub version: u64,
    /// The policy.
    pub policy: Policy,
    #[serde(skip)]
    kept: Kept,
}

/// What the status of a root, or of a ShardingConfig that stands by itself, has to say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    /// The epoch of what the pods are told.
    pub epoch: u64,
    /// A hash of what they are told.
    pub policy_digest: String,
    /// Whether the status says so already. Until it does, no pod is told.
    #[serde(default)]
    pub written: bool,
    /// The ownership table of a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ownership: Option<Ownership>,
    /// The shards of a root, each with a hash of what it is told.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shards: BTreeMap<String, String>,
    /// The shards of a root that have no pod, because there are more shards than pods, or not the right ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<String>,
}

/// What is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Trouble {
    /// `KIND NAMESPACE/NAME`.
    pub object: String,
    /// The ShardingConfigs that it is about, by `NAMESPACE/NAME`.
    pub configs: Vec<String>,
    /// What is wrong with it.
    pub message: String,
}

// === impl Told ===

impl Told {
    /// What a pod is told of which no ShardingConfig speaks.
    pub fn nothing() -> Self {
        Self::new(None, None, 0, Policy::nothing())
    }

    /// What a pod of a `shard` of an `operator` is told, which follows from its `version`.
    pub fn new(
        shard: Option<String>,
        operator: Option<String>,
        version: u64,
        policy: Policy,
    ) -> Self {
        Self { shard, operator, version, policy, kept: Kept::default() }
    }

    /// As it holds for `pod`.
    fn of(mut self, pod: &Member) -> Self {
        self.policy.redirect = pod.redirect;
        self.policy.fail_open = pod.fail_open;
        let container = pod.container.clone();
        self.policy.container = container.filter(|_| pod.redirect == Redirect::Sidecar);
        self.kept = Kept::default();
        self
    }

    /// The policy as it is sent.
    pub fn sent(&self) -> Arc<Sent> {
        self.kept.0.clone().unwrap_or_else(|| Arc::new(Sent::of(&self.policy)))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(version: &u64) -> bool {
    *version == 0
}

/// Compiles `world`; `before` is what the pods were told last.
pub fn compile(world: World<'_>, before: &BTreeMap<PodName, Told>) -> Compiled {
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
        let current =
            |(shard, draft): (_, Draft)| (shard, in_epoch(draft.policy, epoch, changed_at));
        Some(policies.into_iter().map(current).collect())
    });
    let contents: Vec<Option<BTreeMap<String, Policy>>> = records.collect();
    let mut written: Vec<Written<'_>> = contents.iter().map(|_| Written::default()).collect();
    for (pod, mut places) in placed(world.members, &operators) {
        let last = before.get(&pod.name);
        if places.len() > 1 {
            places.retain(|(at, _)| !superseded.contains(at));
        }
        let told = match places[..] {
            [] if operators.iter().any(|one| one.may_have(pod, last)) => last.cloned(),
            [] => Some(Told::nothing().of(pod)),
            [(at, shard)] => match &contents[at] {
                Some(policies) => policies.get(shard).map(|policy| {
                    let mut told = operators[at].tells(shard, policy).of(pod);
                    told.kept.0 = Some(written[at].of(shard, pod, &told.policy));
                    told
                }),
                None => last.cloned(),
            },
            [(_, one), (_, other), ..] => {
                troubles.push(selected_twice(pod, one, other));
                last.cloned()
            }
        };
        compiled.policies.extend(told.map(|told| (pod.name.clone(), told)));
    }
    troubles.extend(world.members.iter().filter_map(admitted_past_us));
    troubles.sort();
    troubles.dedup();
    compiled.troubles = troubles;
    compiled
}

/// Which of `operators`, by number, are told nothing new because they stand in the way of another.
pub fn superseded(operators: &[Operator<'_>], world: World<'_>) -> BTreeSet<usize> {
    let policies = policies(operators, &mut Vec::new());
    clashes::superseded(operators, &policies, world).into_iter().map(|(at, _)| at).collect()
}

/// What the shards of each operator are told; none where that is nothing new.
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

/// What may be told now: nothing new of an operator whose status does not say so yet.
pub fn tellable(compiled: &Compiled, before: &BTreeMap<PodName, Told>) -> BTreeMap<PodName, Told> {
    let told = compiled.policies.iter().filter_map(|(pod, told)| {
        let record = told.operator.as_ref().and_then(|operator| compiled.operators.get(operator));
        let written = record.is_none_or(|record| record.written);
        let told = if written { Some(told) } else { before.get(pod) };
        told.map(|told| (pod.clone(), told.clone()))
    });
    told.collect()
}

/// The same, as it is told in an epoch that began at the version `changed_at`.
fn in_epoch(mut policy: Policy, epoch: u64, changed_at: Option<u64>) -> Policy {
    policy.epoch = epoch;
    for limit in &mut policy.limits {
        limit.changed_at = changed_at;
    }
    policy
}

/// The policies, if each can be sent: one that is too large would be sent and refused for ever.
fn sendable(
    operator: &Operator<'_>,
    policies: BTreeMap<String, Policy>,
) -> Result<Policies, Trouble> {
    let policies = policies.into_iter().map(|(shard, policy)| {
        // Maps of text to text, lists and numbers: there is nothing that JSON could not say.
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

/// By shard, what it is told.
type Policies = BTreeMap<String, Draft>;

/// A policy in no epoch yet.
#[derive(Clone, Debug, PartialEq)]
struct Draft {
    policy: Policy,
    /// The same in JSON.
    text: String,
}

/// By number of the operator, the name of a shard.
type Place<'a> = (usize, &'a str);

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
        near.filter_map(|at| Some((*at, operator::name(operators[*at].shard_of(pod)?)))).collect()
    };
    let mut members: Vec<&Member> = members.iter().filter(|pod| pod.enrolled()).collect();
    members.sort_by_key(|pod| &pod.name);
    members.into_iter().map(|pod| (pod, places(pod))).collect()
}

/// What is wrong with a pod that asks to be served and is not.
fn admitted_past_us(pod: &Member) -> Option<Trouble> {
    let is_past_us = pod.asks() && !pod.enrolled() && !pod.leaving;
    is_past_us.then(|| Trouble {
        object: format!("Pod {}", pod.name),
        configs: Vec::new(),
        message: "asks to be served, but was admitted without what it needs for that, or cannot be: it is not; make it anew, with the label in its template"
            .to_owned(),
    })
}

fn selected_twice(pod: &Member, one: &str, other: &str) -> Trouble {
    Trouble {
        object: format!("Pod {}", pod.name),
        configs: [one, other].map(|name| format!("{}/{name}", pod.name.namespace)).into(),
        message: format!(
            "is of ShardingConfig {one:?} and of {other:?}; a pod can be in one shard only"
        ),
    }
}

#[cfg(test)]
mod tests;
