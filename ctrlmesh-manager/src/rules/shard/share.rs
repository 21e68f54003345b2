//! Divides slots, namespaces and pods among the shards of a root.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{Auto, Canary, Root, SelectorOperator, ShardingConfig};
use ctrlmesh_common::balance::{Weights, spread};
use ctrlmesh_common::ownership::{Ownership, UNSHARDED};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};

use super::Labelling;
use super::versions::{Versions, has_second_name, shard_name};
use crate::rules::object_name::name;

/// Selected by a shard that owns nothing. No namespace has a dot in its name.
pub(super) const NO_NAMESPACE: &str = "no.namespace";

/// What one shard owns: slots, and namespaces whatever their slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pub name: String,
    pub canary: bool,
    /// Whether it has a second name: see [`Versions`].
    pub second: bool,
    /// Pods that it should have.
    pub replicas: usize,
    /// Without namespaces that another shard pins.
    pub slots: SlotSet,
    /// Pinned; only a canary has any.
    pub namespaces: BTreeSet<String>,
}

/// What there was before a division.
pub(super) struct Former<'a> {
    pub(super) table: Option<&'a Ownership>,
    /// The shards as the root made them last.
    pub(super) made: &'a [&'a ShardingConfig],
    /// The key of the label by which they select slots.
    pub(super) hash_key: &'a str,
}

/// The label by which a shard selects its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ListedBy {
    Slots(SlotSet),
    /// Includes `cluster.<slot>` for objects of cluster scope.
    Namespaces(BTreeSet<String>),
}

impl Share {
    /// `namespaces` are those of the cluster.
    pub(super) fn listed_by(&self, labelling: &Labelling, namespaces: &BTreeSet<String>) -> ListedBy {
        if self.namespaces.is_empty() {
            return ListedBy::Slots(self.slots);
        }
        let of_slots = namespaces.iter().filter(|name| self.slots.contains(labelling.hash.slot(name)));
        let of_cluster = self.slots.iter().map(Labelling::cluster_namespace);
        ListedBy::Namespaces(of_slots.chain(&self.namespaces).cloned().chain(of_cluster).collect())
    }
}

impl ListedBy {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Slots(slots) => slots.is_empty(),
            Self::Namespaces(names) => names.is_empty(),
        }
    }

    pub(super) fn listed(&self) -> BTreeSet<String> {
        match self {
            Self::Slots(_) => BTreeSet::new(),
            Self::Namespaces(names) => names.clone(),
        }
    }
}

/// The shares of a valid `root`, the canary first, then by number; after them those of its other version, if it has a
/// rollout.
///
/// A normal share keeps what it has, as far as balance allows. What is revoked counts for its former owner: so the
/// shares stay the same until all is granted.
pub(super) fn of(root: &Root, hash: NamespaceHash, former: &Former<'_>, versions: Versions<'_>) -> Vec<Share> {
    let (trial, second) = (versions.slots(), versions.main_is_second());
    let hashes = root.canary.as_ref().map_or(SlotSet::EMPTY, |canary| slots(&canary.in_shard_hash));
    let canary = root.canary.as_ref().map(|canary| Share {
        name: shard_name(&root.prefix, 0, second),
        canary: true,
        second,
        replicas: count(canary.replicas),
        slots: hashes.intersection(trial.complement()),
        namespaces: pinned(canary, hashes, hash).difference(&versions.namespaces()).cloned().collect(),
    });
    let left = hashes.union(trial).complement();
    let mut shares: Vec<Share> = canary.into_iter().chain(normal(root, left, former, second)).collect();
    if versions.has_rollout() {
        let other = |share: &Share| Share {
            name: other_name(&share.name, root),
            second: !second,
            slots: SlotSet::EMPTY,
            namespaces: BTreeSet::new(),
            ..share.clone()
        };
        let mut others: Vec<Share> = shares.iter().map(other).collect();
        if let Some(first) = others.first_mut() {
            let by_slot = |name: &String| trial.contains(hash.slot(name));
            first.slots = trial;
            first.namespaces = versions.namespaces().into_iter().filter(|name| !by_slot(name)).collect();
        }
        shares.append(&mut others);
    }
    shares
}

/// The other name of a root's shard.
fn other_name(name: &str, root: &Root) -> String {
    let id = name.rsplit('-').nth(1).and_then(|id| id.parse().ok()).unwrap_or_default();
    shard_name(&root.prefix, id, !has_second_name(name))
}

/// The shares of an inactive root, by the shards that exist, in the order in which it would make them. They
/// own nothing here; only name and number of pods count.
pub fn existing_shares(rule: &Root, shards: &[&ShardingConfig]) -> Vec<Share> {
    let share = |config: &&ShardingConfig| {
        let name = name(&config.metadata);
        let second = has_second_name(name);
        let mut parts = name.rsplitn(3, '-');
        let is_canary = parts.next() == Some("canary");
        let id = parts.next().and_then(|id| id.parse().ok()).unwrap_or(i32::MAX);
        let canary = is_canary || second && id == 0;
        let manual = rule.manual.iter().find(|one| one.id == id);
        let normal = rule.auto.as_ref().map(Auto::replicas);
        let normal = normal.or(manual.and_then(|manual| manual.replicas));
        let of_canary = rule.canary.as_ref().map(|canary| canary.replicas);
        let replicas = count(if canary { of_canary } else { normal }.unwrap_or(1)).max(1);
        let (slots, namespaces) = (SlotSet::EMPTY, BTreeSet::new());
        let share = Share { name: name.to_owned(), canary, second, replicas, slots, namespaces };
        ((!canary, id, name.to_owned()), share)
    };
    // Of elastic ones, no pod may get one that owns nothing: nobody gives it anything any more.
    let owns = |config: &&&ShardingConfig| !selects_nothing(config);
    let has_owner = rule.is_elastic() && shards.iter().any(|config| owns(&config));
    let mut all: Vec<_> = shards.iter().filter(|config| !has_owner || owns(config)).map(share).collect();
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all.into_iter().map(|(_, share)| share).collect()
}

/// Whether the root has given it nothing.
fn selects_nothing(config: &ShardingConfig) -> bool {
    config.spec.limits.iter().all(|limit| {
        let expressions = limit.selector.iter().flat_map(|selector| &selector.match_expressions);
        expressions.into_iter().any(|one| one.values == [NO_NAMESPACE])
    })
}

/// The canary's namespaces, unless its hashes contain them all.
fn pinned(canary: &Canary, hashes: SlotSet, hash: NamespaceHash) -> BTreeSet<String> {
    let by_hash = canary.in_namespaces.iter().all(|name| hashes.contains(hash.slot(name)));
    if by_hash { BTreeSet::new() } else { canary.in_namespaces.iter().cloned().collect() }
}

/// Of the slots that are `left`.
fn normal(root: &Root, left: SlotSet, former: &Former<'_>, second: bool) -> Vec<Share> {
    let share = |id: usize, replicas, slots| Share {
        name: shard_name(&root.prefix, id, second),
        canary: false,
        second,
        replicas: count(replicas),
        slots,
        namespaces: BTreeSet::new(),
    };
    if let Some(auto) = &root.auto {
        let ids = 1..=count(auto.sharding_size);
        // What one version's shard has is taken over by the shard of the same number.
        let names = |id| [second, !second].map(|second| shard_name(&root.prefix, id, second));
        let names: Vec<[String; 2]> = ids.clone().map(names).collect();
        let former = former.slots(&names);
        let parts = if auto.balances_by_load() {
            kept(left, &former)
        } else if auto.is_elastic() {
            left.divide_among_owners(&former)
        } else {
            left.divide_from(&former)
        };
        return ids.zip(parts).map(|(id, part)| share(id, auto.replicas(), part)).collect();
    }
    let manual = root.manual.iter();
    let mut shares: Vec<(usize, Share)> = manual
        .map(|manual| {
            let id = count(manual.id);
            (id, share(id, manual.replicas.unwrap_or(1), slots(&manual.hashes).intersection(left)))
        })
        .collect();
    shares.sort_by_key(|(id, _)| *id);
    shares.into_iter().map(|(_, share)| share).collect()
}

/// Each keeps what it has. What nobody has goes to those with the fewest slots, among the shares that have any.
fn kept(left: SlotSet, former: &[SlotSet]) -> Vec<SlotSet> {
    let mut free = left;
    let mut keep = |share: &SlotSet| {
        let kept = share.intersection(free);
        free = free.intersection(kept.complement());
        kept
    };
    let mut parts: Vec<SlotSet> = former.iter().map(&mut keep).collect();
    if free == left {
        return left.divide(parts.len());
    }
    let mut owners: Vec<&mut SlotSet> = parts.iter_mut().filter(|share| !share.is_empty()).collect();
    spread(free, &mut owners, &Weights::default());
    parts
}

impl Former<'_> {
    /// The former slots of each of these shards. What pods without a proxy have is of the one that it was meant for.
    fn slots(&self, shards: &[[String; 2]]) -> Vec<SlotSet> {
        let unsharded = self.owned(UNSHARDED);
        let one = |shard: &String| self.owned(shard).union(self.meant(shard).intersection(unsharded));
        shards.iter().map(|[shard, other]| one(shard).union(one(other))).collect()
    }

    /// What `owner` has, or had until it was revoked.
    fn owned(&self, owner: &str) -> SlotSet {
        let Some(table) = self.table else { return SlotSet::EMPTY };
        let revoked = table.revoked.iter().flat_map(|revoked| &revoked.slots);
        revoked.chain(&table.slots).filter(|(_, one)| *one == owner).map(|(slot, _)| *slot).collect()
    }

    /// What the last division has given `shard`.
    fn meant(&self, shard: &str) -> SlotSet {
        let made = self.made.iter().filter(|config| name(&config.metadata) == shard);
        let selectors = made.filter_map(|config| config.spec.limits.first()?.selector.as_ref());
        let listed = selectors.flat_map(|selector| &selector.match_expressions);
        let mut listed = listed.filter(|one| one.key == self.hash_key && one.operator == SelectorOperator::In);
        // The shard's own comes after those of the root.
        listed.next_back().map_or(SlotSet::EMPTY, |one| slots(&one.values))
    }
}

fn slots(hashes: &[String]) -> SlotSet {
    hashes.iter().filter_map(|hash| hash.parse::<Slot>().ok()).collect()
}

/// Validation has checked that it is positive.
fn count(number: i32) -> usize {
    usize::try_from(number).unwrap_or_default()
}
