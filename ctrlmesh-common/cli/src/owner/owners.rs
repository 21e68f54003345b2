//! Says which shard of each root an object belongs to, by which rule, and whether its pods see the object.
//!
//! Pure.

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Fence;
use ctrlmesh_common::share;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_manager::labels::{is_named, named_resources};
use ctrlmesh_manager::rules::fenced::is_fenced;
use ctrlmesh_manager::rules::shard::{Labelling, is_made_by};
use kube::ResourceExt as _;
use serde::Serialize;

use super::alone::{self, LoneShard};
use super::object::Object;
use crate::status::shards::{PodOverview, pods};
use crate::text::workload;

/// What is known of an object's owners.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Owners {
    #[serde(flatten)]
    pub(crate) object: Object,
    pub(crate) slot: Slot,
    /// Labels of the mesh that the object lacks, as `KEY=VALUE`: no shard sees it before it has them.
    pub(crate) missing_labels: Vec<String>,
    /// The roots that divide its resource.
    pub(crate) roots: Vec<RootOwner>,
    /// The shards that stand alone, and limit its resource.
    pub(crate) shards: Vec<LoneShard>,
}

/// What one root says of an object.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RootOwner {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) workload: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<i64>,
    /// Whether the root's selector has the object. If not, none of its shards sees it.
    pub(crate) selected: bool,
    /// Whether the root has writes refused to pods that do not own the object's slot.
    pub(crate) fenced: bool,
    /// Absent: nobody owns it now. `unsharded`: the workload's pods that are not enrolled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shard: Option<String>,
    /// The shard that it is being taken from. Absent: it is not moving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) taken_from: Option<String>,
    pub(crate) rule: Rule,
    pub(crate) pods: Vec<PodOverview>,
}

/// By what an object belongs to its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Rule {
    /// The root pins its namespace.
    Namespace,
    /// By its slot.
    Slot,
    /// By none: `*` in the root does not stand for this resource, so the manager does not label it.
    Unlabelled,
    /// By none: the root is switched off, and its shards stand alone.
    Disabled,
}

/// The owners of an object, by the `labelling` in force.
pub(crate) fn owners(object: Object, configs: &[ShardingConfig], labelling: &Labelling) -> Owners {
    let namespace = object.counted_namespace();
    let (slot, wanted) = match namespace {
        Some(namespace) => (labelling.hash.slot(namespace), labelling.of_namespace(namespace)),
        None => (labelling.hash.slot(&object.name), labelling.of_cluster_object(&object.name)),
    };
    let lacks = |(key, value): &(&str, String)| object.labels.get(*key) != Some(value);
    let missing = wanted.iter().filter(|label| lacks(label)).map(|(key, value)| format!("{key}={value}"));
    let missing_labels: Vec<String> = missing.collect();
    let of_root = |root: &ShardingConfig| {
        let rule = root.spec.root.as_ref()?;
        let selector = share::divided(rule, &object.group, &object.resource)?;
        let without_owner = RootOwner::of(root, rule, selector.matches(&object.labels), &object);
        let is_named = is_named(&named_resources(rule), &object.group, &object.resource);
        Some(match without_owner {
            off if off.rule == Rule::Disabled => off,
            one if !is_named && !missing_labels.is_empty() => RootOwner { rule: Rule::Unlabelled, ..one },
            one => one.by_table(root, slot, namespace, configs),
        })
    };
    let roots = configs.iter().filter_map(of_root).collect();
    let shards = alone::shards(&object, configs);
    Owners { object, slot, missing_labels, roots, shards }
}

impl RootOwner {
    /// Without an owner yet.
    fn of(root: &ShardingConfig, rule: &Root, selected: bool, object: &Object) -> Self {
        let fence = Fence { resources: named_resources(rule), ..Fence::default() };
        Self {
            namespace: root.namespace().unwrap_or_default(),
            name: root.name_any(),
            workload: workload(rule),
            epoch: root.status.as_ref().and_then(|status| status.epoch),
            selected,
            fenced: is_fenced(rule) && fence.covers(&object.group, &object.resource),
            shard: None,
            taken_from: None,
            rule: if rule.disable == Some(true) { Rule::Disabled } else { Rule::Slot },
            pods: Vec::new(),
        }
    }

    /// The same with the owner by the root's table.
    fn by_table(self, root: &ShardingConfig, slot: Slot, namespace: Option<&str>, configs: &[ShardingConfig]) -> Self {
        let nothing = Ownership::default();
        let table = root.status.as_ref().and_then(|status| status.ownership.as_ref()).unwrap_or(&nothing);
        let shard = table.owner(slot, namespace).map(str::to_owned);
        let is_pinned = |namespace| {
            let revoked = table.revoked.as_ref();
            table.namespaces.contains_key(namespace)
                || revoked.is_some_and(|one| one.namespaces.contains_key(namespace))
        };
        let taken_from = table.revoked.as_ref().filter(|_| shard.is_none()).and_then(|revoked| {
            let pinned = namespace.and_then(|namespace| revoked.namespaces.get(namespace));
            pinned.or_else(|| revoked.slots.get(&slot)).cloned()
        });
        let is_shard =
            |config: &&ShardingConfig| is_made_by(root, config) && Some(&config.name_any()) == shard.as_ref();
        Self {
            taken_from,
            rule: if namespace.is_some_and(is_pinned) { Rule::Namespace } else { Rule::Slot },
            pods: configs.iter().find(is_shard).map(|shard| pods(shard, self.epoch)).unwrap_or_default(),
            shard,
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
