use std::time::Duration;

use ctrlmesh_common::policy::Policy;

use super::*;

pub(crate) fn name(pod: &str) -> PodName {
    PodName { namespace: "ns".to_owned(), name: pod.to_owned() }
}

pub(crate) fn notice(pod: &str, node: &str, epoch: u64) -> Posted {
    Posted {
        pod: name(pod),
        uid: format!("uid-of-{pod}"),
        node: Some(node.to_owned()),
        said: Some(Said::from(&told_in(epoch))),
    }
}

fn told_in(epoch: u64) -> Told {
    let policy = Policy { epoch, ..Policy::default() };
    Told::new(None, Some("ns/op".to_owned()), epoch, policy)
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
        last_contact: SystemTime::UNIX_EPOCH + Duration::from_secs(epoch),
    }
}

fn read(reader: &mut Reader) -> Vec<(String, u64)> {
    reader
        .read()
        .iter()
        .map(|posted| (posted.pod.name.clone(), posted.said.as_ref().unwrap().epoch))
        .collect()
}

fn told(told: &[(&str, u64)]) -> Vec<(String, u64)> {
    told.iter().map(|(pod, epoch)| ((*pod).to_owned(), *epoch)).collect()
}

/// Whether it is woken.
fn woken(reader: &Reader) -> bool {
    reader.changes.has_changed().unwrap()
}

#[test]
fn it_is_told_when_a_namespace_has_its_first_enrolled_pod_or_has_lost_its_last() {
    let board = Board::default();
    let mut namespaces = board.namespaces();
    let mut news = || {
        let is_new = namespaces.has_changed().unwrap();
        (is_new, namespaces.borrow_and_update().len())
    };
    assert_eq!(news(), (false, 0));
    board.publish([notice("a", "one", 1)]);
    assert_eq!(news(), (true, 1));
    board.publish([notice("a", "one", 2), notice("b", "one", 1)]);
    assert_eq!(news(), (false, 1), "the same namespace");
    board.publish([]);
    assert_eq!(news(), (true, 0));
}

#[test]
fn a_reader_sees_its_own_node_only_and_only_the_newest() {
    let board = Arc::new(Board::default());
    let (mut one, mut two) = (board.follow(node("one")), board.follow(node("two")));
    board.publish([notice("a", "one", 1), notice("b", "one", 1), notice("c", "two", 1)]);
    board.publish([notice("a", "one", 2), notice("b", "one", 1), notice("c", "two", 1)]);
    assert_eq!(read(&mut one), told(&[("a", 2), ("b", 1)]));
    assert_eq!(read(&mut two), told(&[("c", 1)]));
    board.publish([notice("a", "one", 2), notice("b", "one", 3), notice("c", "two", 1)]);
    assert!(woken(&one) && !woken(&two), "what is not its own does not wake it");
    board.publish([notice("a", "one", 2), notice("b", "two", 3), notice("c", "two", 1)]);
    assert!(woken(&two));
    assert_eq!(read(&mut one), told(&[("a", 2)]));
    assert_eq!(read(&mut two), told(&[("b", 3), ("c", 1)]));
}

#[test]
fn another_incarnation_is_told_nothing() {
    let board = Arc::new(Board::default());
    let subject = |uid: &str| Subject::Pod(name("a"), uid.to_owned());
    let (mut old, mut new) = (board.follow(subject("old")), board.follow(subject("uid-of-a")));
    board.publish([notice("a", "one", 1)]);
    assert!(read(&mut old).is_empty());
    assert_eq!(read(&mut new), told(&[("a", 1)]));
    board.publish([]);
    assert!(woken(&new));
    assert!(read(&mut new).is_empty());
}

#[test]
fn the_same_again_wakes_nobody() {
    let board = Arc::new(Board::default());
    let mut reader = board.follow(node("one"));
    board.publish([notice("a", "one", 1)]);
    let first = reader.read();
    board.publish([notice("a", "one", 1)]);
    assert!(!woken(&reader));
    assert!(Arc::ptr_eq(&first[0], &reader.read()[0]));
}

#[test]
fn who_does_not_read_any_more_is_forgotten() {
    let board = Arc::new(Board::default());
    let (one, other) = (board.follow(node("one")), board.follow(node("one")));
    drop(one);
    board.publish([notice("a", "one", 1)]);
    assert!(woken(&other));
    drop(other);
    assert!(board.readers.lock().unwrap().is_empty());
}

#[test]
fn a_newer_version_of_the_same_is_known_and_wakes_nobody() {
    let board = Arc::new(Board::default());
    let mut reader = board.follow(node("one"));
    board.publish([notice("a", "one", 1)]);
    reader.read();
    let mut newer = told_in(1);
    newer.version = 5;
    board.publish([Posted { said: Some(Said::from(&newer)), ..notice("a", "one", 1) }]);
    assert!(!woken(&reader));
    assert_eq!(reader.read()[0].said.as_ref().unwrap().version, 5);
}

#[test]
fn a_receipt_is_kept_for_the_pod_that_is_there() {
    let board = Board::default();
    board.publish([notice("a", "one", 1)]);
    let changes = board.receipts_changed();
    board.receive(None, &name("a"), receipt("a", 2));
    assert!(changes.has_changed().unwrap());
    board.receive(None, &name("a"), Receipt { uid: "old".to_owned(), ..receipt("a", 9) });
    board.receive(None, &name("b"), receipt("b", 1));
    assert_eq!(board.receipts(), BTreeMap::from([(name("a"), receipt("a", 2))]));
    board.publish([]);
    assert!(board.receipts().is_empty());
}

#[test]
fn a_proxy_that_goes_after_its_successor_has_come_takes_nothing_with_it() {
    let board = Board::default();
    board.publish([notice("a", "one", 1)]);
    let old = receipt("a", 2);
    board.receive(None, &name("a"), old.clone());
    let new = Receipt { by: Arc::from("successor"), ..receipt("a", 3) };
    board.receive(None, &name("a"), new.clone());
    board.receive(None, &name("a"), Receipt { connected: false, ..old });
    assert_eq!(board.receipts()[&name("a")], new);
    let gone = Receipt { connected: false, ..new };
    board.receive(None, &name("a"), gone.clone());
    assert_eq!(board.receipts()[&name("a")], gone);
}

#[test]
fn of_two_replicas_the_one_to_which_the_proxy_is_connected_is_believed_whatever_the_clocks_say() {
    let board = Board::default();
    board.publish([notice("a", "one", 1)]);
    let (here, there) = (receipt("a", 2), Arc::from("there"));
    let ahead = Receipt { connected: false, ..receipt("a", 9) };
    board.receive(Some(&there), &name("a"), ahead.clone());
    assert_eq!(board.receipts()[&name("a")], ahead);
    board.receive(None, &name("a"), here.clone());
    assert_eq!(board.receipts()[&name("a")], here);
    assert_eq!(board.heard_here(), board.receipts());
    board.receive(Some(&there), &name("a"), Receipt { connected: true, ..ahead.clone() });
    board.receive(None, &name("a"), Receipt { connected: false, ..here });
    let now = ahead.last_contact + Duration::from_hours(1);
    board.lose(&there, now);
    let lost = Receipt { last_contact: now, ..ahead };
    assert_eq!(board.receipts()[&name("a")], lost, "nobody is connected to what is gone");
    board.lose(&there, now + Duration::from_hours(1));
    assert_eq!(board.receipts()[&name("a")], lost, "it was away before");
}
