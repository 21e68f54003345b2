use ctrlmesh_common::selector::Selector;
use jiff::Timestamp;

use super::*;
use crate::audit::{Event, Object, Request};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn websites() -> Resource {
    Resource::new("web.example.com", "websites")
}

fn event(id: &str, pod: &str, request: Request, ended: bool) -> Event {
    Event {
        id: id.to_owned(),
        ended,
        at: at(5),
        user: "system:serviceaccount:ops:op".to_owned(),
        pod: Some(pod.to_owned()),
        agent: "op".to_owned(),
        source: "10.0.0.1".to_owned(),
        request,
        verb: String::new(),
        code: 200,
    }
}

/// A history in which each pod watches what its selector says.
fn watching(pods: &[(&str, &str)]) -> AuditHistory {
    let mut history = AuditHistory::of("ops", "op");
    for (pod, selector) in pods {
        let selector = Selector::parse(selector).ok();
        let read = Request::Read { resource: websites(), namespace: String::new(), selector, watch: true };
        history.add(event(pod, pod, read, false));
    }
    history
}

/// Two replicas, each leader of its shard, and one object in each of slots 0 to 3.
fn world() -> World {
    let pod = |shard: &str| Pod { shard: Some(shard.to_owned()), ready: true, ..Pod::default() };
    let work = |slot: u32| Work {
        namespace: format!("ns-{slot}"),
        name: "site".to_owned(),
        labels: [("slot".to_owned(), slot.to_string())].into(),
        done: true,
    };
    let lock = |shard: &str, pod: &str| (format!("op.example---{shard}"), pod.to_owned());
    World {
        pods: [("x".to_owned(), pod("a")), ("y".to_owned(), pod("b"))].into(),
        locks: Some([lock("a", "x"), lock("b", "y")].into()),
        resource: websites(),
        work: (0..4).map(work).collect(),
        settles: false,
        epoch: Some(3),
        acknowledged: [("x".to_owned(), 3), ("y".to_owned(), 2)].into(),
        ..World::default()
    }
}

#[test]
fn what_is_gone_is_remembered() {
    let of = |shard: &str, space: &str| World {
        addresses: [format!("10.0.0.{space}")].into(),
        spaces: [space.to_owned()].into(),
        shards: [("x".to_owned(), [shard.to_owned()].into())].into(),
        ..World::default()
    };
    let mut now = of("b", "2");
    now.remember(&of("a", "1"));
    assert_eq!(now.addresses, ["10.0.0.1", "10.0.0.2"].map(str::to_owned).into());
    assert_eq!(now.spaces, ["1", "2"].map(str::to_owned).into());
    assert_eq!(now.shards["x"], ["a", "b"].map(str::to_owned).into());
    now.remember(&World { shards: [("y".to_owned(), BTreeSet::new())].into(), ..World::default() });
    assert_eq!(now.shards.len(), 2, "a pod that is gone");
}

fn span() -> Span {
    at(0)..at(10)
}

#[test]
fn disjoint_and_complete_shares_give_each_object_one_owner() {
    let table = world().table(&watching(&[("x", "slot in (0,1,2)"), ("y", "slot=3")]), &span());
    assert!(table.is_whole(), "{table:?}");
    assert_eq!((table.replicas["x"].objects, table.replicas["y"].namespaces), (3, 1));
    assert!(!table.is_acknowledged());
}

#[test]
fn what_nobody_or_everybody_watches_is_counted() {
    let table = world().table(&watching(&[("x", "slot in (0,1)"), ("y", "slot in (1,2)")]), &span());
    assert_eq!((table.unowned, table.twice), (1, 1));
    let table = world().table(&watching(&[("x", ""), ("y", "")]), &span());
    assert_eq!((table.unowned, table.twice), (0, 4));
}

#[test]
fn a_replica_without_its_lock_or_not_ready_works_on_nothing() {
    let history = watching(&[("x", "slot in (0,1,2)"), ("y", "slot=3")]);
    let mut without = world();
    without.locks = Some([("op.example---b".to_owned(), "x".to_owned())].into());
    assert_eq!(without.table(&history, &span()).unowned, 4, "that is the other shard's lock");
    let mut unsharded = world();
    unsharded.locks = Some([("op.example".to_owned(), "x".to_owned())].into());
    assert_eq!(unsharded.table(&history, &span()).unowned, 4, "that is nobody's lock any more");
    unsharded.pods.values_mut().for_each(|pod| pod.shard = None);
    assert_eq!(unsharded.table(&history, &span()).unowned, 1);
    let mut dead = world();
    dead.pods.get_mut("x").unwrap().ready = false;
    assert_eq!(dead.table(&history, &span()).unowned, 3);
    let mut lockless = world();
    lockless.locks = None;
    assert_eq!(lockless.table(&history, &span()).unowned, 0);
}

#[test]
fn changes_are_counted_by_the_second() {
    let mut history = watching(&[("x", ""), ("y", "")]);
    let object = Object { resource: websites(), namespace: "ns-0".to_owned(), name: "site".to_owned() };
    for _ in 0..20 {
        history.add(event("w", "x", Request::Write(object.clone()), true));
    }
    let table = world().table(&history, &span());
    assert!((table.replicas["x"].writes - 2.0).abs() < 0.01, "{table:?}");
    assert!(table.replicas["y"].writes < 0.01);
    // Whose status is ahead of its work has not done it while it writes.
    let settles = World { settles: true, ..world() };
    assert_eq!((table.pending, settles.table(&history, &span()).pending), (0, 1));
    assert_eq!(settles.table(&history, &(at(20)..at(30))).pending, 0);
}
