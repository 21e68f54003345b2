//! Decides which slots of elastic shares move because of their load.
//!
//! Pure. It acts once the busiest shard has clearly more than the mean, and then aims well below that: so loads that
//! change a little move nothing. A slot is never divided. A shard that has little beside one busy slot is
//! left as it is, and the others are judged by their own mean.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::balance::{Bounds, Weights, even_out_some};
use ctrlmesh_common::slots::{Slot, SlotSet};

use crate::rules::object_name::full_name;

/// A busiest shard with no more than this part of the mean stays as it is, in percent.
const ACT_PERCENT: u128 = 130;

/// How far the shards come together at best.
const BOUNDS: Bounds = Bounds { even_percent: 115, moves: MAX_MOVES };

/// The most slots that move at once; the next look is an interval later.
pub const MAX_MOVES: usize = 4;

/// By how much the busiest shard has to lose, in percent of the mean.
const NOTICEABLE_PERCENT: u128 = 1;

/// Fewer requests of a shard on average say nothing: they differ by chance.
const MIN_REQUESTS: u64 = 100;

/// The owner of each slot.
pub type SlotOwners = BTreeMap<Slot, String>;

/// What the slots of one root were loaded with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// By slot, in a thousand seconds.
    pub rates: Weights,
    /// How many requests were counted for that.
    pub requests: u64,
}

/// What is known of the load of one root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootLoad {
    pub rates: Weights,
    /// What is to move, until the status has it.
    pub decision: Option<Decision>,
}

/// By `NAMESPACE/NAME` of the root. Those whose load is not known are missing.
pub type RootLoads = BTreeMap<String, RootLoad>;

/// Another division of a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The `status.wanted` that it is about. It does not count for another one.
    pub base: SlotOwners,
    pub next: SlotOwners,
}

/// A root that is divided by load.
#[derive(Clone, Copy, Debug)]
pub struct LoadDivision<'a> {
    /// What its slots weigh.
    pub rates: &'a Weights,
    /// The owners that its slots are to have, as far as that is decided.
    pub wanted: &'a SlotOwners,
}

impl RootLoad {
    /// What is wanted where the status says so.
    fn wanted<'a>(&'a self, status: &'a SlotOwners) -> &'a SlotOwners {
        self.decision.as_ref().filter(|decision| decision.base == *status).map_or(status, |decision| &decision.next)
    }
}

impl<'a> LoadDivision<'a> {
    /// `None`: the root is not divided by load.
    pub fn of(root: &'a ShardingConfig, loads: &'a RootLoads) -> Option<Self> {
        static UNKNOWN: RootLoad = RootLoad { rates: Weights(BTreeMap::new()), decision: None };
        root.spec.root.as_ref().filter(|rule| rule.balances_by_load())?;
        let load = loads.get(&full_name(&root.metadata)).unwrap_or(&UNKNOWN);
        Some(Self { rates: &load.rates, wanted: load.wanted(wanted(root)) })
    }
}

/// The owners that the slots of the root are to have, by its status.
pub fn wanted(root: &ShardingConfig) -> &SlotOwners {
    static NONE: SlotOwners = SlotOwners::new();
    root.status.as_ref().map_or(&NONE, |status| &status.wanted)
}

/// What is to move, where the owners have what is `wanted`. `None`: nothing.
pub fn decide(wanted: &SlotOwners, measured: &Measured) -> Option<Decision> {
    let mut owned: BTreeMap<&str, SlotSet> = BTreeMap::new();
    for (slot, owner) in wanted {
        let slots = owned.entry(owner).or_default();
        *slots = slots.union([*slot].into_iter().collect());
    }
    if measured.requests < MIN_REQUESTS.saturating_mul(owned.len() as u64) {
        return None;
    }
    let names: Vec<&str> = owned.keys().copied().collect();
    let after = evened(owned.into_values().collect(), &measured.rates)?;
    let owners = names.into_iter().zip(after);
    let next = owners.flat_map(|(owner, slots)| slots.iter().map(move |slot| (slot, owner.to_owned())));
    Some(Decision { base: wanted.clone(), next: next.collect() })
}

/// The shares after some moves. `None`: they stay.
fn evened(mut shares: Vec<SlotSet>, rates: &Weights) -> Option<Vec<SlotSet>> {
    // Indices of those that can be made more even.
    let mut judged: Vec<usize> = (0..shares.len()).collect();
    while judged.len() > 1 {
        let busiest = judged.iter().copied().max_by_key(|at| rates.share(shares[*at]))?;
        let before = rates.share(shares[busiest]);
        let all: u128 = judged.iter().map(|at| rates.share(shares[*at])).sum();
        let mean = all / judged.len() as u128;
        if before * 100 <= mean * ACT_PERCENT {
            return None;
        }
        let mut after: Vec<SlotSet> = judged.iter().map(|at| shares[*at]).collect();
        even_out_some(&mut after.iter_mut().collect::<Vec<_>>(), rates, BOUNDS);
        let most = after.iter().map(|share| rates.share(*share)).max()?;
        if before.saturating_sub(most) * 100 >= mean * NOTICEABLE_PERCENT {
            judged.iter().zip(after).for_each(|(at, share)| shares[*at] = share);
            return Some(shares);
        }
        judged.retain(|at| *at != busiest);
    }
    None
}

#[cfg(test)]
mod tests;
