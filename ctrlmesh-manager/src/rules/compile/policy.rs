//! The compiled policy of a pod, with its serialised form.
//!
//! A policy may have megabytes, and a shard thousands of pods. So pods that need the same share one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use ctrlmesh_common::policy::{Egress, Fault, Fence, Guard, Members, Policy, Redirect, Webhook};
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::SlotSet;
use ctrlmesh_common::wire;
use serde::{Deserialize, Deserializer, Serialize};

use super::members;
use crate::rules::pod::Member;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CompiledPolicy {
    /// `None` if no ShardingConfig selects the pod; then it sees nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// `NAMESPACE/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// resourceVersion of the operator's ShardingConfig, or 0. The greater is newer, whichever replica
    /// compiled it.
    #[serde(skip_serializing_if = "is_zero")]
    pub version: u64,
    pub policy: Policy,
    #[serde(skip)]
    json: Bytes,
    #[serde(skip)]
    digest: u64,
}

/// The policies of an operator's shards, and those compiled from them for pods.
#[derive(Debug)]
pub(super) struct ShardPolicies<'a> {
    operator: String,
    version: u64,
    by_shard: BTreeMap<String, Policy>,
    /// For whom each pod writes, by its UID.
    owners: BTreeMap<String, String>,
    compiled: BTreeMap<Variant<'a>, Arc<CompiledPolicy>>,
}

/// What the policies of an operator's pods can differ by.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Variant<'a> {
    shard: &'a str,
    owns: bool,
    redirect: Redirect,
    fail_open: bool,
    forward_proxy: bool,
    container: Option<&'a str>,
    owner: Option<String>,
}

impl CompiledPolicy {
    pub fn new(shard: Option<String>, operator: Option<String>, version: u64, policy: Policy) -> Self {
        // Maps, strings, lists and numbers always serialise.
        let json = serde_json::to_vec(&policy).unwrap_or_default();
        let digest = wire::digest(&json);
        Self { shard, operator, version, policy, json: json.into(), digest }
    }

    /// For a pod that no ShardingConfig selects.
    pub fn nothing() -> Self {
        Self::new(None, None, 0, Policy::nothing())
    }

    /// [`Self::nothing`], with what depends on the pod.
    ///
    /// `members` are those that are known of it, of which it sees none either.
    pub(super) fn nothing_for(pod: &Member, members: Option<Members>) -> Self {
        let members = members.map(|members| Members { sees: Some(BTreeSet::new()), ..members });
        Self::new(None, None, 0, for_pod(Policy { members, ..Policy::nothing() }, pod))
    }

    /// The same with other guards, faults and egress rules; itself, if it has them.
    pub(super) fn with_guards(
        self: &Arc<Self>,
        guards: &[Guard],
        faults: &[Fault],
        egress: Option<&Egress>,
    ) -> Arc<Self> {
        let Policy { guards: our_guards, faults: our_faults, egress: our_egress, .. } = &self.policy;
        if our_guards == guards && our_faults == faults && our_egress.as_ref() == egress {
            return self.clone();
        }
        let (guards, faults, egress) = (guards.to_vec(), faults.to_vec(), egress.cloned());
        let policy = Policy { guards, faults, egress, ..self.policy.clone() };
        Arc::new(Self::new(self.shard.clone(), self.operator.clone(), self.version, policy))
    }

    /// The same with another webhook; itself, if it has it.
    pub(super) fn with_webhook(self: &Arc<Self>, webhook: Option<Webhook>) -> Arc<Self> {
        if self.policy.webhook == webhook {
            return self.clone();
        }
        let policy = Policy { webhook, ..self.policy.clone() };
        Arc::new(Self::new(self.shard.clone(), self.operator.clone(), self.version, policy))
    }

    /// The same with the guards, faults, egress rules and webhook of `other`; itself, if it has them.
    pub(super) fn with_additions_of(self: &Arc<Self>, other: &Self) -> Arc<Self> {
        let Policy { guards, faults, egress, webhook, fence, .. } = &other.policy;
        // The owner of an object is known by the fence, or else by the limits of the webhook's peers. The two change
        // together.
        let is_fenced_alike = self.policy.fence.is_some() == fence.is_some();
        let webhook = if is_fenced_alike { webhook } else { &self.policy.webhook };
        self.with_guards(guards, faults, egress.as_ref()).with_webhook(webhook.clone())
    }

    pub fn json(&self) -> &Bytes {
        &self.json
    }

    /// Digest of the JSON.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Whether a sidecar serves the pod; the node's proxy then only redirects connections there.
    pub fn is_served_inside(&self) -> bool {
        self.policy.redirect != Redirect::Node
    }
}

/// Compares the JSON instead of the policy: that is faster.
impl PartialEq for CompiledPolicy {
    fn eq(&self, other: &Self) -> bool {
        let fields = |one: &Self| (one.digest, one.version);
        fields(self) == fields(other)
            && self.shard == other.shard
            && self.operator == other.operator
            && self.json == other.json
    }
}

impl Eq for CompiledPolicy {}

impl<'de> Deserialize<'de> for CompiledPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        struct Fields {
            #[serde(default)]
            shard: Option<String>,
            #[serde(default)]
            operator: Option<String>,
            #[serde(default)]
            version: u64,
            policy: Policy,
        }
        let Fields { shard, operator, version, policy } = Fields::deserialize(deserializer)?;
        Ok(Self::new(shard, operator, version, policy))
    }
}

impl<'a> ShardPolicies<'a> {
    pub(super) fn new(
        operator: String,
        version: u64,
        by_shard: BTreeMap<String, Policy>,
        owners: BTreeMap<String, String>,
    ) -> Self {
        Self { operator, version, by_shard, owners, compiled: BTreeMap::new() }
    }

    /// `NAMESPACE/NAME`.
    pub(super) fn operator(&self) -> &str {
        &self.operator
    }

    /// By name, without what depends on the pod.
    pub(super) fn shards(&self) -> &BTreeMap<String, Policy> {
        &self.by_shard
    }

    /// `None` if the operator has no such shard. A pod that does not own what its shard owns sees nothing.
    pub(super) fn compile(&mut self, shard: &'a str, pod: &'a Member, owns: bool) -> Option<Arc<CompiledPolicy>> {
        let policy = self.by_shard.get(shard)?;
        let owner = policy.fence.as_ref().and_then(|fence| self.owner(fence, pod));
        let Member { redirect, fail_open, forward_proxy, .. } = *pod;
        let container = proxy_container(pod);
        let variant = Variant { shard, owns, redirect, fail_open, forward_proxy, container, owner: owner.clone() };
        let compile = || {
            let mut policy = for_pod(policy.clone(), pod);
            if !owns {
                policy = blind(policy);
            }
            if let Some(fence) = &mut policy.fence {
                fence.owner = owner;
            }
            let (shard, operator) = (Some(shard.to_owned()), Some(self.operator.clone()));
            Arc::new(CompiledPolicy::new(shard, operator, self.version, policy))
        };
        Some(self.compiled.entry(variant).or_insert_with(compile).clone())
    }

    /// A pod from a file may have no UID; then its shard counts.
    fn owner(&self, fence: &Fence, pod: &Member) -> Option<String> {
        if pod.uid.is_empty() { fence.owner.clone() } else { self.owners.get(&pod.uid).cloned() }
    }
}

/// The policy of whoever owns nothing: it sees no object.
pub(super) fn blind(mut policy: Policy) -> Policy {
    policy.limits.iter_mut().for_each(|limit| limit.selector = Selector::nothing());
    members::hide(&mut policy);
    policy
}

/// The policy of a version on trial that sees what others own, and writes nothing: these slots are theirs.
pub(super) fn shadow(mut policy: Policy, slots: SlotSet) -> Policy {
    policy.shadow = true;
    members::show(&mut policy, slots);
    policy
}

/// Adds what depends on the pod.
fn for_pod(policy: Policy, pod: &Member) -> Policy {
    let container = proxy_container(pod).map(str::to_owned);
    let Member { redirect, fail_open, forward_proxy, .. } = *pod;
    Policy { redirect, fail_open, forward_proxy, container, ..policy }
}

fn proxy_container(pod: &Member) -> Option<&str> {
    pod.container.as_deref().filter(|_| pod.redirect == Redirect::Sidecar)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(version: &u64) -> bool {
    *version == 0
}
