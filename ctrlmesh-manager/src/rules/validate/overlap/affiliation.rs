//! Finds out whether two ShardingConfigs are of one operator.
//!
//! They are if their pods belong to the same `StatefulSet` or Deployment, or if they name the same
//! leader-election lock. If a shard names neither, it could be of any operator.
//!
//! An active root stands for its shards: they are compared neither with the root nor with each other, because
//! during a change each is beside old states of the others. The shards of a root that is switched off may
//! contain anything, and are compared. The root still assigns the pods of its target to them.
//!
//! The owner reference decides which root a shard belongs to. A shard without its owner is about to be
//! garbage collected.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{LabelSelector, SelectorOperator, ShardingConfig};
use ctrlmesh_common::names::{self, label};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Why two ShardingConfigs conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// Same `StatefulSet`, Deployment or lock.
    Same,
    /// Roots with the same target.
    Target,
    /// Roots whose shards would have the same names.
    Prefix,
    /// One of them names no lock, and nothing tells their operators apart.
    Unknown,
}

/// The operator of a ShardingConfig, as far as it is known.
#[derive(Clone, Debug)]
pub(super) struct Affiliation<'a> {
    config: &'a ShardingConfig,
    owner: Owner<'a>,
    workloads: Option<BTreeSet<Workload<'a>>>,
    /// See [`places`].
    places: bool,
}

/// Kind and name.
pub(super) type Workload<'a> = (&'static str, &'a str);

#[derive(Clone, Copy, Debug)]
enum Owner<'a> {
    Nobody,
    Root(&'a ShardingConfig),
    /// The owner does not exist any more.
    Gone,
}

impl<'a> Affiliation<'a> {
    /// `near` are the configs of its namespace.
    pub(super) fn of(config: &'a ShardingConfig, near: &[&'a ShardingConfig]) -> Self {
        Self { config, owner: owner(config, near), workloads: workloads(config), places: places(config, near) }
    }

    pub(super) fn lock(&self) -> Option<&'a str> {
        let controller = self.config.spec.controller.as_ref();
        controller.map(|controller| controller.leader_election_name.as_str())
    }

    /// Of its pods, as far as they are known.
    pub(super) fn workloads(&self) -> impl Iterator<Item = Workload<'a>> {
        self.workloads.iter().flatten().copied()
    }

    /// Of the names of a root's shards.
    pub(super) fn prefix(&self) -> Option<&'a str> {
        self.config.spec.root.as_ref().map(|root| root.prefix.as_str())
    }

    /// Whether lock or workload is known.
    pub(super) fn is_known(&self) -> bool {
        self.lock().is_some() || self.workloads.is_some()
    }

    /// Whether it is neither a root nor made by one.
    pub(super) fn is_by_hand(&self) -> bool {
        self.prefix().is_none() && matches!(self.owner, Owner::Nobody)
    }

    /// Why `self` cannot be beside `other`. `None` if their operators differ, or if one of them is inactive
    /// or made by the other. A config may always be switched off.
    pub(super) fn to(&self, other: &Self) -> Option<Relation> {
        if is_off(self.config) || self.is_family(other) {
            return None;
        }
        let roots = self.prefix().zip(other.prefix());
        let both = self.workloads.as_ref().zip(other.workloads.as_ref());
        let apart = both.map(|(mine, theirs)| mine.is_disjoint(theirs));
        if is_off(other.config) {
            let is_others = roots.is_some() && other.places && apart == Some(false);
            return is_others.then_some(Relation::Target);
        }
        match (apart, self.lock(), other.lock()) {
            (Some(false), ..) if roots.is_some() => Some(Relation::Target),
            _ if roots.is_some_and(|(mine, theirs)| mine == theirs) => Some(Relation::Prefix),
            // The pods of one workload are one operator, whatever the locks.
            (Some(false), ..) => Some(Relation::Same),
            (_, Some(one), Some(other)) => (one == other).then_some(Relation::Same),
            (Some(true), ..) => None,
            (None, ..) => Some(Relation::Unknown),
        }
    }

    /// Whether one root is responsible for both, or one will be deleted with the other.
    fn is_family(&self, other: &Self) -> bool {
        match (self.owner, other.owner) {
            (Owner::Gone, _) | (_, Owner::Gone) => true,
            (Owner::Root(one), Owner::Root(other)) => is_same(one, other) && !is_off(one),
            (Owner::Root(root), Owner::Nobody) => is_same(root, other.config),
            (Owner::Nobody, Owner::Root(root)) => is_same(root, self.config),
            (Owner::Nobody, Owner::Nobody) => false,
        }
    }

    /// Whether it is a root that would make a foreign shard of that name.
    pub(super) fn would_make(&self, other: &Self) -> bool {
        let own = match other.owner {
            Owner::Root(root) => is_same(root, self.config),
            Owner::Gone => true,
            Owner::Nobody => false,
        };
        !own && !is_off(self.config)
            && shards(self.config).iter().any(|name| other.config.metadata.name.as_ref() == Some(name))
    }
}

/// Of the shards that a root makes.
fn shards(config: &ShardingConfig) -> Vec<String> {
    let Some(root) = &config.spec.root else { return Vec::new() };
    let canary = root.canary.as_ref().map(|_| 0);
    let auto = root.auto.iter().flat_map(|auto| 1..=auto.sharding_size);
    let ids = canary.into_iter().chain(auto).chain(root.manual.iter().map(|manual| manual.id));
    let ids = ids.filter_map(|id| usize::try_from(id).ok());
    let ids: Vec<usize> = ids.collect();
    let is_second = config.status.as_ref().and_then(|status| status.rollout.as_ref()).is_some_and(|one| one.second);
    let has_second = is_second || root.rollout.is_some();
    let second = ids.iter().filter(|_| has_second).map(|id| names::second_shard(&root.prefix, *id));
    ids.iter().map(|id| names::shard(&root.prefix, *id)).chain(second).filter_map(Result::ok).collect()
}

fn owner<'a>(config: &ShardingConfig, near: &[&'a ShardingConfig]) -> Owner<'a> {
    let owners = config.metadata.owner_references.iter().flatten();
    let ours = |owner: &&OwnerReference| {
        owner.controller == Some(true)
            && owner.kind == "ShardingConfig"
            && owner.api_version.split('/').next() == Some(names::GROUP)
    };
    let Some(owner) = owners.into_iter().find(ours) else { return Owner::Nobody };
    // A root from a file has no UID.
    let is_owner = |root: &&&ShardingConfig| match &root.metadata.uid {
        Some(uid) => *uid == owner.uid,
        None => root.metadata.name.as_deref() == Some(&owner.name),
    };
    let mut roots = near.iter().filter(|config| config.spec.root.is_some());
    roots.find(is_owner).map_or(Owner::Gone, |root| Owner::Root(root))
}

/// Whether it assigns the pods of its target: a root does while it has shards, even if it is switched off.
pub(super) fn places(config: &ShardingConfig, near: &[&ShardingConfig]) -> bool {
    let made = |one: &&ShardingConfig| matches!(owner(one, near), Owner::Root(root) if is_same(root, config));
    config.spec.root.is_some() && (!is_off(config) || near.iter().any(made))
}

/// Whether it is a root that is switched off.
pub(super) fn is_off(config: &ShardingConfig) -> bool {
    config.spec.root.as_ref().is_some_and(|root| root.disable == Some(true))
}

/// Both are of one namespace.
fn is_same(one: &ShardingConfig, other: &ShardingConfig) -> bool {
    one.metadata.name == other.metadata.name
}

/// The workloads of its pods, if they are known.
fn workloads(config: &ShardingConfig) -> Option<BTreeSet<Workload<'_>>> {
    if let Some(root) = &config.spec.root {
        let targets =
            [("StatefulSet", root.target_stateful_set.as_deref()), ("Deployment", root.target_deployment.as_deref())];
        return Some(targets.into_iter().filter_map(|(kind, name)| Some((kind, name?))).collect());
    }
    let pods = pod_names(config.spec.selector.as_ref()?)?;
    Some(pods.into_iter().map(|pod| ("StatefulSet", stateful_set(pod))).collect())
}

/// The `StatefulSet` of the pod called `pod`.
pub(super) fn stateful_set(pod: &str) -> &str {
    pod.rsplit_once('-').map_or("", |(name, _)| name)
}

/// The pods that the selector lists by name.
pub(super) fn pod_names(selector: &LabelSelector) -> Option<Vec<&str>> {
    if let Some(name) = selector.match_labels.get(label::STATEFULSET_POD_NAME) {
        return Some(vec![name.as_str()]);
    }
    let mut named = selector
        .match_expressions
        .iter()
        .filter(|one| one.key == label::STATEFULSET_POD_NAME && one.operator == SelectorOperator::In);
    named.next().map(|one| one.values.iter().map(String::as_str).collect())
}
