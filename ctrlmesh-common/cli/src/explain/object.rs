//! Explains to whom an object belongs, and who may write it.
//!
//! Pure.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{ResourceSelector, Root, ShardingConfig};
use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shard::Labelling;
use jiff::Timestamp;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::ResourceExt as _;
use serde::Serialize;

use super::fencing::{self, Fencing, PodAnswers};
use super::hashing::Hashing;
use super::since::{self, Since};
use super::target::Written;
use super::writes::{LastWrite, SoleWriter, last_writes};
use crate::owner::alone::LoneShard;
use crate::owner::object::Object;
use crate::owner::owners::{Owners, RootOwner};
use crate::status::shards::LimitOverview;

/// What was read beside the owners of an object.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) managed_fields: Vec<ManagedFieldsEntry>,
    /// Of the namespace that the object is in. `None`: it is in none, or they cannot be read.
    pub(super) namespace_labels: Option<Labels>,
    /// By namespace and name of the root.
    pub(super) roots: BTreeMap<(String, String), RootFacts>,
    /// What cannot be read, and why.
    pub(super) not_known: Vec<String>,
}

/// What was read of one root.
#[derive(Debug, Default)]
pub(super) struct RootFacts {
    /// Its workload's enrolled pods.
    pub(super) pods: Vec<Member>,
    /// Events with the reason `Granted`.
    pub(super) granted: Vec<Event>,
    pub(super) lock: Option<LockHolder>,
}

/// Who holds the leader-election Lease of the owning shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LockHolder {
    /// Name of the Lease on the API server.
    pub(super) lease: String,
    /// Absent: nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) holder: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) renewed: Option<Timestamp>,
}

/// All of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Explanation {
    #[serde(flatten)]
    pub(super) object: Object,
    pub(super) slot: Slot,
    pub(super) missing_labels: Vec<String>,
    pub(super) hashing: Hashing,
    pub(super) roots: Vec<RootExplanation>,
    pub(super) shards: Vec<LoneShard>,
    pub(super) last_writes: Vec<LastWrite>,
    /// What cannot be read, and why.
    pub(super) not_known: Vec<String>,
}

/// What one root comes to.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RootExplanation {
    #[serde(flatten)]
    pub(super) owner: RootOwner,
    pub(super) divided_by: Vec<DividedBy>,
    /// Absent: nobody owns it, or no source tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<Since>,
    /// What the root waits for. Absent: nothing of it is on its way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) moving: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lock: Option<LockHolder>,
    pub(super) fencing: Fencing,
    pub(super) answers: Vec<PodAnswers>,
}

/// An entry of `spec.root.resourceSelector` that has the resource.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DividedBy {
    /// Which one. Absent: the root has none, and divides every resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) entry: Option<usize>,
    #[serde(flatten)]
    pub(super) limit: LimitOverview,
}

/// Explains `owners`, by what the ShardingConfigs `configs` say.
pub(super) fn explanation(
    owners: Owners,
    configs: &[ShardingConfig],
    labelling: &Labelling,
    facts: Facts,
) -> Explanation {
    let Owners { object, slot, missing_labels, roots, shards } = owners;
    let hashing = Hashing::of(&object, labelling);
    let of_root = |owner: RootOwner| {
        let is_it = |config: &&ShardingConfig| {
            config.spec.root.is_some()
                && config.namespace().as_deref() == Some(&owner.namespace)
                && config.name_any() == owner.name
        };
        let root = configs.iter().find(is_it)?;
        Some(RootExplanation::of(root, root.spec.root.as_ref()?, owner, &object, (slot, labelling), &facts))
    };
    let roots: Vec<RootExplanation> = roots.into_iter().filter_map(of_root).collect();
    let sole: Vec<SoleWriter> = roots.iter().filter_map(RootExplanation::sole_writer).collect();
    let last_writes = last_writes(&facts.managed_fields, &sole);
    Explanation { object, slot, missing_labels, hashing, roots, shards, last_writes, not_known: facts.not_known }
}

impl RootExplanation {
    fn of(
        root: &ShardingConfig,
        rule: &Root,
        owner: RootOwner,
        object: &Object,
        (slot, labelling): (Slot, &Labelling),
        facts: &Facts,
    ) -> Self {
        let nothing = RootFacts::default();
        let of_root = facts.roots.get(&(owner.namespace.clone(), owner.name.clone())).unwrap_or(&nothing);
        let written = Written {
            group: &object.group,
            resource: &object.resource,
            subresource: "",
            namespace: object.namespace.as_deref(),
            name: &object.name,
            labels: if object.namespace.is_some() { facts.namespace_labels.as_ref() } else { Some(&object.labels) },
        };
        let pods: Vec<&Member> = of_root.pods.iter().collect();
        Self {
            divided_by: divided_by(rule, object),
            since: since::since(root, &owner, (slot, object.counted_namespace()), &of_root.granted),
            moving: since::moving(root),
            lock: of_root.lock.clone(),
            fencing: Fencing::of(root, rule),
            answers: fencing::answers(root, &written, &pods, labelling),
            owner,
        }
    }

    /// The owner, where nobody else of the workload may write the object.
    fn sole_writer(&self) -> Option<SoleWriter> {
        let since = self.since.as_ref().filter(|_| self.owner.fenced && self.owner.selected)?.time;
        let shard = self.owner.shard.clone().filter(|shard| shard != UNSHARDED)?;
        Some(SoleWriter { root: format!("{}/{}", self.owner.namespace, self.owner.name), shard, since })
    }
}

fn divided_by(rule: &Root, object: &Object) -> Vec<DividedBy> {
    if rule.resource_selector.is_empty() {
        return vec![DividedBy { entry: None, limit: LimitOverview::of_root(&ResourceSelector::default()) }];
    }
    let covers = |one: &ResourceSelector| {
        let mut resources = one.relate_resources.iter().map(ResourceMatch::from);
        one.relate_resources.is_empty() || resources.any(|one| one.covers(&object.group, &object.resource))
    };
    let covering = rule.resource_selector.iter().enumerate().filter(|(_, one)| covers(one));
    covering.map(|(at, one)| DividedBy { entry: Some(at), limit: LimitOverview::of_root(one) }).collect()
}

#[cfg(test)]
mod tests;
