//! Takes from the shards of drained pods what they own.
//!
//! Pure.

use ctrlmesh_common::balance::{Weights, spread};
use ctrlmesh_common::slots::SlotSet;
use serde::Serialize;

use super::division::Division;
use super::error::SteerError;
use super::pods::ShardPod;

/// A pod whose shard keeps what it owns, since another pod of it takes over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Standby {
    pub(super) pod: String,
    pub(super) shard: String,
    /// The other pods of the shard.
    pub(super) others: Vec<String>,
}

/// Spreads what the shards of drained pods own over those that have other pods.
///
/// # Errors
/// A drained pod is the only one of the canary, or no shard has another pod.
pub(super) fn drain(
    division: &mut Division,
    root: &str,
    is_drained: &dyn Fn(&ShardPod) -> bool,
    weights: &Weights,
) -> Result<Vec<Standby>, SteerError> {
    let mut standbys = Vec::new();
    if let Some(canary) = division.canary() {
        let (drained, others) = parted(&canary.pods, is_drained);
        if let (Some(pod), []) = (drained.first(), others.as_slice()) {
            return Err(SteerError::OfCanary { pod: pod.clone(), shard: canary.name.clone() });
        }
        standbys.extend(standby(&canary.name, &drained, &others));
    }
    // What a shard without a pod is to have stays with its former owner meanwhile.
    let (mut freed, mut held, mut receivers, mut waiting) = (SlotSet::EMPTY, SlotSet::EMPTY, Vec::new(), Vec::new());
    for shard in &mut division.shards {
        let (drained, others) = parted(&shard.pods, is_drained);
        standbys.extend(standby(&shard.name, &drained, &others));
        if !others.is_empty() {
            receivers.push(&mut shard.slots);
        } else if drained.is_empty() {
            waiting.push(&mut shard.slots);
        } else {
            held = held.union(shard.held);
            freed = freed.union(std::mem::take(&mut shard.slots));
        }
    }
    for slots in waiting {
        freed = freed.union(slots.intersection(held));
        *slots = slots.intersection(held.complement());
    }
    if receivers.is_empty() && !freed.is_empty() {
        return Err(SteerError::NoOtherPod { name: root.to_owned() });
    }
    spread(freed, &mut receivers, weights);
    Ok(standbys)
}

/// The names of the pods that are drained, and of the others that can take over.
fn parted(pods: &[ShardPod], is_drained: &dyn Fn(&ShardPod) -> bool) -> (Vec<String>, Vec<String>) {
    let (drained, others): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| is_drained(pod));
    let names = |pods: Vec<&ShardPod>| pods.into_iter().map(|pod| pod.name.clone()).collect();
    (names(drained), names(others.into_iter().filter(|pod| pod.is_live).collect()))
}

/// The drained pods of a shard that has others.
fn standby<'a>(shard: &'a str, drained: &'a [String], others: &'a [String]) -> impl Iterator<Item = Standby> + 'a {
    drained.iter().filter(|_| !others.is_empty()).map(|pod| Standby {
        pod: pod.clone(),
        shard: shard.to_owned(),
        others: others.to_vec(),
    })
}
