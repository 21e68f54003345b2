//! The record by which `cargo xtask bench scale` finds two pods that may write the same.
#![allow(clippy::unwrap_used, reason = "a test")]

#[allow(dead_code, reason = "the benchmark uses all of it")]
#[path = "../../benches/scale/holders.rs"]
mod holders;

use std::time::Duration;

use ctrlmesh_common::policy::{Fence, Policy};
use ctrlmesh_common::slots::{Slot, SlotSet};
use holders::{Holders, Violation};
use tokio::time::Instant;

/// A policy by which the shard `owner` owns `own`, and `b` the rest.
fn policy(owner: &str, own: SlotSet, lapses: bool) -> Policy {
    let rest = own.complement().iter().map(|slot| (slot, "b".to_owned()));
    let slots = own.iter().map(|slot| (slot, "a".to_owned())).chain(rest).collect();
    let fence = Fence { owner: Some(owner.to_owned()), slots, lapses, ..Fence::default() };
    Policy { fence: Some(fence), ..Policy::default() }
}

fn first(count: usize) -> SlotSet {
    SlotSet::ALL.iter().take(count).collect()
}

fn two() -> Holders {
    let mut holders = Holders::default();
    for uid in ["a", "b"] {
        holders.begin(uid, uid, 0);
        holders.set_ready(uid, true);
    }
    holders
}

#[test]
fn a_slot_that_two_pods_may_write_is_found() {
    let (mut holders, now) = (two(), Instant::now());
    holders.apply("a", policy("a", first(16), false), now).unwrap();
    holders.apply("b", policy("b", first(16), false), now).unwrap();
    assert!(holders.are_even(2, 0, now) && !holders.are_even(2, 1, now) && !holders.are_even(3, 0, now));
    // Granted before the other one has acknowledged that it was taken away.
    let violation = holders.apply("b", policy("b", first(15), false), now).unwrap_err();
    let slots: SlotSet = [Slot::try_from(15).unwrap()].into_iter().collect();
    assert_eq!(violation, Violation::HeldTwice { one: "b".to_owned(), other: "a".to_owned(), slots });
    holders.apply("a", policy("a", first(15), false), now).unwrap();
    assert!(!holders.are_even(2, 0, now), "15 and 17");
}

#[test]
fn a_pod_holds_its_slots_until_its_processes_end() {
    let (mut holders, now) = (two(), Instant::now());
    holders.apply("a", policy("a", first(16), false), now).unwrap();
    holders.set_ready("a", false);
    assert!(holders.apply("b", policy("b", SlotSet::EMPTY, false), now).is_err());
    holders.end("a");
    holders.apply("b", policy("b", SlotSet::EMPTY, false), now).unwrap();
    holders.apply("a", policy("a", first(16), false), now).unwrap();
    assert!(holders.are_even(1, 0, now), "one that has ended holds nothing");
}

#[test]
fn a_policy_that_lapses_counts_while_it_is_confirmed() {
    let (mut holders, now) = (two(), Instant::now());
    holders.apply("a", policy("a", first(16), true), now).unwrap();
    assert!(holders.get("a").unwrap().awaits_confirmation(now) && holders.get("a").unwrap().held(now).is_empty());
    holders.confirm("a", now, now).unwrap();
    assert_eq!(holders.get("a").unwrap().held(now).len(), 16);
    let later = now + Duration::from_secs(19);
    assert!(holders.apply("b", policy("b", SlotSet::EMPTY, false), later).is_err(), "a write may be under way");
    let lapsed = now + Duration::from_secs(20);
    holders.apply("b", policy("b", SlotSet::EMPTY, false), lapsed).unwrap();
    assert!(holders.confirm("a", lapsed, lapsed).is_err(), "confirmed after its slots were granted");
}

#[test]
fn a_pod_without_a_fence_may_only_see_nothing() {
    let (mut holders, now) = (two(), Instant::now());
    holders.apply("a", Policy::nothing(), now).unwrap();
    let unfenced = holders.apply("a", Policy::default(), now);
    assert_eq!(unfenced, Err(Violation::Unfenced { pod: "a".to_owned() }));
}
