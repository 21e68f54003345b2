//! How are slots, namespaces and pods divided among the shards of a root?

use std::collections::BTreeSet;

use ctrlmesh_common::api::{Canary, Root};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};

/// What one shard owns: slots, or namespaces, never both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The shard's name.
    pub name: String,
    /// Whether it is the canary.
    pub canary: bool,
    /// How many pods it should have.
    pub replicas: usize,
    /// The slots that it owns, but for the namespaces that another shard pins.
    pub slots: SlotSet,
    /// The namespaces that it pins.
    pub namespaces: BTreeSet<String>,
}

/// The shares of a valid `root`, the canary first, then by number.
pub(super) fn of(root: &Root, hash: NamespaceHash, known: &BTreeSet<String>) -> Vec<Share> {
    let hashes = root.canary.as_ref().map_or(SlotSet::EMPTY, |canary| slots(&canary.in_shard_hash));
    let mut normal = normal(root, hashes);
    let Some(canary) = &root.canary else { return normal };
    let namespaces = pinned(canary, hashes, hash, known);
    if !namespaces.is_empty() {
        // What has one of the canary's hashes and is not known to be in a namespace of it: evenly to the others, the
        // larger parts to those that have the smaller ones.
        let spare = hashes.divide(normal.len());
        for (share, spare) in normal.iter_mut().zip(spare.into_iter().rev()) {
            share.slots = share.slots.union(spare);
        }
    }
    let share = Share {
        name: format!("{}-0-canary", root.prefix),
        canary: true,
        replicas: count(canary.replicas),
        slots: if namespaces.is_empty() { hashes } else { SlotSet::EMPTY },
        namespaces,
    };
    std::iter::once(share).chain(normal).collect()
}

/// The namespaces as which the canary has to be said; none where its hashes alone say it.
fn pinned(
    canary: &Canary,
    hashes: SlotSet,
    hash: NamespaceHash,
    known: &BTreeSet<String>,
) -> BTreeSet<String> {
    let has_hash = |name: &&String| hashes.contains(hash.slot(name));
    if canary.in_namespaces.iter().all(|name| has_hash(&name)) {
        return BTreeSet::new();
    }
    known.iter().filter(has_hash).chain(&canary.in_namespaces).cloned().collect()
}

fn normal(root: &Root, canary: SlotSet) -> Vec<Share> {
    let share = |id: usize, replicas, slots| Share {
        name: format!("{}-{id}-normal", root.prefix),
        canary: false,
        replicas: count(replicas),
        slots,
        namespaces: BTreeSet::new(),
    };
    if let Some(auto) = &root.auto {
        let parts = canary.complement().divide(count(auto.sharding_size));
        let parts = parts.into_iter().enumerate();
        return parts.map(|(at, part)| share(at + 1, auto.every_shard_replicas, part)).collect();
    }
    let manual = root.manual.iter();
    let mut shares: Vec<(usize, Share)> = manual
        .map(|manual| {
            let id = count(manual.id);
            (id, share(id, manual.replicas.unwrap_or(1), slots(&manual.hashes)))
        })
        .collect();
    shares.sort_by_key(|(id, _)| *id);
    shares.into_iter().map(|(_, share)| share).collect()
}

fn slots(hashes: &[String]) -> SlotSet {
    hashes.iter().filter_map(|hash| hash.parse::<Slot>().ok()).collect()
}

/// A number that the validation has found to be positive.
fn count(number: i32) -> usize {
    usize::try_from(number).unwrap_or_default()
}
