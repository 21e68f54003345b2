//! Are two ShardingConfigs of one operator?
//!
//! Those of a namespace whose pods belong to the same `StatefulSet` or Deployment, and those that name the same
//! leader-election lock. Where neither tells whose a shard is, it could be of any operator. A root stands for all its
//! shards, which are compared neither with it nor with each other while it divides: that they share nothing follows from
//! the root, and while they are being changed, one by one, each stands beside old states of the others. Once it is
//! switched off they are whatever somebody writes into them.
//! A root that is switched off still gives the pods of its target to the shards that it has.
//!
//! Whose a shard is, its owner reference says, as to Kubernetes: one whose owner is gone is about to be collected.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{LabelSelector, SelectorOperator, ShardingConfig};
use ctrlmesh_common::names::{self, label};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Why two ShardingConfigs stand in each other's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// Their pods belong to the same `StatefulSet` or Deployment, or they name the same lock.
    Same,
    /// They are roots with the same target.
    Target,
    /// They are roots whose shards would have the same names.
    Prefix,
    /// One of them names no lock, and nothing says that they are of different operators.
    Unknown,
}

/// What says whose a ShardingConfig is.
#[derive(Clone, Debug)]
pub(super) struct Affiliation<'a> {
    config: &'a ShardingConfig,
    owner: Owner<'a>,
    workloads: Option<BTreeSet<Workload<'a>>>,
    /// See [`places`].
    places: bool,
}

/// A `StatefulSet` or a Deployment, by kind and name.
pub(super) type Workload<'a> = (&'static str, &'a str);

/// The root that owns a ShardingConfig.
#[derive(Clone, Copy, Debug)]
enum Owner<'a> {
    Nobody,
    Root(&'a ShardingConfig),
    /// It is not there, or not any more.
    Gone,
}

// === impl Affiliation ===

impl<'a> Affiliation<'a> {
    /// Of `config`, where `near` are those of its namespace.
    pub(super) fn of(config: &'a ShardingConfig, near: &[&'a ShardingConfig]) -> Self {
        Self {
            config,
            owner: owner(config, near),
            workloads: workloads(config),
            places: places(config, near),
        }
    }

    /// Its lock, if it names one.
    pub(super) fn lock(&self) -> Option<&'a str> {
        let controller = self.config.spec.controller.as_ref();
        controller.map(|controller| controller.leader_election_name.as_str())
    }

    /// The workloads that its pods belong to, as far as it says.
    pub(super) fn workloads(&self) -> impl Iterator<Item = Workload<'a>> {
        self.workloads.iter().flatten().copied()
    }

    /// What the names of its shards begin with, if it is a root.
    pub(super) fn prefix(&self) -> Option<&'a str> {
        self.config.spec.root.as_ref().map(|root| root.prefix.as_str())
    }

    /// Whether something says whose it is.
    pub(super) fn is_known(&self) -> bool {
        self.lock().is_some() || self.workloads.is_some()
    }

    /// Whether it is no root, and made by none.
    pub(super) fn is_by_hand(&self) -> bool {
        self.prefix().is_none() && matches!(self.owner, Owner::Nobody)
    }

    /// Why this one cannot stand beside the other; none where they are of different operators, or where one makes the other,
    /// or makes nothing. To be switched off is never in anybody's way.
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
            // Whatever the locks are: the pods of one workload run one operator.
            (Some(false), ..) => Some(Relation::Same),
            (_, Some(one), Some(other)) => (one == other).then_some(Relation::Same),
            (Some(true), ..) => None,
            (None, ..) => Some(Relation::Unknown),
        }
    }

    /// Whether one root answers for both, or its going takes one of them with it.
    fn is_family(&self, other: &Self) -> bool {
        match (self.owner, other.owner) {
            (Owner::Gone, _) | (_, Owner::Gone) => true,
            (Owner::Root(one), Owner::Root(other)) => is_same(one, other) && !is_off(one),
            (Owner::Root(root), Owner::Nobody) => is_same(root, other.config),
            (Owner::Nobody, Owner::Root(root)) => is_same(root, self.config),
            (Owner::Nobody, Owner::Nobody) => false,
        }
    }

    /// Whether it is a root that would make a shard called as `other`, which is not its own.
    pub(super) fn would_make(&self, other: &Self) -> bool {
        let own = match other.owner {
            Owner::Root(root) => is_same(root, self.config),
            Owner::Gone => true,
            Owner::Nobody => false,
        };
        !own && !is_off(self.config)
            && shards(self.config)
                .iter()
                .any(|name| other.config.metadata.name.as_ref() == Some(name))
    }
}

/// The names of the shards that a root makes.
fn shards(config: &ShardingConfig) -> Vec<String> {
    let Some(root) = &config.spec.root else { return Vec::new() };
    let canary = root.canary.as_ref().map(|_| 0);
    let auto = root.auto.iter().flat_map(|auto| 1..=auto.sharding_size);
    let ids = canary.into_iter().chain(auto).chain(root.manual.iter().map(|manual| manual.id));
    let ids = ids.filter_map(|id| usize::try_from(id).ok());
    ids.filter_map(|id| names::shard(&root.prefix, id).ok()).collect()
}

fn owner<'a>(config: &ShardingConfig, near: &[&'a ShardingConfig]) -> Owner<'a> {
    let owners = config.metadata.owner_references.iter().flatten();
    let ours = |owner: &&OwnerReference| {
        owner.controller == Some(true)
            && owner.kind == "ShardingConfig"
            && owner.api_version.split('/').next() == Some(names::GROUP)
    };
    let Some(owner) = owners.into_iter().find(ours) else { return Owner::Nobody };
    // One that was read from a file has no UID.
    let is_owner = |root: &&&ShardingConfig| match &root.metadata.uid {
        Some(uid) => *uid == owner.uid,
        None => root.metadata.name.as_deref() == Some(&owner.name),
    };
    let mut roots = near.iter().filter(|config| config.spec.root.is_some());
    roots.find(is_owner).map_or(Owner::Gone, |root| Owner::Root(root))
}

/// Whether it gives the pods of its target to shards: a root does as long as it has any, also where it is switched off.
pub(super) fn places(config: &ShardingConfig, near: &[&ShardingConfig]) -> bool {
    let made = |one: &&ShardingConfig| matches!(owner(one, near), Owner::Root(root) if is_same(root, config));
    config.spec.root.is_some() && (!is_off(config) || near.iter().any(made))
}

/// Whether it is a root that is switched off.
pub(super) fn is_off(config: &ShardingConfig) -> bool {
    config.spec.root.as_ref().is_some_and(|root| root.disable == Some(true))
}

/// Whether the two, of one namespace, are one, perhaps in two states.
fn is_same(one: &ShardingConfig, other: &ShardingConfig) -> bool {
    one.metadata.name == other.metadata.name
}

/// The workloads that its pods belong to; none where it does not say.
fn workloads(config: &ShardingConfig) -> Option<BTreeSet<Workload<'_>>> {
    if let Some(root) = &config.spec.root {
        let targets = [
            ("StatefulSet", root.target_stateful_set.as_deref()),
            ("Deployment", root.target_deployment.as_deref()),
        ];
        return Some(targets.into_iter().filter_map(|(kind, name)| Some((kind, name?))).collect());
    }
    let pods = pod_names(config.spec.selector.as_ref()?)?;
    Some(pods.into_iter().map(|pod| ("StatefulSet", stateful_set(pod))).collect())
}

/// The `StatefulSet` of a pod that has its name as a label.
pub(super) fn stateful_set(pod: &str) -> &str {
    pod.rsplit_once('-').map_or("", |(name, _)| name)
}

/// The pods that the selector names by themselves.
pub(super) fn pod_names(selector: &LabelSelector) -> Option<Vec<&str>> {
    if let Some(name) = selector.match_labels.get(label::STATEFULSET_POD_NAME) {
        return Some(vec![name.as_str()]);
    }
    let mut named = selector.match_expressions.iter().filter(|one| {
        one.key == label::STATEFULSET_POD_NAME && one.operator == SelectorOperator::In
    });
    named.next().map(|one| one.values.iter().map(String::as_str).collect())
}
