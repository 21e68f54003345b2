//! Says what a shard has: pods, and slots by the table of its root, or limits where it stands alone.
//!
//! Pure.

use ctrlmesh_common::api::{LabelSelector, Limit, PodStatus, RelatedResources, ResourceSelector, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::Slot;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::Serialize;

use crate::cluster::resource_name;
use crate::text::{dash, since};

/// What stands for all resources, as in RBAC rules.
const EVERY_RESOURCE: &str = "*";

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShardOverview {
    pub(crate) name: String,
    /// By the table of its root. Empty where it stands alone, too.
    pub(super) slots: Vec<Slot>,
    /// Namespaces that it owns whatever their slot.
    pub(super) namespaces: Vec<String>,
    /// Of a shard that stands alone. Absent: its root divides.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) limits: Vec<LimitOverview>,
    pub(crate) pods: Vec<PodOverview>,
    /// Whether nothing is to be done for it.
    #[serde(skip)]
    pub(super) idle: bool,
}

/// Of these resources a shard sees the objects that the selector matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LimitOverview {
    /// As `PLURAL.GROUP`.
    pub(crate) resources: Vec<String>,
    /// In its string form.
    pub(crate) selector: String,
}

/// A pod, and how far its proxy is.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodOverview {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
    /// That its proxy has. Absent: none yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<i64>,
    /// Whether that is the newest epoch.
    pub(crate) current: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_contact: Option<Timestamp>,
    /// Whether another pod of the shard works in its place.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) stands_by: bool,
}

impl ShardOverview {
    /// A shard by the table of its root.
    pub(super) fn owning(name: &str, table: &Ownership, pods: Vec<PodOverview>) -> Self {
        let (slots, namespaces) = owned(name, table);
        let idle = slots.is_empty() && namespaces.is_empty() && pods.is_empty();
        Self { name: name.to_owned(), slots, namespaces, limits: Vec::new(), pods, idle }
    }

    /// A shard that stands by its own limits: by hand, or of a root that is switched off.
    pub(super) fn alone(shard: &ShardingConfig) -> Self {
        let epoch = shard.status.as_ref().and_then(|status| status.epoch);
        Self {
            name: shard.name_any(),
            slots: Vec::new(),
            namespaces: Vec::new(),
            limits: shard.spec.limits.iter().map(LimitOverview::of).collect(),
            pods: pods(shard, epoch),
            idle: false,
        }
    }
}

impl LimitOverview {
    pub(crate) fn of(limit: &Limit) -> Self {
        Self::new(limit.resources(), limit.objects())
    }

    /// What a root divides. Without a selector, that is every object of the resources.
    pub(crate) fn of_root(divided: &ResourceSelector) -> Self {
        let everything = LabelSelector::default();
        Self::new(&divided.relate_resources, Some(divided.selector.as_ref().unwrap_or(&everything)))
    }

    fn new(resources: &[RelatedResources], objects: Option<&LabelSelector>) -> Self {
        let resources: Vec<String> = resources.iter().flat_map(names).collect();
        let selector = objects.map(|objects| Selector::try_from(objects).map(|one| one.to_string()));
        Self {
            resources: if resources.is_empty() { vec![EVERY_RESOURCE.to_owned()] } else { resources },
            selector: selector.and_then(Result::ok).unwrap_or_else(|| "not a selector".to_owned()),
        }
    }
}

/// Each resource of each group, as `PLURAL.GROUP`; without the group where that is the core one.
fn names(resources: &RelatedResources) -> Vec<String> {
    let of_group =
        |group: &String| resources.resources.iter().map(|plural| resource_name(group, plural)).collect::<Vec<_>>();
    resources.api_groups.iter().flat_map(of_group).collect()
}

impl PodOverview {
    /// The headings of [`Self::cells`].
    pub(crate) const HEAD: [&str; 4] = ["POD", "NODE", "EPOCH", "CONTACT"];

    /// For a table.
    pub(crate) fn cells(&self, now: Timestamp) -> [String; 4] {
        [
            if self.stands_by { format!("{} (stands by)", self.name) } else { self.name.clone() },
            self.node.clone().unwrap_or_else(dash),
            self.epoch.map_or_else(dash, |epoch| epoch.to_string()),
            self.last_contact.map_or_else(dash, |contact| format!("{} ago", since(contact, now))),
        ]
    }
}

/// The slots of a shard by the table of its root, and the namespaces that it owns whatever their slot.
pub(crate) fn owned(shard: &str, table: &Ownership) -> (Vec<Slot>, Vec<String>) {
    let namespaces = table.namespaces.iter().filter(|(_, owner)| *owner == shard).map(|(name, _)| name.clone());
    (table.slots_of(shard).collect(), namespaces.collect())
}

/// The pods of a shard, whose newest epoch this is.
pub(crate) fn pods(shard: &ShardingConfig, epoch: Option<i64>) -> Vec<PodOverview> {
    let overview = |pod: &PodStatus| PodOverview {
        name: pod.name.clone(),
        node: pod.node.clone(),
        epoch: pod.epoch,
        current: pod.epoch.is_some() && pod.epoch == epoch,
        last_contact: pod.last_contact.as_ref().map(|contact| contact.0),
        stands_by: pod.stands_by,
    };
    shard.status.iter().flat_map(|status| &status.pods).map(overview).collect()
}
