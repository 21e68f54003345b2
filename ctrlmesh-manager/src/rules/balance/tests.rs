use proptest::prelude::*;

use super::*;

fn slot(number: i64) -> Slot {
    number.try_into().unwrap()
}

/// The slots `0..32` by turns with so many shards.
fn owners(shards: usize) -> SlotOwners {
    (0_i64..32).zip((0..shards).cycle()).map(|(number, shard)| (slot(number), format!("op-{shard}"))).collect()
}

fn measured(rate: impl Fn(i64) -> u64) -> Measured {
    let rates: BTreeMap<Slot, u64> = (0..32).map(|number| (slot(number), rate(number))).collect();
    Measured { requests: rates.values().sum(), rates: Weights(rates) }
}

fn shares(owners: &SlotOwners) -> BTreeMap<&str, Vec<Slot>> {
    let mut shares: BTreeMap<&str, Vec<Slot>> = BTreeMap::new();
    for (slot, owner) in owners {
        shares.entry(owner).or_default().push(*slot);
    }
    shares
}

fn loads(owners: &SlotOwners, measured: &Measured) -> Vec<u64> {
    let load = |slots: Vec<Slot>| slots.iter().map(|slot| measured.rates.0[slot]).sum();
    shares(owners).into_values().map(load).collect()
}

/// Decides until nothing moves. Gives where that ends, and how many looks it took.
fn settled(mut wanted: SlotOwners, measured: &Measured) -> (SlotOwners, usize) {
    for looks in 0..100 {
        let Some(decision) = decide(&wanted, measured) else { return (wanted, looks) };
        assert_eq!(decision.base, wanted);
        let moved = decision.next.iter().filter(|(slot, owner)| wanted[*slot] != **owner).count();
        assert!((1..=MAX_MOVES).contains(&moved), "{moved} move at once");
        assert_eq!(decision.next.len(), wanted.len());
        wanted = decision.next;
    }
    panic!("it never ends: {wanted:?}");
}

#[test]
fn a_slot_with_half_of_everything_stays_whole_and_alone() {
    // The other 31 slots have the other half.
    let measured = measured(|number| if number == 5 { 3100 } else { 100 });
    for shards in [3, 4, 5] {
        let before = owners(shards);
        let (after, looks) = settled(before.clone(), &measured);
        let busy = &after[&slot(5)];
        assert_eq!(*busy, before[&slot(5)], "it does not move");
        assert_eq!(shares(&after)[busy.as_str()], [slot(5)], "its shard gives all else away");
        let others: Vec<u64> = loads(&after, &measured).into_iter().filter(|load| *load != 3100).collect();
        let mean = 3100 / (shards as u64 - 1);
        assert!(others.iter().all(|load| load * 100 <= mean * 130), "{others:?} {mean}");
        assert!(looks > 1, "a few slots at once");
    }
}

#[test]
fn shares_that_are_nearly_even_stay() {
    // One of the four shards has 1.29 times the mean, and then 1.31 times.
    let busy = |rate| measured(move |number| if number % 4 == 0 { rate } else { 1000 });
    assert_eq!(decide(&owners(4), &busy(1429)), None);
    let (after, _) = settled(owners(4), &busy(1470));
    assert_ne!(after, owners(4));
    // Back to what was not worth a move: nothing moves back.
    assert_eq!(decide(&after, &busy(1429)), None);
}

#[test]
fn too_few_requests_say_nothing() {
    let busy = measured(|number| if number % 4 == 0 { 40 } else { 1 });
    assert!(busy.requests < 400 && decide(&owners(4), &busy).is_none());
    assert!(decide(&owners(4), &Measured { requests: 400, ..busy }).is_some());
    assert_eq!(decide(&owners(1), &measured(|_| 1000)), None, "there is no other shard");
    assert_eq!(decide(&SlotOwners::new(), &measured(|_| 1000)), None);
}

#[test]
fn slots_without_load_need_not_move() {
    let measured = measured(|number| if number == 5 { 10_000 } else { 0 });
    assert_eq!(decide(&owners(4), &measured), None);
}

#[test]
fn a_decision_counts_for_what_it_was_made_of() {
    let (base, other) = (owners(2), owners(3));
    let next = owners(4);
    let load = RootLoad { decision: Some(Decision { base: base.clone(), next: next.clone() }), ..RootLoad::default() };
    assert_eq!(*load.wanted(&base), next);
    assert_eq!(*load.wanted(&other), other);
    assert_eq!(*load.wanted(&next), next, "once it is written");
}

proptest! {
    #[test]
    fn the_busiest_shard_never_gets_busier(
        rates in prop::collection::vec(0_u64..1000, 32),
        shards in 2_usize..8,
    ) {
        let measured = measured(|number| 100 + rates[usize::try_from(number).unwrap()]);
        let most = |owners: &SlotOwners| loads(owners, &measured).into_iter().max().unwrap();
        let mut wanted = owners(shards);
        while let Some(decision) = decide(&wanted, &measured) {
            prop_assert!(most(&decision.next) < most(&wanted));
            wanted = decision.next;
        }
    }
}
