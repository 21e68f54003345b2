//! Says which shard of each root an object belongs to, by which rule, and whether its pods see the object.
//!
//! Pure.

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::{Labels, Selector};
use ctrlmesh_common::slots::Slot;
use ctrlmesh_manager::rules::shard::Labelling;
use kube::ResourceExt as _;
use serde::Serialize;

use crate::status::overview::{PodOverview, pods};
use crate::text::workload;

/// The resource of namespaces, whose objects are in the slot of their own name, and in the namespace of it.
const NAMESPACES: (&str, &str) = ("", "namespaces");

/// An object that somebody owns.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Object {
    pub(super) group: String,
    pub(super) resource: String,
    /// Absent for one of cluster scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    #[serde(skip)]
    pub(super) labels: Labels,
}

/// What is known of an object's owners.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Owners {
    #[serde(flatten)]
    pub(super) object: Object,
    pub(super) slot: Slot,
    /// Labels of the mesh that the object lacks, as `KEY=VALUE`: no shard sees it before it has them.
    pub(super) missing_labels: Vec<String>,
    /// The roots that divide it.
    pub(super) roots: Vec<RootOwner>,
}

/// What one root says of an object.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RootOwner {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) workload: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) epoch: Option<i64>,
    /// Whether the root's selector has the object. If not, none of its shards sees it.
    pub(super) selected: bool,
    /// Whether the root is switched off. Then this is from before, and its shards stand alone.
    pub(super) disabled: bool,
    /// Absent: nobody owns it now. `unsharded`: the workload's pods that are not enrolled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shard: Option<String>,
    /// The shard that it is being taken from. Absent: it is not moving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) taken_from: Option<String>,
    pub(super) rule: Rule,
    pub(super) pods: Vec<PodOverview>,
}

/// By what an object belongs to its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Rule {
    /// The root pins its namespace.
    Namespace,
    /// By its slot.
    Slot,
}

impl Object {
    /// Whether it is the object of a namespace.
    fn is_namespace(&self) -> bool {
        (self.group.as_str(), self.resource.as_str()) == NAMESPACES
    }

    /// The namespace that counts for it.
    fn counted_namespace(&self) -> Option<&str> {
        if self.is_namespace() { Some(&self.name) } else { self.namespace.as_deref() }
    }
}

/// The owners of an object, by the `labelling` in force.
pub(super) fn owners(object: Object, configs: &[ShardingConfig], labelling: &Labelling) -> Owners {
    let namespace = object.counted_namespace();
    let (slot, wanted) = match namespace {
        Some(namespace) => (labelling.hash.slot(namespace), labelling.of_namespace(namespace)),
        None => (labelling.hash.slot(&object.name), labelling.of_cluster_object(&object.name)),
    };
    let lacks = |(key, value): &(&str, String)| object.labels.get(*key) != Some(value);
    let missing = wanted.iter().filter(|label| lacks(label)).map(|(key, value)| format!("{key}={value}"));
    let missing_labels = missing.collect();
    let of_root = |root: &ShardingConfig| {
        let rule = root.spec.root.as_ref()?;
        let selected = is_selected(rule, &object)?;
        Some(RootOwner::of(root, rule, selected, slot, namespace, configs))
    };
    let roots = configs.iter().filter_map(of_root).collect();
    Owners { object, slot, missing_labels, roots }
}

/// Whether a root's selector has the object; `None` where the root does not divide its resource.
fn is_selected(rule: &Root, object: &Object) -> Option<bool> {
    if rule.resource_selector.is_empty() {
        return Some(true);
    }
    let covers = |one: &ResourceMatch| one.covers(&object.group, &object.resource);
    let covering = rule.resource_selector.iter().filter(|one| {
        one.relate_resources.is_empty() || one.relate_resources.iter().any(|related| covers(&related.into()))
    });
    let selected = covering.map(|one| {
        let selector = one.selector.as_ref().map(Selector::try_from);
        selector.is_none_or(|selector| selector.is_ok_and(|selector| selector.matches(&object.labels)))
    });
    // Where several have it, it takes all of them.
    selected.reduce(|one, other| one && other)
}

impl RootOwner {
    fn of(
        root: &ShardingConfig,
        rule: &Root,
        selected: bool,
        slot: Slot,
        namespace: Option<&str>,
        configs: &[ShardingConfig],
    ) -> Self {
        let status = root.status.as_ref();
        let epoch = status.and_then(|status| status.epoch);
        let nothing = Ownership::default();
        let table = status.and_then(|status| status.ownership.as_ref()).unwrap_or(&nothing);
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
        let is_shard = |config: &&ShardingConfig| {
            config.metadata.namespace == root.metadata.namespace && Some(&config.name_any()) == shard.as_ref()
        };
        Self {
            namespace: root.namespace().unwrap_or_default(),
            name: root.name_any(),
            workload: workload(rule),
            epoch,
            disabled: rule.disable.unwrap_or_default(),
            selected,
            taken_from,
            rule: if namespace.is_some_and(is_pinned) { Rule::Namespace } else { Rule::Slot },
            pods: configs.iter().find(is_shard).map(|shard| pods(shard, epoch)).unwrap_or_default(),
            shard,
        }
    }
}

#[cfg(test)]
mod tests;
