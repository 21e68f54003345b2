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

proptest! {
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
