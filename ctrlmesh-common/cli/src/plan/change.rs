//! Says who owns what before and after a root is applied, and what moves.
//!
//! Pure. The shares are divided as the manager divides them, from the same table.

mod load;
mod root_plan;

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{OnLoss, Root, ShardingConfig};
use ctrlmesh_common::names;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::share;
use ctrlmesh_common::slots::{NamespaceHash, Slot};
use ctrlmesh_manager::labels::{is_named, named_resources};
use ctrlmesh_manager::rules::shard::{self, DivideError, Labelling, is_made_by};
use kube::ResourceExt as _;

use super::census::{Census, Owners};
use super::objects::Counted;
use crate::cluster::{NAMESPACES, resource_name};
use crate::load::Load;
use crate::status::shards::{PodOverview, pods};
use crate::text::workload;

use root_plan::imbalance;
pub(crate) use root_plan::{Move, Owned, RootPlan, ShardPlan};

/// How long a move takes as a rule, in seconds. Source: docs/benchmarks.md, where half of them took 0.2 to 0.5 s.
const USUAL_SECONDS: f64 = 0.5;

/// A root as it is, and as it would be.
#[derive(Debug)]
pub(crate) struct Change {
    /// Absent: it is new.
    live: Option<Root>,
    wanted: Root,
    /// What the root as it is comes to.
    before: Ownership,
    after: Ownership,
    /// Slots that are not with their shard yet, whether the root changes or not.
    pending: Vec<Slot>,
    /// Resources that the root selects otherwise, and how.
    selection: Vec<String>,
    /// Whether shards see less of one of them.
    narrows: bool,
    hash: NamespaceHash,
    census: Census,
    /// In a second. `None`: it was not measured.
    load: Option<Load>,
    shards: Vec<ShardingConfig>,
    /// The newest.
    epoch: Option<i64>,
    namespace: String,
    name: String,
}

/// The objects of one resource that a root selects.
#[derive(Debug)]
pub(super) struct Selected {
    /// `None`: none.
    before: Option<Selector>,
    after: Option<Selector>,
    /// Whether its objects are namespaces, each of which is in itself.
    is_namespaces: bool,
    census: Census,
}

impl Change {
    /// Of the root `wanted`, where these ShardingConfigs are in the cluster.
    ///
    /// # Errors
    /// Admission would refuse it.
    pub(super) fn of(
        wanted: &ShardingConfig,
        live: &[ShardingConfig],
        namespaces: &BTreeSet<String>,
        labelling: &Labelling,
    ) -> Result<Self, DivideError> {
        let live_root = live.iter().find(|one| is_same(wanted, one));
        let mut wanted = wanted.clone();
        wanted.status = live_root.and_then(|root| root.status.clone());
        wanted.metadata.uid = live_root.and_then(|root| root.metadata.uid.clone());
        let made: Vec<&ShardingConfig> = live.iter().filter(|one| is_made_by(&wanted, one)).collect();
        let shards = made.iter().map(|shard| (*shard).clone()).collect();
        let table = |root: &ShardingConfig| {
            let divided = shard::divide(root, labelling, namespaces, &made)?;
            Ok(divided.map(|shards| shard::table(&shards, &BTreeMap::new())))
        };
        let written = wanted.status.as_ref().and_then(|status| status.ownership.clone()).map(settled);
        let written = written.unwrap_or_default();
        // A root that is off or invalid moves nothing: what it has written holds.
        let before = live_root.and_then(|root| table(root).ok().flatten()).unwrap_or_else(|| written.clone());
        let after = table(&wanted)?.unwrap_or_else(|| before.clone());
        let is_pending = |(slot, owner): &(&Slot, &String)| written.slots.get(slot).is_some_and(|one| one != *owner);
        let pending = before.slots.iter().filter(is_pending).map(|(slot, _)| *slot).collect();
        Ok(Self {
            live: live_root.and_then(|root| root.spec.root.clone()),
            namespace: wanted.namespace().unwrap_or_default(),
            name: wanted.name_any(),
            wanted: wanted.spec.root.clone().ok_or(DivideError::NoRoot)?,
            before,
            after,
            pending,
            selection: Vec::new(),
            narrows: false,
            hash: labelling.hash,
            census: Census::default(),
            load: None,
            shards,
            epoch: wanted.status.as_ref().and_then(|status| status.epoch),
        })
    }

    /// Which objects of the resource the root selects. `None`: none of them, before and after.
    pub(super) fn select(&mut self, group: &str, plural: &str) -> Option<Selected> {
        let selector = |root: &Root| {
            let is_named = is_named(&named_resources(root), group, plural);
            is_named.then(|| share::divided(root, group, plural)).flatten()
        };
        let before = self.live.as_ref().and_then(selector);
        let after = if self.is_off() { before.clone() } else { selector(&self.wanted) };
        if self.live.is_some() {
            self.compare(before.as_ref(), after.as_ref(), &resource_name(group, plural));
        }
        let is_namespaces = (group, plural) == NAMESPACES;
        let census = Census::default();
        (before.is_some() || after.is_some()).then_some(Selected { before, after, is_namespaces, census })
    }

    fn compare(&mut self, before: Option<&Selector>, after: Option<&Selector>, resource: &str) {
        let how = match (before, after) {
            _ if before == after => return,
            (None, _) => "anew",
            (_, None) => "no more",
            _ => "by another selector",
        };
        self.selection.push(format!("{resource} {how}"));
        // What is not divided, every pod sees. A selector with fewer requirements selects no less.
        let is_wider = |before: &Selector, after: &Selector| {
            after.requirements().iter().all(|one| before.requirements().contains(one))
        };
        self.narrows |= after.is_some_and(|after| before.is_none_or(|before| !is_wider(before, after)));
    }

    fn is_off(&self) -> bool {
        self.wanted.disable == Some(true)
    }

    /// Counts an object of the resource, by its owners.
    pub(super) fn count(&self, selected: &mut Selected, object: Counted<'_>) {
        let namespace = if selected.is_namespaces { Some(object.name) } else { object.namespace };
        let slot = self.hash.slot(namespace.unwrap_or(object.name));
        let selects =
            |selector: &Option<Selector>| selector.as_ref().is_some_and(|selector| selector.matches(object.labels));
        selected.census.count(slot, namespace, selects(&selected.before), selects(&selected.after));
    }

    /// Takes up what was counted of a resource.
    pub(super) fn add(&mut self, selected: Selected) {
        self.census.add(selected.census);
    }

    /// Takes the objects that were counted for another change of the same root, which selects the same objects.
    pub(crate) fn count_as(&mut self, other: &Self) {
        self.census = other.census.clone();
    }

    /// The objects that go with each slot of the root as it would be.
    pub(crate) fn by_slot(&self) -> BTreeMap<Slot, u64> {
        self.census.by_slot(&self.after)
    }

    fn pods_of(&self, shard: &str) -> Vec<PodOverview> {
        let config = self.shards.iter().find(|one| one.name_any() == shard);
        config.map(|config| pods(config, self.epoch)).unwrap_or_default()
    }

    pub(crate) fn plan(&self) -> RootPlan {
        let is_off = self.is_off();
        let objects = self.census.by_owners(&self.before, &self.after);
        let shards = self.shard_plans(&objects);
        let moves = self.moves(&objects);
        let pods_of = |shard: &str| self.pods_of(shard).into_iter().map(|pod| pod.name);
        let of_shares = || moves.iter().filter(|one| !one.slots.is_empty() || !one.namespaces.is_empty());
        let from: BTreeSet<&str> = of_shares().filter_map(|one| one.from.as_deref()).collect();
        let to: BTreeSet<&str> = of_shares().filter_map(|one| one.to.as_deref()).collect();
        let all: BTreeSet<&str> = shards.iter().map(|shard| shard.name.as_str()).collect();
        let losing = if self.narrows { &all } else { &from };
        let restarts = self.wanted.on_loss == Some(OnLoss::Restart);
        let restarted_pods = losing.iter().filter(|_| restarts).flat_map(|shard| pods_of(shard)).collect();
        let changed = if self.selection.is_empty() { from.union(&to).copied().collect() } else { all };
        let changed_pods = changed.into_iter().flat_map(pods_of).collect();
        // What a normal shard of an elastic root has no pod for, others have.
        let canary = names::shard(&self.wanted.prefix, 0).ok();
        let waits = |shard: &&&str| !self.wanted.is_elastic() || canary.as_deref() == Some(**shard);
        let without_pods = to.iter().filter(waits).filter(|shard| pods_of(shard).next().is_none());
        let without_pods = without_pods.map(|shard| (*shard).to_owned());
        let late_pods =
            from.iter().flat_map(|shard| self.pods_of(shard)).filter(|pod| !pod.current).map(|pod| pod.name);
        RootPlan {
            expected_seconds: (!from.is_empty() || !to.is_empty()).then_some(USUAL_SECONDS),
            late_pods: late_pods.collect(),
            workload: workload(&self.wanted),
            is_new: self.live.is_none(),
            is_off,
            is_elastic: self.wanted.is_elastic(),
            imbalance_before: imbalance(&shards, |shard| &shard.before, |owned| owned.objects),
            load_imbalance_before: imbalance(&shards, |shard| &shard.before, load::thousandths),
            imbalance_after: imbalance(&shards, |shard| &shard.after, |owned| owned.objects),
            load_imbalance_after: imbalance(&shards, |shard| &shard.after, load::thousandths),
            restarted_pods,
            changed_pods,
            without_pods: without_pods.collect(),
            selection: self.selection.clone(),
            pending: self.pending.clone(),
            shards,
            moves,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    fn shard_plans(&self, counts: &BTreeMap<Owners, u64>) -> Vec<ShardPlan> {
        let owners = |table: &Ownership| {
            let owners = table.slots.values().chain(table.namespaces.values());
            owners.cloned().collect::<BTreeSet<String>>()
        };
        let names: BTreeSet<String> = owners(&self.before).union(&owners(&self.after)).cloned().collect();
        let objects = |is_of: &dyn Fn(&Owners) -> bool| {
            counts.iter().filter(|(owners, _)| is_of(owners)).map(|(_, count)| count).sum()
        };
        let plan = |name: String| ShardPlan {
            before: Owned {
                objects: objects(&|(before, _)| before.as_ref() == Some(&name)),
                requests_per_second: self.requests(&name, &self.before),
                ..Owned::of(&name, &self.before)
            },
            after: Owned {
                objects: objects(&|(_, after)| after.as_ref() == Some(&name)),
                requests_per_second: self.requests(&name, &self.after),
                ..Owned::of(&name, &self.after)
            },
            name,
        };
        names.into_iter().map(plan).collect()
    }

    fn moves(&self, counts: &BTreeMap<Owners, u64>) -> Vec<Move> {
        let mut moves: BTreeMap<Owners, Move> = BTreeMap::new();
        let mut of = |from: Option<&str>, to: Option<&str>, add: &dyn Fn(&mut Move)| {
            let key = (from.map(str::to_owned), to.map(str::to_owned));
            let (slots, namespaces) = (Vec::new(), Vec::new());
            let objects = counts.get(&key).copied().unwrap_or_default();
            let empty = || Move { from: key.0.clone(), to: key.1.clone(), slots, namespaces, objects };
            add(moves.entry(key.clone()).or_insert_with(empty));
        };
        let slots: BTreeSet<Slot> = self.before.slots.keys().chain(self.after.slots.keys()).copied().collect();
        for slot in slots {
            let (from, to) = (self.before.owner(slot, None), self.after.owner(slot, None));
            if from != to {
                of(from, to, &|one| one.slots.push(slot));
            }
        }
        let pinned = self.before.namespaces.keys().chain(self.after.namespaces.keys());
        for namespace in pinned.collect::<BTreeSet<_>>() {
            let slot = self.hash.slot(namespace);
            let owner = |table: &Ownership| table.owner(slot, Some(namespace)).map(str::to_owned);
            let (from, to) = (owner(&self.before), owner(&self.after));
            if from != to {
                of(from.as_deref(), to.as_deref(), &|one| one.namespaces.push(namespace.clone()));
            }
        }
        // Also what the root selects from now on, or no more.
        for (from, to) in counts.keys().filter(|(from, to)| from != to) {
            of(from.as_deref(), to.as_deref(), &|_| {});
        }
        moves.into_values().collect()
    }
}

/// Whether both have one namespace and name.
pub(crate) fn is_same(one: &ShardingConfig, other: &ShardingConfig) -> bool {
    one.namespace() == other.namespace() && one.name_any() == other.name_any()
}

/// What is on its way counts for its former owner, as in the manager.
pub(crate) fn settled(mut table: Ownership) -> Ownership {
    if let Some(revoked) = table.revoked.take() {
        for (slot, owner) in revoked.slots {
            table.slots.entry(slot).or_insert(owner);
        }
        for (namespace, owner) in revoked.namespaces {
            table.namespaces.entry(namespace).or_insert(owner);
        }
    }
    table
}

#[cfg(test)]
mod tests;
