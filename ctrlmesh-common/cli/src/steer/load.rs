//! Measures how many requests there are for the objects of each slot.
//!
//! Pure.

use std::collections::BTreeMap;

use ctrlmesh_common::slots::{NamespaceHash, Slot};

use super::division::{Division, Shard};
use super::error::SteerError;
use crate::load::{Load, Share, thousandths};
use crate::top::sample::Sample;

/// Requests in a thousand seconds by slot, of pods in the root's namespace.
///
/// # Errors
/// Some proxy was not read, or there was no request: then nothing can be evened out by them.
pub(super) fn by_slot(
    sample: &Sample,
    division: &Division,
    hash: NamespaceHash,
    namespace: &str,
) -> Result<BTreeMap<Slot, u64>, SteerError> {
    if !sample.not_read.is_empty() {
        return Err(SteerError::NotRead { reasons: sample.not_read.clone() });
    }
    let share = |shard: &Shard| Share {
        pods: shard.pods.iter().map(|pod| pod.name.clone()).collect(),
        slots: shard.slots.iter().collect(),
        ..Share::default()
    };
    let shares: Vec<Share> = division.shards.iter().map(share).collect();
    let Load { namespaces, mut slots } = Load::of(sample, &shares, hash, namespace);
    for (name, count) in namespaces {
        *slots.entry(hash.slot(&name)).or_default() += count;
    }
    let slots: BTreeMap<Slot, u64> = slots.into_iter().map(|(slot, count)| (slot, thousandths(count))).collect();
    if slots.values().all(|count| *count == 0) {
        return Err(SteerError::NoRequests);
    }
    Ok(slots)
}
