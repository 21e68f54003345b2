use super::*;
use crate::ownership::{Revoked, UNSHARDED};

const HASH: NamespaceHash = NamespaceHash::Fnv1a;

fn slot(number: i64) -> Slot {
    Slot::try_from(number).unwrap()
}

fn map<K: Ord>(pairs: impl IntoIterator<Item = (K, &'static str)>) -> BTreeMap<K, String> {
    pairs.into_iter().map(|(key, value)| (key, value.to_owned())).collect()
}

fn names(pairs: &[(&str, &'static str)]) -> BTreeMap<String, String> {
    map(pairs.iter().map(|(key, value)| ((*key).to_owned(), *value)))
}

/// Slots 9 (that of namespace `shop`) and 16, pods pa and pb.
fn desired(nine: &'static str, sixteen: &'static str) -> Desired {
    let pod_uids = names(&[("pa", "op-a"), ("pb", "op-b")]);
    Desired { slots: map([(slot(9), nine), (slot(16), sixteen)]), pod_uids, ..Desired::default() }
}

/// Epoch 1: slot 9 is a's, slot 16 is b's.
fn table() -> Ownership {
    step(&Ownership::default(), &desired("op-a", "op-b"), &Evidence::default()).table
}

fn step(current: &Ownership, desired: &Desired, evidence: &Evidence) -> Step {
    next(current, desired, HASH, evidence)
}

fn revoked(table: &Ownership) -> &Revoked {
    table.revoked.as_ref().unwrap()
}

fn acknowledged(pods: &[(&str, u64)]) -> BTreeMap<String, PodEvidence> {
    let evidence = |epoch| PodEvidence { acknowledged: Some(epoch), ..PodEvidence::default() };
    pods.iter().map(|(uid, epoch)| ((*uid).to_owned(), evidence(*epoch))).collect()
}

fn proxies(pods: &[(&str, u64)]) -> Evidence {
    Evidence { server: Server::None, pods: acknowledged(pods) }
}

fn pod(uid: &str, owner: &str, epoch: u64) -> Waiting {
    Waiting::Pod { uid: uid.to_owned(), owner: owner.to_owned(), epoch }
}

fn gone(uid: &str) -> (String, PodEvidence) {
    (uid.to_owned(), PodEvidence { gone: true, ..PodEvidence::default() })
}

#[test]
fn a_table_that_was_never_written_grants_all_at_once() {
    let wanted = Desired { namespaces: names(&[("shop", "op-b")]), ..desired("op-a", "op-b") };
    let Step { table, waiting } = step(&Ownership::default(), &wanted, &Evidence::default());
    assert_eq!((table.epoch, &table.slots, &table.namespaces), (1, &wanted.slots, &wanted.namespaces));
    assert_eq!((&table.pod_uids, table.revoked, waiting), (&wanted.pod_uids, None, vec![]));
}

#[test]
fn a_table_that_was_lost_proves_first() {
    let wanted = Desired { epoch: 7, ..desired("op-a", "op-b") };
    let Step { table, waiting } = step(&Ownership::default(), &wanted, &Evidence::default());
    assert_eq!((table.epoch, table.slots.len(), revoked(&table).epoch), (8, 0, 8));
    assert_eq!(revoked(&table).slots, map([(slot(9), EVERY_OWNER), (slot(16), EVERY_OWNER)]));
    assert_eq!(waiting, [pod("pa", "op-a", 8), pod("pb", "op-b", 8)]);
    let granted = step(&table, &wanted, &proxies(&[("pa", 8), ("pb", 8)])).table;
    assert_eq!((granted.epoch, &granted.slots, granted.revoked), (9, &wanted.slots, None));
}

#[test]
fn without_a_pod_nobody_is_waited_for() {
    let wanted = Desired { pod_uids: names(&[]), ..desired("op-b", "op-b") };
    let current = Ownership { pod_uids: names(&[]), ..table() };
    let unproved = Evidence { server: Server::Enforces(0), ..Evidence::default() };
    let Step { table, waiting } = step(&current, &wanted, &unproved);
    assert!(table.revoked.is_some() && waiting.is_empty(), "{waiting:?}");
    assert_eq!(step(&table, &wanted, &unproved).table.slots, wanted.slots);
}

#[test]
fn pods_that_worked_by_another_table_prove_first() {
    let wanted = Desired { taken_up: true, ..desired("op-a", "op-a") };
    let Step { table, waiting } = step(&Ownership::default(), &wanted, &Evidence::default());
    assert_eq!((table.epoch, table.slots.len(), revoked(&table).epoch), (1, 0, 1));
    assert_eq!(waiting, [pod("pb", "op-b", 1)], "a pod of the new owner has nothing to show");
    let granted = step(&table, &wanted, &proxies(&[("pb", 1)])).table;
    assert_eq!((granted.epoch, &granted.slots, granted.revoked), (2, &wanted.slots, None));
}

#[test]
fn a_slot_is_nobodys_until_its_former_owner_acknowledges() {
    let wanted = desired("op-b", "op-b");
    let Step { table, waiting } = step(&table(), &wanted, &proxies(&[("pa", 1), ("pb", 1)]));
    assert_eq!((table.epoch, table.owner(slot(9), None)), (2, None));
    assert_eq!(*revoked(&table), Revoked { epoch: 2, slots: map([(slot(9), "op-a")]), ..Revoked::default() });
    assert_eq!(waiting, [pod("pa", "op-a", 2)]);
    for silent in [Evidence::default(), proxies(&[("pa", 1), ("pb", 2)])] {
        assert_eq!(step(&table, &wanted, &silent), Step { table: table.clone(), waiting: waiting.clone() });
    }
    let granted = step(&table, &wanted, &proxies(&[("pa", 2)]));
    assert_eq!((granted.table.epoch, granted.table.owner(slot(9), None)), (3, Some("op-b")));
    assert_eq!((granted.table.revoked, granted.waiting), (None, vec![]));
}

#[test]
fn a_pod_that_is_gone_or_has_lapsed_holds_nothing_up() {
    let wanted = desired("op-b", "op-b");
    let revoked = step(&table(), &wanted, &Evidence::default()).table;
    let lapsed = PodEvidence { lapsed: true, ..PodEvidence::default() };
    let evidence = Evidence { pods: [("pa".to_owned(), lapsed)].into(), ..Evidence::default() };
    assert_eq!(step(&revoked, &wanted, &evidence).table.owner(slot(9), None), Some("op-b"));
    let evidence = Evidence { pods: [gone("pa")].into(), ..Evidence::default() };
    let granted = step(&revoked, &wanted, &evidence).table;
    assert_eq!(granted.owner(slot(9), None), Some("op-b"));
    assert_eq!(granted.pod_uids, names(&[("pb", "op-b")]));
}

#[test]
fn where_the_server_fences_it_must_enforce_the_epoch_too() {
    let wanted = desired("op-b", "op-b");
    let revoked = step(&table(), &wanted, &Evidence::default()).table;
    let both = |epoch, pods| Evidence { server: Server::Enforces(epoch), pods: acknowledged(pods) };
    let behind = step(&revoked, &wanted, &both(1, &[("pa", 2)]));
    assert_eq!((behind.table, behind.waiting), (revoked.clone(), vec![Waiting::Server { epoch: 2 }]));
    let in_flight = step(&revoked, &wanted, &both(2, &[("pa", 1)]));
    assert_eq!((in_flight.table, in_flight.waiting), (revoked.clone(), vec![pod("pa", "op-a", 2)]));
    assert_eq!(step(&revoked, &wanted, &both(2, &[("pa", 2)])).table.owner(slot(9), None), Some("op-b"));
}

#[test]
fn an_unsharded_pod_must_be_gone_or_the_server_fences() {
    let first = Desired { pod_uids: names(&[("old", UNSHARDED)]), ..desired(UNSHARDED, UNSHARDED) };
    let first = step(&Ownership::default(), &first, &Evidence::default()).table;
    let pod_uids = names(&[("old", UNSHARDED), ("pa", "op-a")]);
    let wanted = Desired { pod_uids, ..desired("op-a", "op-a") };
    let Step { table, waiting } = step(&first, &wanted, &Evidence::default());
    assert_eq!(table.pod_uids, wanted.pod_uids);
    let end = Waiting::PodEnd { uid: "old".to_owned(), owner: UNSHARDED.to_owned() };
    assert_eq!(waiting, [end]);
    let lapsed = PodEvidence { acknowledged: Some(9), lapsed: true, ..PodEvidence::default() };
    let word = Evidence { pods: [("old".to_owned(), lapsed)].into(), ..Evidence::default() };
    assert_eq!(step(&table, &wanted, &word).table, table);
    let ended = Evidence { pods: [gone("old")].into(), ..Evidence::default() };
    assert_eq!(step(&table, &wanted, &ended).table.slots, wanted.slots);
    let fenced = Evidence { server: Server::Enforces(2), ..Evidence::default() };
    assert_eq!(step(&table, &wanted, &fenced).table.slots, wanted.slots);
}

#[test]
fn what_is_granted_goes_to_whoever_shall_have_it_by_then() {
    let revoked = step(&table(), &desired("op-b", "op-b"), &Evidence::default()).table;
    let third = step(&revoked, &desired("op-c", "op-b"), &proxies(&[("pa", 2)])).table;
    assert_eq!((third.epoch, third.owner(slot(9), None)), (3, Some("op-c")));
    let back = step(&revoked, &desired("op-a", "op-b"), &Evidence::default()).table;
    assert_eq!((back.epoch, back.owner(slot(9), None)), (3, Some("op-a")), "its own pods are not asked");
}

#[test]
fn what_is_proved_is_granted_beside_what_is_revoked_anew() {
    let first = step(&table(), &desired("op-b", "op-b"), &Evidence::default()).table;
    let second = step(&first, &desired("op-b", "op-c"), &proxies(&[("pa", 2)])).table;
    assert_eq!((second.epoch, second.owner(slot(9), None)), (3, Some("op-b")));
    assert_eq!(*revoked(&second), Revoked { epoch: 3, slots: map([(slot(16), "op-b")]), ..Revoked::default() });
}

#[test]
fn a_later_revocation_asks_for_a_later_proof() {
    let first = step(&table(), &desired("op-b", "op-b"), &Evidence::default()).table;
    let second = step(&first, &desired("op-b", "op-c"), &Evidence::default()).table;
    assert_eq!(revoked(&second).epoch, 3);
    assert_eq!(step(&second, &desired("op-b", "op-c"), &proxies(&[("pa", 2), ("pb", 2)])).table, second);
}

#[test]
fn a_pin_is_taken_from_the_owner_of_its_slot() {
    let pinned = Desired { namespaces: names(&[("shop", "op-b")]), ..desired("op-a", "op-b") };
    let Step { table: taken, waiting } = step(&table(), &pinned, &Evidence::default());
    assert_eq!(revoked(&taken).namespaces, names(&[("shop", "op-a")]));
    assert_eq!((taken.owner(slot(9), Some("shop")), taken.owner(slot(9), Some("pay"))), (None, Some("op-a")));
    assert_eq!(waiting, [pod("pa", "op-a", 2)]);
    let granted = step(&taken, &pinned, &proxies(&[("pa", 2)])).table;
    assert_eq!(granted.owner(slot(9), Some("shop")), Some("op-b"));

    let given_back = step(&granted, &desired("op-a", "op-b"), &proxies(&[("pa", 3), ("pb", 3)])).table;
    assert_eq!(revoked(&given_back).namespaces, names(&[("shop", "op-b")]));
    assert_eq!(given_back.owner(slot(9), Some("shop")), None);
    let back = step(&given_back, &desired("op-a", "op-b"), &proxies(&[("pb", 4)])).table;
    assert_eq!(
        (back.owner(slot(9), Some("shop")), back.namespaces.len(), back.revoked.is_none()),
        (Some("op-a"), 0, true)
    );
}

#[test]
fn a_pin_that_changes_no_owner_is_entered_at_once() {
    let pinned = Desired { namespaces: names(&[("shop", "op-a")]), ..desired("op-a", "op-b") };
    let entered = step(&table(), &pinned, &Evidence::default()).table;
    assert_eq!((&entered.namespaces, &entered.revoked), (&pinned.namespaces, &None));
    let removed = step(&entered, &desired("op-a", "op-b"), &Evidence::default()).table;
    assert_eq!((removed.epoch, removed.namespaces.len(), removed.revoked), (3, 0, None));
    // The slot moves in the same table, the namespace stays.
    let pinned = Desired { namespaces: names(&[("shop", "op-a")]), ..desired("op-b", "op-b") };
    let entered = step(&table(), &pinned, &Evidence::default()).table;
    assert_eq!((entered.owner(slot(9), Some("shop")), entered.owner(slot(9), None)), (Some("op-a"), None));
}

#[test]
fn a_pin_of_a_slot_on_its_way_waits_for_the_slots_former_owner() {
    let moving = step(&table(), &desired("op-b", "op-b"), &Evidence::default()).table;
    let pinned = Desired { namespaces: names(&[("shop", "op-c")]), ..desired("op-b", "op-b") };
    let Step { table, waiting } = step(&moving, &pinned, &Evidence::default());
    assert_eq!(revoked(&table).namespaces, names(&[("shop", "op-a")]));
    assert_eq!(waiting, [pod("pa", "op-a", 3)]);
}

#[test]
fn a_pod_that_changes_its_owner_proves_it_first() {
    let wanted = Desired { pod_uids: names(&[("pa", "op-b"), ("pb", "op-b")]), ..desired("op-a", "op-b") };
    let taken = step(&table(), &wanted, &Evidence::default()).table;
    assert_eq!(revoked(&taken).pod_uids, names(&[("pa", "op-a")]));
    assert_eq!(taken.pod_uids, names(&[("pb", "op-b")]));
    // The pod still counts for a: a slot of a waits for it.
    let wanted = Desired { slots: desired("op-c", "op-b").slots, ..wanted };
    let Step { table: both, waiting } = step(&taken, &wanted, &Evidence::default());
    assert_eq!(waiting, [pod("pa", "op-a", 3)]);
    let granted = step(&both, &wanted, &proxies(&[("pa", 3)])).table;
    assert_eq!((&granted.pod_uids, granted.owner(slot(9), None)), (&wanted.pod_uids, Some("op-c")));
}

#[test]
fn a_pod_leaves_the_table_only_when_it_is_gone() {
    let wanted = Desired { pod_uids: names(&[("pb", "op-b"), ("pc", "op-a")]), ..desired("op-a", "op-b") };
    let kept = step(&table(), &wanted, &Evidence::default()).table;
    assert_eq!(kept.pod_uids, names(&[("pa", "op-a"), ("pb", "op-b"), ("pc", "op-a")]));
    let evidence = Evidence { pods: [gone("pa")].into(), ..Evidence::default() };
    assert_eq!(step(&kept, &wanted, &evidence).table.pod_uids, wanted.pod_uids);
    let still_named = Desired { pod_uids: names(&[("pa", "op-a")]), ..wanted };
    assert!(!step(&kept, &still_named, &evidence).table.pod_uids.contains_key("pa"));
}

#[test]
fn a_slot_in_the_table_and_revoked_is_revoked_again() {
    let mut edited = step(&table(), &desired("op-b", "op-b"), &Evidence::default()).table;
    edited.slots.insert(slot(9), "op-b".to_owned());
    let again = step(&edited, &desired("op-b", "op-b"), &proxies(&[("pa", 2), ("pb", 2)])).table;
    assert_eq!((again.epoch, again.owner(slot(9), None)), (3, None));
    assert_eq!(*revoked(&again), Revoked { epoch: 3, slots: map([(slot(9), EVERY_OWNER)]), ..Revoked::default() });
}

#[test]
fn no_proof_counts_for_an_epoch_that_was_never_written() {
    for epoch in [0, 50] {
        let mut edited = step(&table(), &desired("op-b", "op-b"), &Evidence::default()).table;
        edited.revoked.as_mut().unwrap().epoch = epoch;
        let again = step(&edited, &desired("op-b", "op-b"), &proxies(&[("pa", 50)])).table;
        assert_eq!((again.owner(slot(9), None), revoked(&again).epoch), (None, again.epoch));
        assert!(again.epoch > epoch);
    }
}

#[test]
fn without_an_epoch_left_nothing_changes() {
    let last = Ownership { epoch: MAX_EPOCH, ..table() };
    let stuck = step(&last, &desired("op-b", "op-b"), &Evidence::default());
    assert_eq!(stuck, Step { table: last.clone(), waiting: vec![Waiting::Epoch] });
    let as_wanted = Desired { slots: last.slots.clone(), pod_uids: last.pod_uids.clone(), ..Desired::default() };
    assert_eq!(step(&last, &as_wanted, &Evidence::default()), Step { table: last, waiting: vec![] });
}
