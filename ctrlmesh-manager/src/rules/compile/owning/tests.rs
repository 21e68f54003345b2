use std::sync::LazyLock;

use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::Revoked;

use super::*;
use crate::rules::pod::PodName;
use crate::rules::shard::Versions;

const A: &str = "r-1-normal";

const B: &str = "r-2-normal";

const D: &str = "r-3-normal";

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

/// Pods `a`, `b` and `c` are of the first shard, the second and the canary, `d` is of the third.
static PLACED: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let placed = [("a", A), ("b", B), ("c", "r-0-canary"), ("d", D)];
    placed.map(|(pod, shard)| (pod.to_owned(), shard.to_owned())).into()
});

static NOBODY: BTreeSet<String> = BTreeSet::new();

fn workload<'a>(shares: &'a [Share], enrolled: &'a [&'a Member], unenrolled: &'a [&'a Member]) -> Workload<'a> {
    Workload {
        shares,
        placed: &PLACED,
        enrolled,
        unenrolled,
        hash: NamespaceHash::default(),
        is_leaving: false,
        versions: Versions::default(),
        elects: true,
        is_elastic: false,
        load: None,
        held_back: &NOBODY,
        waiting: None,
    }
}

fn desired(shares: &[Share], enrolled: &[&Member], unenrolled: &[&Member], current: &Ownership) -> Desired {
    owning(workload(shares, enrolled, unenrolled), current, 3)
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
    assert_eq!(awaited(workload(&shares, &[], &[]), &found), ["r-0-canary"].into());
    let found = desired(&shares, &[&a, &b, &c], &[], &current);
    assert_eq!(found.namespaces, [("shop".to_owned(), "r-0-canary".to_owned())].into());
    assert!(awaited(workload(&shares, &[], &[]), &found).is_empty());
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

/// Thirds of an elastic root.
fn thirds() -> Vec<Share> {
    let parts = SlotSet::ALL.divide(3).into_iter().zip([A, B, D]);
    let share = |(slots, name): (SlotSet, &str)| Share { name: name.to_owned(), slots, ..shares(&[])[0].clone() };
    parts.map(share).collect()
}

fn elastic(enrolled: &[&Member], unenrolled: &[&Member], current: &Ownership) -> Desired {
    let shares = thirds();
    let workload = Workload { is_elastic: true, ..workload(&shares, enrolled, unenrolled) };
    let desired = owning(workload, current, 3);
    assert!(desired.slots.values().any(|owner| *owner == UNSHARDED) || awaited(workload, &desired).is_empty());
    desired
}

/// How many slots each of the three shards has, and how many left another owner than `before`.
fn sizes(desired: &Desired, before: &Desired) -> ([usize; 3], usize) {
    let count = |name: &str| desired.slots.values().filter(|owner| *owner == name).count();
    let moved = desired.slots.iter().filter(|(slot, owner)| before.slots.get(slot) != Some(owner)).count();
    ([A, B, D].map(count), moved)
}

#[test]
fn elastic_shares_follow_the_pods_with_the_fewest_moves() {
    let [a, b, d] = ["a", "b", "d"].map(pod);
    let written = |desired: &Desired| Ownership {
        epoch: 4,
        slots: desired.slots.clone(),
        pod_uids: desired.pod_uids.clone(),
        ..Ownership::default()
    };
    let one = elastic(&[&a], &[], &Ownership::default());
    assert_eq!(sizes(&one, &one), ([32, 0, 0], 0));
    let two = elastic(&[&a, &b], &[], &written(&one));
    assert_eq!(sizes(&two, &one), ([16, 16, 0], 16));
    let three = elastic(&[&a, &b, &d], &[], &written(&two));
    assert_eq!(sizes(&three, &two), ([11, 11, 10], 10));
    // The second is away: what it had goes to the others, and comes back.
    let away = Member { ready: false, ..b.clone() };
    let without = elastic(&[&a, &away, &d], &[], &written(&three));
    assert_eq!(sizes(&without, &three), ([16, 0, 16], 11));
    let back = elastic(&[&a, &b, &d], &[], &written(&without));
    assert_eq!(sizes(&back, &without), ([11, 10, 11], 10));
    // It stays away for a while, but not if nobody else is there.
    let held: BTreeSet<String> = ["b".to_owned()].into();
    let held_back = |enrolled: &[&Member], current: &Ownership| {
        let shares = thirds();
        owning(Workload { is_elastic: true, held_back: &held, ..workload(&shares, enrolled, &[]) }, current, 3)
    };
    assert_eq!(sizes(&held_back(&[&a, &b, &d], &written(&without)), &without).1, 0);
    assert_eq!(sizes(&held_back(&[&b], &written(&without)), &without), ([0, 32, 0], 32));
    assert_eq!(sizes(&held_back(&[&a, &b, &d], &written(&three)), &three).1, 0, "it keeps what it has");
    // So it is with one that waits for its lock.
    let (shares, all) = (thirds(), [&a, &b, &d]);
    let waiting = Workload { is_elastic: true, waiting: Some(&held), ..workload(&shares, &all, &[]) };
    assert_eq!(sizes(&owning(waiting, &written(&without), 3), &without).1, 0);
    let elects_nobody = Workload { waiting: None, ..waiting };
    assert_ne!(sizes(&owning(elects_nobody, &written(&without), 3), &without).1, 0);
    // Nobody serves: everything stays, whoever lives.
    let all = [&a, &b, &d].map(|pod| Member { ready: false, ..pod.clone() });
    let nobody = elastic(&all.each_ref(), &[], &written(&back));
    assert_eq!(sizes(&nobody, &back).1, 0);
}

#[test]
fn an_elastic_root_takes_over_from_pods_without_a_proxy() {
    let [a, b] = ["a", "b"].map(pod);
    let begins = elastic(&[&a, &b], &[&pod("x")], &Ownership::default());
    assert_eq!(ends(&begins), [UNSHARDED, UNSHARDED]);
    // One of three, then two, then all.
    let shares = |enrolled: &[&Member], unenrolled: &[&Member], current: &Ownership| {
        let desired = elastic(enrolled, unenrolled, current);
        let unsharded = desired.slots.values().filter(|owner| *owner == UNSHARDED).count();
        (sizes(&desired, &desired).0, unsharded, Ownership { slots: desired.slots, ..current.clone() })
    };
    let all = table(UNSHARDED, &[("x", UNSHARDED)]);
    let (first, left, current) = shares(&[&a], &[&pod("x"), &pod("y")], &all);
    assert_eq!((first, left), ([11, 0, 0], 21));
    let (second, left, current) = shares(&[&a, &b], &[&pod("x")], &current);
    assert_eq!((second, left), ([11, 10, 0], 11));
    assert_eq!(shares(&[&a, &b], &[], &current).0, [16, 16, 0]);
}

#[test]
fn an_elastic_root_with_a_canary_divides_what_that_leaves() {
    let (canary, normal) = (SlotSet::ALL.divide(4)[0], SlotSet::ALL.divide(4)[0].complement());
    let mut shares = shares(&["shop"]);
    (shares[0].slots, shares[1].slots, shares[2].slots) = (canary, normal.divide(2)[0], normal.divide(2)[1]);
    let [b, c] = ["b", "c"].map(pod);
    let enrolled = [&b, &c];
    let workload = Workload { is_elastic: true, ..workload(&shares, &enrolled, &[]) };
    let desired = owning(workload, &Ownership::default(), 3);
    let count = |name: &str| desired.slots.values().filter(|owner| *owner == name).count();
    assert_eq!(["r-0-canary", A, B].map(count), [8, 0, 24]);
}
