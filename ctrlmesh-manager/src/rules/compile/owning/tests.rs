use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::Revoked;

use super::*;
use crate::rules::pod::PodName;
use crate::rules::shard::Versions;

const A: &str = "r-1-normal";

const B: &str = "r-2-normal";

fn shares(pinned: &[&str]) -> Vec<Share> {
    let share = |name: &str, slots: SlotSet, namespaces: &[&str]| Share {
        name: name.to_owned(),
        canary: !namespaces.is_empty(),
        second: false,
        replicas: 1,
        slots,
        namespaces: namespaces.iter().map(|name| (*name).to_owned()).collect(),
    };
    let halves = SlotSet::ALL.divide(2);
    let canary = (!pinned.is_empty()).then(|| share("r-0-canary", SlotSet::EMPTY, pinned));
    canary.into_iter().chain([share(A, halves[0], &[]), share(B, halves[1], &[])]).collect()
}

fn pod(name: &str) -> Member {
    let labels = [(label::ENABLE_PROXY.to_owned(), "true".to_owned())].into();
    Member {
        name: PodName { namespace: "ops".to_owned(), name: name.to_owned() },
        uid: name.to_owned(),
        node: Some("n".to_owned()),
        ready: true,
        labels,
        ..Member::default()
    }
}

/// Pods `a`, `b` and `c` are of the first shard, the second and the canary.
fn desired(shares: &[Share], enrolled: &[&Member], unenrolled: &[&Member], current: &Ownership) -> Desired {
    let placed = [("a", A), ("b", B), ("c", "r-0-canary")];
    let placed = placed.map(|(pod, shard)| (pod.to_owned(), shard.to_owned())).into();
    let hash = NamespaceHash::default();
    let workload = Workload {
        shares,
        placed: &placed,
        enrolled,
        unenrolled,
        hash,
        is_leaving: false,
        versions: Versions::default(),
    };
    owning(workload, current, 3)
}

fn table(owner: &str, pods: &[(&str, &str)]) -> Ownership {
    Ownership {
        epoch: 4,
        slots: SlotSet::ALL.iter().map(|slot| (slot, owner.to_owned())).collect(),
        pod_uids: pods.iter().map(|(uid, owner)| ((*uid).to_owned(), (*owner).to_owned())).collect(),
        ..Ownership::default()
    }
}

/// The owners of the first and the last slot.
fn ends(desired: &Desired) -> [&str; 2] {
    [0, 31].map(|number: i64| desired.slots[&number.try_into().unwrap()].as_str())
}

#[test]
fn a_shard_owns_its_share_from_when_a_pod_of_it_serves() {
    let (a, b) = (pod("a"), pod("b"));
    let shares = shares(&[]);
    let by = |b: &Member| {
        let desired = desired(&shares, &[&a, b], &[], &table(A, &[("a", A)]));
        ends(&desired).map(str::to_owned)
    };
    assert_eq!(by(&b), [A, B]);
    assert_eq!(by(&Member { ready: false, ..b.clone() }), [A, A]);
    assert_eq!(by(&Member { terminating: true, ..b.clone() }), [A, A]);
}

#[test]
fn a_pod_lives_until_it_has_ended_not_until_its_deletion() {
    let shares = shares(&[]);
    let leaves = Member { terminating: true, ready: false, ..pod("a") };
    let current = table(A, &[("a", A)]);
    let found = desired(&shares, &[&leaves], &[&pod("x")], &current);
    assert_eq!((ends(&found), found.pod_uids["a"].as_str()), ([A, A], A));
    let ended = Member { stopped: true, ..leaves };
    let found = desired(&shares, &[&ended], &[&pod("x")], &current);
    assert_eq!((ends(&found), found.pod_uids.get("a")), ([UNSHARDED, UNSHARDED], None));
    assert_eq!(ends(&desired(&shares, &[&ended], &[], &current)), [A, B], "nobody lives");
}

#[test]
fn what_is_taken_away_can_still_return_to_its_owner() {
    let shares = shares(&[]);
    let mut current = table(A, &[("a", A)]);
    let slots = std::mem::take(&mut current.slots);
    current.revoked = Some(Revoked { epoch: 4, slots, ..Revoked::default() });
    let unready = Member { ready: false, ..pod("b") };
    assert_eq!(ends(&desired(&shares, &[&pod("a"), &unready], &[], &current)), [A, A]);
}

#[test]
fn a_pin_waits_for_the_canary_with_the_present_owner() {
    let shares = shares(&["shop"]);
    let (a, b, c) = (pod("a"), pod("b"), pod("c"));
    let current = Ownership { slots: desired(&shares, &[&a, &b], &[], &Ownership::default()).slots, ..table(A, &[]) };
    let found = desired(&shares, &[&a, &b], &[], &current);
    assert!(found.namespaces.is_empty(), "{:?}", found.namespaces);
    assert_eq!(awaited(&shares, &found), ["r-0-canary"].into());
    let found = desired(&shares, &[&a, &b, &c], &[], &current);
    assert_eq!(found.namespaces, [("shop".to_owned(), "r-0-canary".to_owned())].into());
    assert!(awaited(&shares, &found).is_empty());
}

#[test]
fn a_pod_without_a_node_writes_for_nobody_yet() {
    let pending = Member { node: None, ..pod("a") };
    let found = desired(&shares(&[]), &[&pending, &pod("b")], &[], &Ownership::default());
    assert_eq!(found.pod_uids.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(found.epoch, 3);
}

#[test]
fn a_running_operator_has_everything_before_the_first_table() {
    let found = desired(&shares(&["shop"]), &[&pod("a"), &pod("b"), &pod("c")], &[&pod("x")], &Ownership::default());
    assert_eq!(ends(&found), [UNSHARDED, UNSHARDED]);
    assert!(found.namespaces.is_empty());
}
