use std::time::Duration;

use ctrlmesh_common::policy::Policy;

use super::*;

pub(crate) fn name(pod: &str) -> PodName {
    PodName { namespace: "ns".to_owned(), name: pod.to_owned() }
}

pub(crate) fn notice(pod: &str, node: &str, epoch: u64) -> EnrolledPod {
    EnrolledPod {
        name: name(pod),
        uid: format!("uid-of-{pod}"),
        node: Some(node.to_owned()),
        policy: Some(Arc::new(policy_in(epoch))),
    }
}

fn policy_in(epoch: u64) -> CompiledPolicy {
    let policy = Policy { epoch, ..Policy::default() };
    CompiledPolicy::new(None, Some("ns/op".to_owned()), epoch, policy)
}

fn node(node: &str) -> Subject {
    Subject::Node(node.to_owned())
}

pub(crate) fn receipt(pod: &str, epoch: u64) -> Receipt {
    Receipt {
        uid: format!("uid-of-{pod}"),
        node: None,
        by: Arc::from("proxy"),
        epoch,
        digest: 0,
        refused: None,
        connected: true,
        lost: false,
        last_contact: SystemTime::UNIX_EPOCH + Duration::from_secs(epoch),
        guards: Arc::default(),
        webhook: None,
    }
}

fn read(reader: &mut Reader) -> Vec<(String, u64)> {
    reader.read().iter().map(|pod| (pod.name.name.clone(), pod.policy.as_ref().unwrap().policy.epoch)).collect()
}

fn epochs(epochs: &[(&str, u64)]) -> Vec<(String, u64)> {
    epochs.iter().map(|(pod, epoch)| ((*pod).to_owned(), *epoch)).collect()
}

/// Whether it is woken.
fn woken(reader: &Reader) -> bool {
    reader.changes.has_changed().unwrap()
}

#[test]
fn namespaces_change_with_their_first_and_last_enrolled_pod() {
    let store = PolicyStore::default();
    let mut namespaces = store.namespaces();
    let mut news = || {
        let is_new = namespaces.has_changed().unwrap();
        (is_new, namespaces.borrow_and_update().len())
    };
    assert_eq!(news(), (false, 0));
    store.publish([notice("a", "one", 1)]);
    assert_eq!(news(), (true, 1));
    store.publish([notice("a", "one", 2), notice("b", "one", 1)]);
    assert_eq!(news(), (false, 1), "the same namespace");
    store.publish([]);
    assert_eq!(news(), (true, 0));
}

#[test]
fn a_reader_sees_its_own_node_only_and_only_the_newest() {
    let store = Arc::new(PolicyStore::default());
    let (mut one, mut two) = (store.follow(node("one")), store.follow(node("two")));
    store.publish([notice("a", "one", 1), notice("b", "one", 1), notice("c", "two", 1)]);
    store.publish([notice("a", "one", 2), notice("b", "one", 1), notice("c", "two", 1)]);
    assert_eq!(read(&mut one), epochs(&[("a", 2), ("b", 1)]));
    assert_eq!(read(&mut two), epochs(&[("c", 1)]));
    store.publish([notice("a", "one", 2), notice("b", "one", 3), notice("c", "two", 1)]);
    assert!(woken(&one) && !woken(&two), "what is not its own does not wake it");
    store.publish([notice("a", "one", 2), notice("b", "two", 3), notice("c", "two", 1)]);
    assert!(woken(&two));
    assert_eq!(read(&mut one), epochs(&[("a", 2)]));
    assert_eq!(read(&mut two), epochs(&[("b", 3), ("c", 1)]));
}

#[test]
fn another_incarnation_gets_no_policy() {
    let store = Arc::new(PolicyStore::default());
    let subject = |uid: &str| Subject::Pod(name("a"), uid.to_owned());
    let (mut old, mut new) = (store.follow(subject("old")), store.follow(subject("uid-of-a")));
    store.publish([notice("a", "one", 1)]);
    assert!(read(&mut old).is_empty());
    assert_eq!(read(&mut new), epochs(&[("a", 1)]));
    store.publish([]);
    assert!(woken(&new));
    assert!(read(&mut new).is_empty());
}

#[test]
fn the_same_again_wakes_nobody() {
    let store = Arc::new(PolicyStore::default());
    let mut reader = store.follow(node("one"));
    store.publish([notice("a", "one", 1)]);
    let first = reader.read();
    store.publish([notice("a", "one", 1)]);
    assert!(!woken(&reader));
    assert!(Arc::ptr_eq(&first[0], &reader.read()[0]));
}

#[test]
fn who_does_not_read_any_more_is_forgotten() {
    let store = Arc::new(PolicyStore::default());
    let (one, other) = (store.follow(node("one")), store.follow(node("one")));
    drop(one);
    store.publish([notice("a", "one", 1)]);
    assert!(woken(&other));
    drop(other);
    assert!(store.readers.lock().unwrap().is_empty());
}

#[test]
fn a_newer_version_of_the_same_is_known_and_wakes_nobody() {
    let store = Arc::new(PolicyStore::default());
    let mut reader = store.follow(node("one"));
    store.publish([notice("a", "one", 1)]);
    reader.read();
    let mut newer = policy_in(1);
    newer.version = 5;
    store.publish([EnrolledPod { policy: Some(Arc::new(newer)), ..notice("a", "one", 1) }]);
    assert!(!woken(&reader));
    assert_eq!(reader.read()[0].policy.as_ref().unwrap().version, 5);
}

#[test]
fn a_receipt_is_kept_for_the_pod_that_is_there() {
    let store = PolicyStore::default();
    store.publish([notice("a", "one", 1)]);
    let changes = store.receipts_changed();
    store.receive(None, &name("a"), receipt("a", 2));
    assert!(changes.has_changed().unwrap());
    store.receive(None, &name("a"), Receipt { uid: "old".to_owned(), ..receipt("a", 9) });
    store.receive(None, &name("b"), receipt("b", 1));
    assert_eq!(store.receipts(), BTreeMap::from([(name("a"), receipt("a", 2))]));
    store.publish([]);
    assert!(store.receipts().is_empty());
}

#[test]
fn traffic_is_kept_while_the_policy_asks_and_wakes_no_reader_of_receipts() {
    let store = PolicyStore::default();
    let asking = |report_traffic| {
        let policy = Policy { epoch: 1, report_traffic, ..Policy::default() };
        let policy = CompiledPolicy::new(None, Some("ns/op".to_owned()), 1, policy);
        EnrolledPod { policy: Some(Arc::new(policy)), ..notice("a", "one", 1) }
    };
    let (proxy, reported) = (Arc::from("proxy"), Traffic { requests: 7, ..Traffic::default() });
    let receive = |pod: &str, uid: &str| store.receive_traffic(None, (&name(pod), uid), &proxy, Some(reported.clone()));
    store.publish([asking(false)]);
    receive("a", "uid-of-a");
    assert!(store.traffic().newest().is_empty(), "the policy does not ask");
    store.publish([asking(true)]);
    let (receipts, changes) = (store.receipts_changed(), store.traffic().changes());
    receive("a", "old");
    receive("b", "uid-of-b");
    assert!(store.traffic().newest().is_empty() && !changes.has_changed().unwrap());
    receive("a", "uid-of-a");
    let kept = Reported { uid: "uid-of-a".to_owned(), state: reported.clone() };
    assert_eq!(store.traffic().newest(), BTreeMap::from([(name("a"), kept)]));
    assert!(changes.has_changed().unwrap() && !receipts.has_changed().unwrap());
    store.reporter_left(&name("a"), "proxy");
    assert_eq!(store.traffic().newest().len(), 1);
    store.publish([asking(false)]);
    assert!(store.traffic().newest().is_empty());
    store.publish([asking(true)]);
    receive("a", "uid-of-a");
    store.publish([]);
    assert!(store.traffic().newest().is_empty());
    assert!(!receipts.has_changed().unwrap());
}

#[test]
fn a_late_goodbye_does_not_undo_the_successors_receipt() {
    let store = PolicyStore::default();
    store.publish([notice("a", "one", 1)]);
    let old = receipt("a", 2);
    store.receive(None, &name("a"), old.clone());
    let new = Receipt { by: Arc::from("successor"), ..receipt("a", 3) };
    store.receive(None, &name("a"), new.clone());
    store.receive(None, &name("a"), Receipt { connected: false, ..old });
    assert_eq!(store.receipts()[&name("a")], new);
    let gone = Receipt { connected: false, ..new };
    store.receive(None, &name("a"), gone.clone());
    assert_eq!(store.receipts()[&name("a")], gone);
}

#[test]
fn the_receipt_of_a_connected_proxy_wins_over_clocks() {
    let store = PolicyStore::default();
    store.publish([notice("a", "one", 1)]);
    let (here, there) = (receipt("a", 2), Arc::from("there"));
    let ahead = Receipt { connected: false, ..receipt("a", 9) };
    store.receive(Some(&there), &name("a"), ahead.clone());
    assert_eq!(store.receipts()[&name("a")], ahead);
    store.receive(None, &name("a"), here.clone());
    assert_eq!(store.receipts()[&name("a")], here);
    assert_eq!(store.heard_here(), store.receipts());
    store.receive(Some(&there), &name("a"), Receipt { connected: true, ..ahead.clone() });
    store.receive(None, &name("a"), Receipt { connected: false, ..here });
    let now = ahead.last_contact + Duration::from_hours(1);
    store.lose(&there, now);
    let lost = Receipt { lost: true, last_contact: now, ..ahead };
    assert_eq!(store.receipts()[&name("a")], lost, "nobody is connected to what is gone");
    store.lose(&there, now + Duration::from_hours(1));
    assert_eq!(store.receipts()[&name("a")], lost, "it was away before");
}
