//! Measures how many requests there are for the objects of each slot.

use std::collections::BTreeMap;
use std::time::Duration;

use ctrlmesh_common::slots::{NamespaceHash, Slot};
use kube::Client;
use tokio::time;

use super::division::{Division, Shard};
use super::error::SteerError;
use crate::top::TopError;
use crate::top::sample::{Sample, Sampler};

/// How proxies count the requests for namespaces that are not busy.
const OTHER: &str = "_other";

/// What proxies count within this time.
///
/// # Errors
/// Their metrics cannot be read.
pub(super) async fn sample(client: &Client, within: Duration) -> Result<Sample, TopError> {
    let mut sampler = Sampler::open(client.clone()).await?;
    time::sleep(within).await;
    sampler.next().await
}

/// Requests by slot, of pods in the root's namespace. A namespace counts where the pod's shard owns its slot. All other
/// requests of a pod are spread evenly over the slots of its shard: for namespaces that are not busy, or are no share,
/// and for objects of cluster scope.
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
    let mut slots: BTreeMap<Slot, f64> = BTreeMap::new();
    for pod in sample.pods.iter().filter(|pod| pod.key.namespace == namespace) {
        let is_its = |shard: &&Shard| shard.pods.iter().any(|one| one.name == pod.key.pod);
        let Some(shard) = division.shards.iter().find(is_its) else { continue };
        let mut rest = pod.requests();
        let busy = pod.by_namespace().filter(|(name, _)| *name != OTHER);
        for (slot, count) in busy.map(|(name, count)| (hash.slot(name), count)) {
            if shard.slots.contains(slot) {
                *slots.entry(slot).or_default() += count;
                rest -= count;
            }
        }
        let number = f64::from(u32::try_from(shard.slots.len()).unwrap_or(u32::MAX));
        shard.slots.iter().for_each(|slot| *slots.entry(slot).or_default() += rest.max(0.0) / number);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
    let rounded = |count: f64| count.round() as u64;
    let slots: BTreeMap<Slot, u64> = slots.into_iter().map(|(slot, count)| (slot, rounded(count))).collect();
    if slots.values().all(|count| *count == 0) {
        return Err(SteerError::NoRequests);
    }
    Ok(slots)
}
