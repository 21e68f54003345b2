use proptest::prelude::*;

use super::*;

fn slots(numbers: impl IntoIterator<Item = u8>) -> SlotSet {
    numbers.into_iter().map(|number| Slot::try_from(i64::from(number)).unwrap()).collect()
}

fn weights(of: impl IntoIterator<Item = (u8, u64)>) -> Weights {
    Weights(of.into_iter().map(|(number, weight)| (Slot::try_from(i64::from(number)).unwrap(), weight)).collect())
}

fn spread_onto(given: SlotSet, shares: &[SlotSet], weights: &Weights) -> Vec<SlotSet> {
    let mut shares = shares.to_vec();
    spread(given, &mut shares.iter_mut().collect::<Vec<_>>(), weights);
    shares
}

fn evened(shares: &[SlotSet], weights: &Weights) -> Vec<SlotSet> {
    let mut shares = shares.to_vec();
    even_out(&mut shares.iter_mut().collect::<Vec<_>>(), weights);
    shares
}

#[test]
fn the_heaviest_slot_goes_to_the_lightest_share() {
    let weights = weights([(0, 100), (1, 10), (2, 90), (3, 5), (10, 50)]);
    let shares = spread_onto(slots(0..4), &[slots([10]), SlotSet::EMPTY], &weights);
    assert_eq!(shares, [slots([10, 2]), slots([0, 1, 3])]);
}

#[test]
fn slots_without_objects_are_spread_by_number() {
    let shares = spread_onto(slots(0..6), &[SlotSet::EMPTY; 3], &Weights::default());
    assert!(shares.iter().all(|share| share.len() == 2), "{shares:?}");
    assert_eq!(spread_onto(slots(0..6), &[], &Weights::default()), []);
}

#[test]
fn one_move_is_enough_where_one_slot_is_too_much() {
    let weights = weights([(0, 10), (1, 10), (2, 10), (3, 10)]);
    let before = [slots([0, 1, 2]), slots([3])];
    let after = evened(&before, &weights);
    assert_eq!(after, [slots([1, 2]), slots([0, 3])]);
}

#[test]
fn even_shares_stay_as_they_are() {
    let weights = weights((0..32).map(|number| (number, 10)));
    let before = [slots(0..16), slots(16..32)];
    assert_eq!(evened(&before, &weights), before);
    assert_eq!(evened(&before[..1], &weights), before[..1]);
}

#[test]
fn two_slots_are_swapped_where_one_alone_is_too_heavy() {
    let weights = weights([(0, 60), (1, 60), (2, 40), (3, 40)]);
    let after = evened(&[slots([0, 1]), slots([2, 3])], &weights);
    assert_eq!(after, [slots([1, 2]), slots([0, 3])]);
}

#[test]
fn no_more_slots_move_than_may() {
    let weights = weights((0..32).map(|number| (number, 10)));
    let before = [slots(0..32), SlotSet::EMPTY];
    for moves in [0, 1, 4, 20] {
        let mut after = before;
        let bounds = Bounds { even_percent: 105, moves };
        even_out_some(&mut after.iter_mut().collect::<Vec<_>>(), &weights, bounds);
        assert_eq!(after[1].len(), moves.min(16), "{after:?}");
    }
    // A swap is two moves.
    let mut after = [slots([0, 1]), slots([2, 3])];
    let uneven = self::weights([(0, 60), (1, 60), (2, 40), (3, 40)]);
    even_out_some(&mut after.iter_mut().collect::<Vec<_>>(), &uneven, Bounds { even_percent: 105, moves: 1 });
    assert_eq!(after, [slots([0, 1]), slots([2, 3])]);
}

#[test]
fn a_new_share_gets_its_part_from_the_heaviest() {
    let weights = weights((0..32).map(|number| (number, if number == 0 { 31 } else { 1 })));
    // The first slot has half of the load, and is more than a part.
    let before = [slots(0..16), slots(16..32), SlotSet::EMPTY];
    let after = fill(SlotSet::ALL, &before, &weights);
    assert_eq!(after[1], before[1], "it has less than the mean");
    assert!(after[0].contains(Slot::try_from(0).unwrap()), "{after:?}");
    assert_eq!(after[2].len(), 15, "all that goes beside it: {after:?}");
    // Without loads, the number counts.
    let sizes = |had: &[SlotSet]| -> Vec<usize> {
        fill(SlotSet::ALL, had, &Weights::default()).iter().map(|share| share.len()).collect()
    };
    assert_eq!(sizes(&[slots(0..16), slots(16..32), SlotSet::EMPTY]), [11, 11, 10]);
    assert_eq!(sizes(&[SlotSet::EMPTY; 3]), [11, 11, 10]);
    assert_eq!(sizes(&[]), [0; 0]);
}

#[test]
fn what_a_share_leaves_goes_to_the_lightest() {
    let weights = weights([(0, 90), (1, 10), (2, 30), (3, 20)]);
    let after = fill(slots(0..4), &[slots([0]), slots([1])], &weights);
    assert_eq!(after, [slots([0]), slots([1, 2, 3])]);
}

proptest! {
    #[test]
    fn filled_shares_are_disjoint_and_keep_what_they_had(
        of in prop::collection::vec((0_usize..6, 0_u64..1000), 32),
        all in any::<u32>(),
    ) {
        let all = slots((0..32).filter(|number| all & (1 << number) != 0));
        let mut had = vec![SlotSet::EMPTY; 6];
        for (number, (share, _)) in (0_u8..).zip(&of) {
            had[*share] = had[*share].union(slots([number]));
        }
        // What the last one had is nobody's.
        had.pop();
        let weights = weights((0_u8..).zip(of.iter().map(|(_, weight)| *weight)));
        let after = fill(all, &had, &weights);
        prop_assert_eq!(after.iter().map(|share| share.len()).sum::<usize>(), all.len());
        prop_assert_eq!(after.iter().fold(SlotSet::EMPTY, |all, share| all.union(*share)), all);
        let is_new = |share: &SlotSet| share.intersection(all).is_empty();
        if !had.iter().any(is_new) {
            let lost = |(had, after): (&SlotSet, &SlotSet)| had.intersection(all).intersection(after.complement());
            prop_assert!(had.iter().zip(&after).all(|pair| lost(pair).is_empty()), "{:?} {:?}", had, after);
        }
        prop_assert!(all.len() < 5 || after.iter().all(|share| !share.is_empty()), "{:?}", after);
        prop_assert_eq!(fill(all, &after, &weights), after, "nothing moves twice");
    }

    #[test]
    fn no_slot_is_lost_and_no_share_grows_above_the_heaviest(
        of in prop::collection::vec((0_usize..5, 0_u64..1000), 32),
    ) {
        let mut shares = vec![SlotSet::EMPTY; 5];
        for (number, (share, _)) in (0_u8..).zip(&of) {
            shares[*share] = shares[*share].union(slots([number]));
        }
        let weights = weights((0_u8..).zip(of.iter().map(|(_, weight)| *weight)));
        let heaviest = |shares: &[SlotSet]| shares.iter().map(|share| weights.share(*share)).max();
        let after = evened(&shares, &weights);
        prop_assert!(heaviest(&after) <= heaviest(&shares));
        prop_assert_eq!(after.iter().map(|share| share.len()).sum::<usize>(), 32);
        prop_assert_eq!(after.iter().fold(SlotSet::EMPTY, |all, share| all.union(*share)), SlotSet::ALL);
    }
}
