//! Spreads slots over shards by weight, and evens shares out with few moves.
//!
//! Pure.

use std::collections::BTreeMap;

use ctrlmesh_common::slots::{Slot, SlotSet};

/// A share that has no more than this part of the mean is even enough, in percent.
const EVEN_PERCENT: u128 = 105;

/// Above the number of all slots: so a slot counts only where the weights are the same.
const SLOT_UNIT: u128 = 64;

/// What each slot weighs: its objects, or requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Weights(pub(super) BTreeMap<Slot, u64>);

impl Weights {
    fn slot(&self, slot: Slot) -> u128 {
        u128::from(self.0.get(&slot).copied().unwrap_or_default()) * SLOT_UNIT + 1
    }

    fn share(&self, slots: SlotSet) -> u128 {
        slots.iter().map(|slot| self.slot(slot)).sum()
    }
}

/// Gives the slots to these shares, the heaviest slot first, always to the lightest share. Without a share, none is
/// given.
pub(super) fn spread(slots: SlotSet, onto: &mut [&mut SlotSet], weights: &Weights) {
    let mut slots: Vec<Slot> = slots.iter().collect();
    slots.sort_by_key(|slot| std::cmp::Reverse(weights.slot(*slot)));
    for slot in slots {
        if let Some(lightest) = onto.iter_mut().min_by_key(|share| weights.share(***share)) {
            **lightest = lightest.union(one(slot));
        }
    }
}

/// Moves slots from the heaviest share to the lightest one, until they are even enough, or no move makes the heaviest
/// of both lighter.
pub(super) fn even_out(shares: &mut [&mut SlotSet], weights: &Weights) {
    while let Some([heavy, light]) = extremes(shares, weights) {
        let all: u128 = shares.iter().map(|share| weights.share(**share)).sum();
        let count = u128::try_from(shares.len()).unwrap_or(u128::MAX);
        if weights.share(*shares[heavy]) * count * 100 <= all * EVEN_PERCENT {
            return;
        }
        let Ok([heavy, light]) = shares.get_disjoint_mut([heavy, light]) else { return };
        let Some((given, taken)) = exchange(**heavy, **light, weights) else { return };
        **heavy = heavy.intersection(given.complement()).union(taken);
        **light = light.intersection(taken.complement()).union(given);
    }
}

/// Index of the heaviest share, and of the lightest one. `None`: there are not two.
fn extremes(shares: &[&mut SlotSet], weights: &Weights) -> Option<[usize; 2]> {
    let weight = |at: &usize| weights.share(*shares[*at]);
    let heavy = (0..shares.len()).rev().max_by_key(weight)?;
    let light = (0..shares.len()).min_by_key(weight)?;
    (heavy != light).then_some([heavy, light])
}

/// The slot that the heavy share gives, and the one that it takes for it, if any, so that both come closest. `None`:
/// nothing makes the heavier of both lighter.
fn exchange(heavy: SlotSet, light: SlotSet, weights: &Weights) -> Option<(SlotSet, SlotSet)> {
    let difference = weights.share(heavy).checked_sub(weights.share(light))?;
    let given = heavy.iter().map(|slot| (one(slot), SlotSet::EMPTY));
    let swapped = heavy.iter().flat_map(|given| light.iter().map(move |taken| (one(given), one(taken))));
    let best = given.chain(swapped).filter_map(|(given, taken)| {
        let moved = weights.share(given).checked_sub(weights.share(taken)).filter(|moved| *moved > 0)?;
        let left = difference.abs_diff(moved * 2);
        (left < difference).then_some((left, taken.len(), (given, taken)))
    });
    best.min_by_key(|(left, taken, _)| (*left, *taken)).map(|(_, _, exchange)| exchange)
}

fn one(slot: Slot) -> SlotSet {
    [slot].into_iter().collect()
}

#[cfg(test)]
mod tests;
