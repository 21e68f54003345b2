//! Shares that are kept even by load.

use ctrlmesh_common::balance::Weights;

use super::*;
use crate::rules::balance::{Decision, RootLoad, SlotOwners};

const BY_LOAD: &str = "fence: Server, targetStatefulSet: op, auto: {shardingSize: 4, balance: Load}";

const D: &str = "r-3-normal";

/// Two pods, with a half each.
fn settled() -> Bed {
    let mut bed = Bed::new(BY_LOAD);
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    let record = bed.settle();
    assert!(record.waiting.is_empty() && !record.moves, "{record:?}");
    assert!(
        bed.slots_of(A).len() == 16 && bed.slots_of(B).len() == 16 && record.wanted == bed.table.slots,
        "{record:?}"
    );
    bed
}

impl Bed {
    fn slots_of(&self, owner: &str) -> BTreeSet<Slot> {
        self.table.slots_of(owner).collect()
    }

    /// The balancer knows what slots weigh, and wants these to be of this owner.
    fn decide(&mut self, weights: &[(Slot, u64)], moved: &[Slot], to: &str) -> SlotOwners {
        let base = self.table.slots.clone();
        let mut next = base.clone();
        next.extend(moved.iter().map(|slot| (*slot, to.to_owned())));
        let rates = Weights(weights.iter().copied().collect());
        let load = RootLoad { rates, decision: Some(Decision { base, next: next.clone() }) };
        self.loads = [(ROOT.to_owned(), load)].into();
        next
    }
}

#[test]
fn a_decision_is_written_and_outlives_the_leader() {
    let mut bed = settled();
    let moved: Vec<Slot> = bed.slots_of(A).into_iter().take(3).collect();
    let next = bed.decide(&[], &moved, B);
    let record = bed.step();
    assert!(record.moves && record.wanted == next, "{record:?}");
    let taken = bed.table.revoked.as_ref().unwrap().slots.clone();
    assert!(taken.keys().eq(&moved) && taken.values().all(|owner| owner == A), "{taken:?}");
    // The next leader knows no load.
    bed.loads.clear();
    let record = bed.settle();
    assert!(bed.table.slots == next && record.waiting.is_empty(), "{record:?}");
    assert_eq!(record.wanted, next);
}

#[test]
fn a_new_pod_gets_its_part_by_load() {
    let mut bed = settled();
    let (busy, before) = (slot(0), bed.table.slots.clone());
    // Half of everything.
    let weights: Vec<(Slot, u64)> = (0..32).map(|number| (slot(number), if number == 0 { 310 } else { 10 })).collect();
    bed.decide(&weights, &[], A);
    bed.enrolled.push(enrolled("op-2"));
    bed.settle();
    let (kept, new) = (bed.slots_of(&before[&busy]), bed.slots_of(D));
    assert!(kept.contains(&busy) && kept.len() == 1, "the busy slot stays alone: {kept:?}");
    assert_eq!(new.len(), 15);
    assert_eq!(bed.slots_of(B).len(), 16, "who has less than the mean loses nothing");
}

#[test]
fn what_a_pod_had_goes_to_the_lightest_and_stays_there() {
    let mut bed = settled();
    bed.enrolled.push(enrolled("op-2"));
    bed.settle();
    let before = bed.table.slots.clone();
    let weights: Vec<(Slot, u64)> =
        before.iter().map(|(slot, owner)| (*slot, if owner == A { 100 } else { 1 })).collect();
    bed.decide(&weights, &[], A);
    bed.enrolled[1].ready = false;
    let record = bed.settle();
    let kept = before.iter().filter(|(slot, owner)| *owner != B && bed.table.slots[*slot] != **owner).count();
    assert!(bed.slots_of(B).is_empty() && kept == 0 && record.waiting.is_empty(), "{record:?}");
    assert!(bed.slots_of(A).len() < 12, "all goes to the lighter one: {:?}", bed.table.slots);
    // It comes back as a new pod does, once it is not held back.
    bed.enrolled[1].ready = true;
    bed.settle();
    assert!(!bed.slots_of(B).is_empty());
}

#[test]
fn a_replica_that_does_not_lead_wants_what_is_written() {
    let mut bed = settled();
    let moved: Vec<Slot> = bed.slots_of(A).into_iter().take(3).collect();
    bed.decide(&[], &moved, B);
    bed.leads = false;
    let following = bed.compiled().operators.remove(ROOT).unwrap();
    assert!(following.written && !following.moves && following.wanted == bed.table.slots, "{following:?}");
}

#[test]
fn by_count_nothing_is_remembered() {
    let mut bed = settled();
    let moved: Vec<Slot> = bed.slots_of(A).into_iter().take(4).collect();
    bed.decide(&[], &moved, B);
    bed.settle();
    assert_eq!(bed.slots_of(A).len(), 12);
    bed.root = root("fence: Server, targetStatefulSet: op, auto: {shardingSize: 4}");
    let record = bed.settle();
    assert!(bed.slots_of(A).len() == 16 && record.wanted.is_empty() && !record.moves, "{record:?}");
}

#[test]
fn proxies_count_by_slot_only_where_that_is_asked() {
    let asks = |rule: &str| {
        let mut bed = Bed::new(rule);
        bed.enrolled = vec![enrolled("op-0")];
        bed.settle();
        let policy = &bed.before.policies.values().next().unwrap().policy;
        (policy.report_traffic, policy.fence.as_ref().unwrap().counts_slots)
    };
    assert_eq!(asks(BY_LOAD), (true, true));
    assert_eq!(asks("fence: Server, targetStatefulSet: op, auto: {shardingSize: 4}"), (false, false));
}
