//! Divides slots among shards by weight, and evens shares out with few moves.
//!
//! Pure. The manager divides elastic shares by load with it, and `ctrlmesh rebalance` any shares.

use std::collections::BTreeMap;

use crate::slots::{Slot, SlotSet};

/// A share that has no more than this part of the mean is even enough, in percent.
const EVEN_PERCENT: u128 = 105;

/// Above the number of all slots: so a slot counts only where the weights are the same.
const SLOT_UNIT: u128 = 64;

/// What each slot weighs: its objects, or requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights(pub BTreeMap<Slot, u64>);

/// How far shares are evened out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// A share with no more than this part of the mean is even enough, in percent.
    pub even_percent: u128,
    /// The most slots that change their share; a swap counts twice.
    pub moves: usize,
}

impl Weights {
    /// What the share weighs. Each slot weighs a little more than its weight, so that of equal weights the number of
    /// slots counts.
    pub fn share(&self, slots: SlotSet) -> u128 {
        slots.iter().map(|slot| self.slot(slot)).sum()
    }

    fn slot(&self, slot: Slot) -> u128 {
        u128::from(self.0.get(&slot).copied().unwrap_or_default()) * SLOT_UNIT + 1
    }
}

/// Gives the slots to these shares, the heaviest slot first, always to the lightest share. Without a share, none is
/// given.
pub fn spread(slots: SlotSet, onto: &mut [&mut SlotSet], weights: &Weights) {
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
pub fn even_out(shares: &mut [&mut SlotSet], weights: &Weights) {
    even_out_some(shares, weights, Bounds { even_percent: EVEN_PERCENT, moves: usize::MAX });
}

/// The same within `bounds`.
pub fn even_out_some(shares: &mut [&mut SlotSet], weights: &Weights, bounds: Bounds) {
    let mut left = bounds.moves;
    while let Some([heavy, light]) = extremes(shares, weights) {
        let all: u128 = shares.iter().map(|share| weights.share(**share)).sum();
        let count = u128::try_from(shares.len()).unwrap_or(u128::MAX);
        if weights.share(*shares[heavy]) * count * 100 <= all * bounds.even_percent {
            return;
        }
        let Ok([heavy, light]) = shares.get_disjoint_mut([heavy, light]) else { return };
        let Some((given, taken)) = exchange(**heavy, **light, weights, left) else { return };
        left -= given.len() + taken.len();
        **heavy = heavy.intersection(given.complement()).union(taken);
        **light = light.intersection(taken.complement()).union(given);
    }
}

/// Divides `all` among as many shares as there are in `had`. Each keeps what it had. What nobody had goes to the
/// lightest, the heaviest slot first. A share that had nothing gets its part of the whole from the heaviest ones, and
/// at least one slot, if another has two.
#[must_use]
pub fn fill(all: SlotSet, had: &[SlotSet], weights: &Weights) -> Vec<SlotSet> {
    let mut free = all;
    let mut keep = |had: &SlotSet| {
        let kept = had.intersection(free);
        free = free.intersection(kept.complement());
        kept
    };
    let mut shares: Vec<SlotSet> = had.iter().map(&mut keep).collect();
    let new: Vec<usize> = (0..shares.len()).filter(|at| shares[*at].is_empty()).collect();
    spread(free, &mut shares.iter_mut().collect::<Vec<_>>(), weights);
    let count = u128::try_from(shares.len()).unwrap_or(u128::MAX);
    for at in new {
        while let Some((from, slot)) = next_part(&shares, at, weights.share(all) / count, weights) {
            shares[from] = shares[from].intersection(one(slot).complement());
            shares[at] = shares[at].union(one(slot));
        }
    }
    shares
}

/// The slot that the new share `at` takes next, and from which share, so that neither gets past the `mean`. `None`: it
/// has its part.
fn next_part(shares: &[SlotSet], at: usize, mean: u128, weights: &Weights) -> Option<(usize, Slot)> {
    let weight = |from: &usize| weights.share(shares[*from]);
    let room = mean.saturating_sub(weights.share(shares[at]));
    let may_give = |from: &usize| *from != at && shares[*from].len() > 1;
    let from_heavy = (0..shares.len()).filter(|from| may_give(from) && weight(from) > mean);
    let slots = from_heavy.flat_map(|from| shares[from].iter().map(move |slot| (from, slot)));
    let fitting = slots.filter(|(_, slot)| weights.slot(*slot) <= room);
    let next = fitting.max_by_key(|(from, slot)| (weight(from), weights.slot(*slot)));
    next.or_else(|| {
        let heaviest = (0..shares.len()).filter(|from| shares[at].is_empty() && may_give(from)).max_by_key(weight)?;
        let lightest = shares[heaviest].iter().min_by_key(|slot| weights.slot(*slot))?;
        Some((heaviest, lightest))
    })
}

/// Index of the heaviest share, and of the lightest one. `None`: there are not two.
fn extremes(shares: &[&mut SlotSet], weights: &Weights) -> Option<[usize; 2]> {
    let weight = |at: &usize| weights.share(*shares[*at]);
    let heavy = (0..shares.len()).rev().max_by_key(weight)?;
    let light = (0..shares.len()).min_by_key(weight)?;
    (heavy != light).then_some([heavy, light])
}

/// The slot that the heavy share gives, and the one that it takes for it, if any, so that both come closest with at
/// most `bound` moves. `None`: nothing makes the heavier of both lighter.
fn exchange(heavy: SlotSet, light: SlotSet, weights: &Weights, bound: usize) -> Option<(SlotSet, SlotSet)> {
    let difference = weights.share(heavy).checked_sub(weights.share(light))?;
    let given = heavy.iter().map(|slot| (one(slot), SlotSet::EMPTY));
    let swapped = heavy.iter().flat_map(|given| light.iter().map(move |taken| (one(given), one(taken))));
    let within = |(given, taken): &(SlotSet, SlotSet)| given.len() + taken.len() <= bound;
    let best = given.chain(swapped).filter(within).filter_map(|(given, taken)| {
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
