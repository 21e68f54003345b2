//! Decides which policies are created, changed and removed.
//!
//! Pure. A policy whose root is gone is removed. One that is not there yet is made only when the root's table names the
//! operator's pods: before that it would refuse all of them. The policy of [`informer_policy`] is written before the
//! first of them, and never removed.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::Ownership;
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::fence_policy::{Fence, FenceObjects};
use super::fence_table::{self, Version};
use super::informer_policy;
use crate::cluster::cache::Snapshot;
use crate::rules::fenced::{is_server_fenced, may_lose_fence};
use crate::rules::object_name::{full_name, namespace};
use crate::rules::pod::Member;
use crate::rules::shared::each;

/// What the cluster has, by the policy's name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Existing {
    pub policies: BTreeMap<String, ValidatingAdmissionPolicy>,
    pub bindings: BTreeMap<String, ValidatingAdmissionPolicyBinding>,
}

/// One write. What exists is written only in the version that was observed.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    WritePolicy(Box<ValidatingAdmissionPolicy>),
    WriteBinding(Box<ValidatingAdmissionPolicyBinding>),
    RemoveBinding(Box<ValidatingAdmissionPolicyBinding>),
    RemovePolicy(Box<ValidatingAdmissionPolicy>),
}

/// How far the fence of a root is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its table names no pod yet.
    WithoutPods,
    /// These writes are missing.
    Unwritten,
    /// Both objects are as wanted.
    Written { revision: String },
    /// The root is being deleted, and its policy is gone.
    Removed,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FencePlan {
    /// By `NAMESPACE/NAME` of the root: what is missing, in order.
    pub actions: BTreeMap<String, Vec<Action>>,
    /// By `NAMESPACE/NAME` of the root, of those with a fence in the API server.
    pub stages: BTreeMap<String, Stage>,
}

/// Compares the roots of `snapshot` with what there is. The manager is in namespace `home`.
pub fn plan(snapshot: &Snapshot, existing: &Existing, home: &str) -> FencePlan {
    let mut plan = FencePlan::default();
    let mut kept = BTreeSet::new();
    let informer = LazyCell::new(|| {
        let (policy, binding) = informer_policy::objects(home);
        missing(policy, binding, existing, informer_policy::NAME)
    });
    for (root, rule) in each(&snapshot.configs).filter_map(fenced) {
        let key = full_name(&root.metadata);
        if is_over(root) {
            plan.stages.insert(key, Stage::Removed);
            continue;
        }
        let hash_key = &snapshot.scheme.in_force.hash_key;
        let objects = Fence::of(root, rule, accounts(root, rule, snapshot), hash_key, home).objects();
        let policy = objects.policy.metadata.name.clone().unwrap_or_default();
        let is_there = existing.policies.contains_key(&policy);
        if !is_there && root.status.as_ref().and_then(|status| status.ownership.as_ref()).is_none_or(is_without_pods) {
            plan.stages.insert(key, Stage::WithoutPods);
            continue;
        }
        let FenceObjects { revision, policy: wanted, binding } = objects;
        let mut actions = informer.clone();
        actions.extend(missing(wanted, binding, existing, &policy));
        kept.insert(policy);
        let stage = if actions.is_empty() { Stage::Written { revision } } else { Stage::Unwritten };
        plan.stages.insert(key.clone(), stage);
        if !actions.is_empty() {
            plan.actions.insert(key, actions);
        }
    }
    for (root, actions) in superfluous(existing, &kept) {
        if plan.stages.get(&root) == Some(&Stage::Removed) {
            plan.stages.insert(root.clone(), Stage::Unwritten);
        }
        plan.actions.entry(root).or_default().extend(actions);
    }
    plan
}

/// The version of the table of a root with a fence in the API server.
pub fn fenced_version(config: &ShardingConfig) -> Option<Version> {
    fenced(config)?;
    fence_table::version(config)
}

/// A root whose fence is in the API server.
fn fenced(config: &ShardingConfig) -> Option<(&ShardingConfig, &Root)> {
    let rule = config.spec.root.as_ref()?;
    is_server_fenced(rule).then_some((config, rule))
}

/// Whether the root is being deleted and has handed everything back.
fn is_over(root: &ShardingConfig) -> bool {
    root.metadata.deletion_timestamp.is_some() && may_lose_fence(root)
}

fn is_without_pods(table: &Ownership) -> bool {
    table.pod_uids.is_empty() && table.revoked.iter().all(|revoked| revoked.pod_uids.is_empty())
}

/// Those of the workload's template, and of the pods that it has: while an account changes, both are used.
fn accounts(root: &ShardingConfig, rule: &Root, snapshot: &Snapshot) -> BTreeSet<String> {
    let namespace = namespace(&root.metadata);
    let key = |workload: &String| format!("{namespace}/{workload}");
    let set = rule.target_stateful_set.as_ref().and_then(|set| snapshot.set_accounts.get(&key(set)));
    let deployment = rule.target_deployment.as_ref().and_then(|one| snapshot.deployment_accounts.get(&key(one)));
    let of_it = |member: &&Member| member.name.namespace == namespace && member.is_of_target(rule);
    let pods = each(&snapshot.members).chain(snapshot.unenrolled.values().flat_map(|pods| each(pods)));
    let pods = pods.filter(of_it).map(|member| &member.account);
    pods.chain(set).chain(deployment).filter(|account| !account.is_empty()).cloned().collect()
}

/// A binding without its policy refuses nothing, and the other way round.
fn missing(
    mut policy: ValidatingAdmissionPolicy,
    mut binding: ValidatingAdmissionPolicyBinding,
    existing: &Existing,
    name: &str,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let there = existing.policies.get(name);
    if there.is_none_or(|there| there.spec != policy.spec || !has_labels(&there.metadata, &policy.metadata)) {
        policy.metadata.resource_version = there.and_then(|there| there.metadata.resource_version.clone());
        actions.push(Action::WritePolicy(Box::new(policy)));
    }
    let there = existing.bindings.get(name);
    if there.is_none_or(|there| there.spec != binding.spec || !has_labels(&there.metadata, &binding.metadata)) {
        binding.metadata.resource_version = there.and_then(|there| there.metadata.resource_version.clone());
        actions.push(Action::WriteBinding(Box::new(binding)));
    }
    actions
}

fn has_labels(there: &ObjectMeta, wanted: &ObjectMeta) -> bool {
    let there = there.labels.as_ref();
    wanted.labels.iter().flatten().all(|(key, value)| there.and_then(|labels| labels.get(key)) == Some(value))
}

/// What no root needs, by the root that its labels name. Without labels it is somebody else's.
fn superfluous(existing: &Existing, kept: &BTreeSet<String>) -> Vec<(String, Vec<Action>)> {
    let is_left = |name: &String, meta: &ObjectMeta| {
        let labels = meta.labels.as_ref();
        labels.is_some_and(|labels| labels.contains_key(label::FENCE_ROOT)) && !kept.contains(name)
    };
    let bindings = existing.bindings.iter().filter(|(name, binding)| is_left(name, &binding.metadata));
    let bindings = bindings
        .map(|(_, binding)| (labelled(&binding.metadata), vec![Action::RemoveBinding(Box::new(binding.clone()))]));
    let policies = existing.policies.iter().filter(|(name, policy)| is_left(name, &policy.metadata));
    let policies =
        policies.map(|(_, policy)| (labelled(&policy.metadata), vec![Action::RemovePolicy(Box::new(policy.clone()))]));
    bindings.chain(policies).collect()
}

fn labelled(meta: &ObjectMeta) -> String {
    let of = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key)).map_or("", String::as_str);
    format!("{}/{}", of(label::FENCE_NAMESPACE), of(label::FENCE_ROOT))
}

#[cfg(test)]
mod tests;
