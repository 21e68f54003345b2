//! Says who should own what of a root that is fenced, and which pods write for whom.
//!
//! Pure. A shard gets its share once it has a pod that serves. Until then the share stays with its present owner,
//! while that one lives. Pods of the workload that are not enrolled are an owner, too. A pod lives until it has ended.
//!
//! Elastic shares follow the pods: shards with a pod that serves divide what all of them own, with the fewest moves.
//! While there is none, everything stays with its present owner. Where load counts, each keeps what it is to have, and
//! only what nobody has moves, and the part of a shard that has nothing.
//!
//! While a new version is tried, shards without a pod that lives are stood in for: a StatefulSet ends a pod of the old
//! version before there is one of the new one. What a new version owned and may own no more never stays with it.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::TrialPhase;
use ctrlmesh_common::balance::fill;
use ctrlmesh_common::handover::Desired;
use ctrlmesh_common::ownership::{Ownership, STANDBY, UNSHARDED};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};

use super::standby;
use crate::rules::balance::{LoadDivision, SlotOwners};
use crate::rules::pod::Member;
use crate::rules::shard::{Share, Versions, has_second_name};

/// A root and the pods of its workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload<'a> {
    pub(super) shares: &'a [Share],
    /// Shard by pod.
    pub(super) placed: &'a BTreeMap<String, String>,
    /// Candidates for `placed`.
    pub(super) enrolled: &'a [&'a Member],
    pub(super) unenrolled: &'a [&'a Member],
    pub(super) hash: NamespaceHash,
    /// Whether the root is being deleted.
    pub(super) is_leaving: bool,
    pub(super) versions: Versions<'a>,
    /// Whether the pods of a shard elect the one that works.
    pub(super) elects: bool,
    /// Whether only shards with a pod that serves own slots.
    pub(super) is_elastic: bool,
    /// UIDs of pods that have come back only just.
    pub(super) held_back: &'a BTreeSet<String>,
    /// UIDs of pods that wait for their lock, where they elect.
    pub(super) waiting: Option<&'a BTreeSet<String>>,
    /// Of an elastic root that is divided by load.
    pub(super) load: Option<LoadDivision<'a>>,
}

/// Which owners there are.
struct Owners<'a> {
    versions: Versions<'a>,
    /// Shards with a pod that serves.
    serving: BTreeSet<&'a str>,
    /// Those of them with a pod that is not held back, and waits for no lock.
    steady: BTreeSet<&'a str>,
    /// Owners with a pod that lives.
    live: BTreeSet<&'a str>,
    /// How many pods live that are not enrolled.
    unsharded: usize,
}

/// `epoch` is the newest that the operator has used.
pub(super) fn owning(workload: Workload<'_>, current: &Ownership, epoch: u64) -> Desired {
    let owners = Owners::of(workload, current);
    let mut slots: BTreeMap<Slot, String> = BTreeMap::new();
    for share in workload.shares {
        slots.extend(share.slots.iter().map(|slot| (slot, owners.of_slot(share, slot, current))));
    }
    if workload.is_elastic {
        slots.extend(owners.elastic(workload, current));
    }
    for share in workload.shares {
        for slot in share.slots.iter() {
            let count = |name: &str| slots.values().filter(|owner| *owner == name).count();
            let owner = slots.get(&slot).cloned().unwrap_or_default();
            if let Some(other) = owners.stand_in(workload.shares, share, &owner, count) {
                slots.insert(slot, other.to_owned());
            }
        }
    }
    if workload.is_leaving {
        slots = SlotSet::ALL.iter().map(|slot| (slot, UNSHARDED.to_owned())).collect();
    }
    let mut namespaces = BTreeMap::new();
    for share in workload.shares.iter().filter(|_| !workload.is_leaving) {
        for namespace in &share.namespaces {
            let slot = workload.hash.slot(namespace);
            let owner = owners.choose(share, present(current, slot, Some(namespace)));
            let other = owners.stand_in(workload.shares, share, &owner, |_| 0).map(str::to_owned);
            let owner = other.unwrap_or(owner);
            if *owner == share.name || slots.get(&slot) != Some(&owner) {
                namespaces.insert(namespace.clone(), owner);
            }
        }
    }
    // A table that names no pod yet is from before the API server fenced: the pods go on for whom they worked.
    let begins = current.pod_uids.is_empty() && current.revoked.is_none();
    let recorded = |pod: &Member| current.shard_of(&pod.name.name).filter(|_| begins).map(str::to_owned);
    let shard = |pod: &Member| recorded(pod).or_else(|| workload.placed.get(&pod.name.name).cloned());
    // A pod without a node runs nothing yet, and a move would wait for it.
    let enrolled: Vec<&Member> = live(workload.enrolled).filter(|pod| pod.node.is_some()).collect();
    let mut pod_uids: BTreeMap<String, String> =
        enrolled.iter().filter_map(|pod| Some((pod.uid.clone(), shard(pod)?))).collect();
    if !workload.elects {
        standby::choose(&mut pod_uids, &enrolled, workload.held_back, current);
    }
    let unenrolled = live(workload.unenrolled).filter(|pod| pod.node.is_some());
    pod_uids.extend(unenrolled.map(|pod| (pod.uid.clone(), UNSHARDED.to_owned())));
    // Pods with a proxy that were there before the table may have been of a former one: nothing is granted before they
    // have acknowledged this one.
    let taken_up = *current == Ownership::default() && pod_uids.values().any(|owner| owner != UNSHARDED);
    Desired { slots, namespaces, pods: workload.placed.clone(), pod_uids, epoch, taken_up }
}

/// The owners that slots of shares that are divided by load are to have.
pub(super) fn wanted(workload: Workload<'_>, desired: &Desired) -> SlotOwners {
    let followed = workload.shares.iter().filter(|share| is_followed(share, workload.versions));
    let slots = followed.filter(|_| workload.load.is_some()).flat_map(|share| share.slots.iter());
    slots.filter_map(|slot| Some((slot, desired.slots.get(&slot)?.clone()))).collect()
}

/// Leaves everything where it is, if nothing is on its way. Returns whether anything was to move.
pub(super) fn stay(desired: &mut Desired, current: &Ownership) -> bool {
    if *current == Ownership::default() || current.revoked.is_some() {
        return false;
    }
    let before = desired.clone();
    desired.slots.clone_from(&current.slots);
    desired.namespaces.clone_from(&current.namespaces);
    for (uid, owner) in &mut desired.pod_uids {
        // One that stands by may begin: nobody has to stop for it.
        if let Some(present) = current.pod_uids.get(uid).filter(|present| *present != STANDBY) {
            owner.clone_from(present);
        }
    }
    *desired != before
}

/// Of each slot and pinned namespace, the shard that the root names, where it is not the owner in `desired`. An elastic
/// root does not say which of its shards owns a slot.
pub(super) fn awaited<'a>(workload: Workload<'a>, desired: &Desired) -> BTreeSet<&'a str> {
    let is_elastic = |share: &Share| workload.is_elastic && is_followed(share, workload.versions);
    let elastic: BTreeSet<&str> =
        workload.shares.iter().filter(|share| is_elastic(share)).map(|share| share.name.as_str()).collect();
    let owns = |share: &Share, slot| {
        let owner = desired.slots.get(&slot);
        owner == Some(&share.name) || is_elastic(share) && owner.is_some_and(|owner| elastic.contains(owner.as_str()))
    };
    let is_owner = |share: &Share| {
        share.slots.iter().all(|slot| owns(share, slot))
            && share.namespaces.iter().all(|namespace| desired.namespaces.get(namespace) == Some(&share.name))
    };
    workload.shares.iter().filter(|share| !is_owner(share)).map(|share| share.name.as_str()).collect()
}

impl<'a> Owners<'a> {
    fn of(workload: Workload<'a>, current: &'a Ownership) -> Self {
        let placed = |pod: &Member| workload.placed.get(&pod.name.name).map(String::as_str);
        let serving = || workload.enrolled.iter().filter(|pod| pod.serves());
        let waits = |uid: &String| workload.waiting.is_some_and(|waiting| waiting.contains(uid));
        let is_steady = |pod: &&&Member| !workload.held_back.contains(&pod.uid) && !waits(&pod.uid);
        let steady = serving().filter(is_steady).filter_map(|pod| placed(pod));
        let (serving, steady): (BTreeSet<_>, BTreeSet<_>) =
            (serving().filter_map(|pod| placed(pod)).collect(), steady.collect());
        // The table says for whom a pod works; before it does, its shard. One that stands by is there for its shard.
        let owner_in = |pod: &Member| owner_in(current, &pod.uid).filter(|owner| *owner != STANDBY);
        let owner = |pod: &&Member| owner_in(pod).or_else(|| placed(pod));
        let enrolled = live(workload.enrolled).filter_map(|pod| owner(&pod));
        let unenrolled = live(workload.unenrolled).map(|_| UNSHARDED);
        let live = enrolled.chain(unenrolled).collect();
        let unsharded = self::live(workload.unenrolled).count();
        Self { versions: workload.versions, serving, steady, live, unsharded }
    }

    fn of_slot(&self, share: &Share, slot: Slot, current: &Ownership) -> String {
        self.choose(share, present(current, slot, None))
    }

    /// The owner of what is of `share` by the root's division.
    fn choose(&self, share: &Share, present: Option<&str>) -> String {
        let meant = share.name.as_str();
        let owner = match present {
            // Whoever runs already has all of it, whatever shard is there, too.
            None if self.live.contains(UNSHARDED) => UNSHARDED,
            _ if self.serving.contains(meant) => meant,
            Some(present) if self.live.contains(present) && self.may_keep(share, present) => present,
            _ if self.live.contains(UNSHARDED) => UNSHARDED,
            _ => meant,
        };
        owner.to_owned()
    }

    /// The owners of the slots of elastic shares, if any of these has a pod that serves. Pods that are not enrolled
    /// count for as many shards: so what they have moves once, as they are replaced.
    fn elastic(&self, workload: Workload<'_>, current: &Ownership) -> SlotOwners {
        let elastic = || workload.shares.iter().filter(|share| is_followed(share, self.versions));
        // Whoever runs before the first table has all of it.
        let is_known = |slot: &Slot| self.unsharded == 0 || present(current, *slot, None).is_some();
        let all = elastic().flat_map(|share| share.slots.iter()).filter(is_known).collect::<SlotSet>();
        // One that is held back is to have nothing that it does not have.
        let may_get = |owner: &&str| self.steady.contains(owner) || *owner == UNSHARDED;
        let wanted = |slot: &Slot| workload.load.and_then(|load| load.wanted.get(slot)).map(String::as_str);
        // What was taken away from it comes back only as other slots do.
        let still_has = |slot: &Slot, owner: &&str| current.slots.get(slot).is_some_and(|one| one == owner);
        let may_keep = |slot: &Slot| present(current, *slot, None).filter(|one| may_get(one) || still_has(slot, one));
        let has = |slot: &Slot| wanted(slot).filter(may_get).or_else(|| may_keep(slot));
        let owned = |owner: &str| all.iter().filter(|slot| has(slot) == Some(owner)).collect();
        let serving = elastic().map(|share| share.name.as_str()).filter(|name| self.serving.contains(name));
        let mut owners: Vec<(&str, SlotSet)> = serving.map(|name| (name, owned(name))).collect();
        // One that is held back keeps what it has, but gets nothing.
        let counts = |(name, has): &(&str, SlotSet)| self.steady.contains(name) || !has.is_empty();
        if owners.iter().any(counts) {
            owners.retain(counts);
        }
        if owners.is_empty() {
            return BTreeMap::new();
        }
        let unsharded = (0..self.unsharded).map(|number| if number == 0 { owned(UNSHARDED) } else { SlotSet::EMPTY });
        owners.extend(unsharded.map(|has| (UNSHARDED, has)));
        let had: Vec<SlotSet> = owners.iter().map(|(_, has)| *has).collect();
        let parts = workload.load.map_or_else(|| all.divide_from(&had), |load| fill(all, &had, load.rates));
        let parts = owners.iter().zip(parts);
        parts
            .flat_map(|((owner, _), part)| part.iter().map(|slot| (slot, (*owner).to_owned())).collect::<Vec<_>>())
            .collect()
    }

    /// Whether what is of `share` may stay with `present`: not with a version that is tried, if it may not own it.
    fn may_keep(&self, share: &Share, present: &str) -> bool {
        let is_tried = |second| second != self.versions.promoted_is_second();
        present == UNSHARDED || is_tried(share.second) || !is_tried(has_second_name(present))
    }

    /// Who has what is of `share`, and `owner` has or gets, instead: nobody else, unless a version is tried. `count`
    /// says how much each one has already.
    fn stand_in<'b>(
        &self,
        shares: &'b [Share],
        share: &Share,
        owner: &str,
        count: impl Fn(&str) -> usize,
    ) -> Option<&'b str> {
        let trial = self.versions.trial()?;
        let is_tried = |second| second != self.versions.promoted_is_second();
        let is_promoting = trial.phase == TrialPhase::Promoting;
        // A StatefulSet begins with its last pod, whatever shard of the version has the slots.
        let waits = is_tried(share.second) && !is_promoting && !is_tried(has_second_name(owner));
        let is_gone = owner == share.name && !self.live.contains(owner);
        let may =
            |one: &&Share| self.serving.contains(one.name.as_str()) && (one.second == share.second || is_promoting);
        let serving = shares.iter().filter(|_| waits || is_gone).filter(may);
        let fewest = serving.min_by_key(|one| (one.second != share.second, count(&one.name)));
        fewest.map(|share| share.name.as_str())
    }
}

/// Whether an elastic root's share goes by its pods: that of a canary does not, nor that of a version on trial. While a
/// version is promoted, its pods and those that they replace divide all.
fn is_followed(share: &Share, versions: Versions<'_>) -> bool {
    !share.canary && (versions.is_promoting() || share.second == versions.main_is_second())
}

fn live<'a>(pods: &'a [&'a Member]) -> impl Iterator<Item = &'a Member> {
    pods.iter().copied().filter(|pod| !pod.stopped && !pod.uid.is_empty())
}

/// The owner for which a pod writes, or wrote before that was taken away.
pub(super) fn owner_in<'a>(table: &'a Ownership, uid: &str) -> Option<&'a str> {
    let revoked = || table.revoked.as_ref().and_then(|revoked| revoked.pod_uids.get(uid));
    table.pod_uids.get(uid).or_else(revoked).map(String::as_str)
}

/// The owner, or the last one of what is taken away.
fn present<'a>(table: &'a Ownership, slot: Slot, namespace: Option<&str>) -> Option<&'a str> {
    let revoked = table.revoked.as_ref();
    let pinned = namespace.and_then(|namespace| {
        let before = || revoked.and_then(|revoked| revoked.namespaces.get(namespace));
        table.namespaces.get(namespace).or_else(before)
    });
    let of_slot = || table.slots.get(&slot).or_else(|| revoked.and_then(|revoked| revoked.slots.get(&slot)));
    pinned.or_else(of_slot).map(String::as_str)
}

#[cfg(test)]
mod tests;
