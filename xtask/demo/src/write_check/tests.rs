use std::cell::RefCell;

use super::*;
use crate::audit::{Event, Resource};
use crate::history::tests::{at, history, write_in, write_of};

/// A namespace of the first shard, one of the second, and one that moves from the first to the second.
const SPACES: [&str; 3] = ["first", "second", "moves"];

fn world() -> World {
    World { spaces: SPACES.map(str::to_owned).into(), ..World::default() }
}

/// `x` and `standby` are of the first shard, `y` of the second, `z` of a third.
fn replicas() -> Shards {
    let named = [("x", "first"), ("standby", "first"), ("y", "second"), ("z", "third")];
    named.map(|(pod, shard)| (pod.to_owned(), shard.to_owned())).into()
}

fn owners(space: &str) -> [String; 2] {
    let [old, new] = if space == "moves" { ["first", "second"] } else { [space, space] };
    [old.to_owned(), new.to_owned()]
}

fn ask<T>(events: &[Event], ask: impl FnOnce(&WriteCheck<'_>) -> T) -> T {
    let (world, history) = (world(), history(events.iter().cloned()));
    ask(&WriteCheck::of(&world, &history))
}

fn moved(events: &[Event]) -> Result<String> {
    // All know the last epoch from second 5 on.
    ask(events, |write_check| write_check.moved(&(at(0)..at(9)), at(5), &replicas(), owners, 1))
}

fn write(second: i64, pod: &str, space: &str) -> Event {
    write_in(space, second, pod, &format!("{space}-1"))
}

#[test]
fn what_moves_may_be_changed_by_both_its_owners_and_by_no_third() {
    let both = [write(1, "x", "moves"), write(2, "y", "moves"), write(3, "z", "elsewhere")];
    let report = moved(&both).unwrap();
    assert!(report.starts_with("1 objects were changed by both"), "{report}");
    // Nobody else has changed it, so that no object has two writers.
    let third = moved(&[write(1, "z", "moves")]).unwrap_err().to_string();
    assert!(third.contains("whose it was not"), "{third}");
    assert!(moved(&[write(1, "y", "first")]).is_err(), "that stays where it is");
    assert!(moved(&[write(1, "nobody", "first")]).is_err());
}

#[test]
fn what_does_not_move_is_changed_by_one_of_its_replicas_only() {
    assert!(moved(&[write(1, "x", "first"), write(2, "x", "first")]).is_ok());
    assert!(moved(&[write(1, "x", "first"), write(2, "standby", "first")]).is_err());
}

#[test]
fn late_writes_of_the_old_owner_are_counted_and_bounded() {
    let report = moved(&[write(4, "x", "moves"), write(5, "y", "moves")]).unwrap();
    assert!(report.contains("0 when all proxies had"), "{report}");
    let late = |space: &str| [write(5, "x", space), write(6, "y", space)];
    let report = moved(&late("moves")).unwrap();
    assert!(report.contains("1 when all proxies had"), "{report}");
    let mut world = world();
    world.spaces.insert("other".to_owned());
    let history = history([late("moves"), late("other")].concat());
    let all_move = |_: &str| ["first".to_owned(), "second".to_owned()];
    let asked = WriteCheck::of(&world, &history);
    let with = |workers| asked.moved(&(at(0)..at(9)), at(5), &replicas(), all_move, workers);
    let error = with(1).unwrap_err().to_string();
    assert!(error.contains("knew the last epoch: ["), "{error}");
    assert!(with(2).is_ok());
}

#[test]
fn a_late_event_of_the_old_owner_is_no_fault() {
    // `x` and `y` both write in two namespaces once all know that these are `y`'s: more than one worker can be at.
    let late = |group: &str, plural: &str| {
        let write = |second, pod, namespace: &str| {
            let resource = Resource::new(group, plural);
            write_of(Object { resource, namespace: namespace.to_owned(), name: "1".to_owned() }, second, pod)
        };
        let mut world = world();
        world.spaces.insert("other".to_owned());
        let spaces = ["moves", "other"];
        let history = history(spaces.into_iter().flat_map(|space| [write(6, "y", space), write(7, "x", space)]));
        let all_move = |_: &str| ["first".to_owned(), "second".to_owned()];
        let to_second = |_: &str| vec!["second".to_owned()];
        let check = WriteCheck::of(&world, &history);
        let span = at(0)..at(9);
        let moved = check.moved(&span, at(5), &replicas(), all_move, 1).is_ok();
        assert_eq!(moved, check.own(&span, &replicas(), to_second).is_ok());
        moved
    };
    assert!(late("", "events") && late("events.k8s.io", "events"));
    assert!(!late("", "configmaps") && !late("web.example.com", "events"));
}

#[test]
fn an_old_owner_ends_what_it_had_begun_and_begins_nothing_more() {
    let again = |space: &str, name: &str| {
        let turn = |second, pod| write_in(space, second, pod, name);
        [turn(1, "x"), turn(2, "y"), turn(3, "x")]
    };
    // One worker is at several objects of a namespace.
    let report = moved(&[again("moves", "1"), again("moves", "2")].concat()).unwrap();
    assert!(report.contains("2 by the old one after the new one"), "{report}");
    let mut world = world();
    world.spaces.insert("other".to_owned());
    let history = history([again("moves", "1"), again("other", "1")].concat());
    let all_move = |_: &str| ["first".to_owned(), "second".to_owned()];
    let asked = WriteCheck::of(&world, &history);
    let with = |workers| asked.moved(&(at(0)..at(9)), at(5), &replicas(), all_move, workers);
    assert!(with(1).is_err() && with(2).is_ok());
}

#[test]
fn only_the_shard_of_a_killed_replica_may_have_two_writers() {
    let own = |events: &[Event]| {
        let of = |space: &str| vec![space.to_owned()];
        ask(events, |write_check| write_check.own(&(at(0)..at(9)), &replicas(), of))
    };
    assert!(own(&[write(1, "x", "first"), write(2, "standby", "first")]).is_ok());
    assert!(own(&[write(1, "x", "first"), write(2, "y", "first")]).is_err());
    assert!(own(&[write(1, "standby", "second")]).is_err());
    assert!(own(&[write(1, "z", "elsewhere")]).is_ok(), "that is no work");
}

#[test]
fn no_changes_prove_nothing_and_a_lock_is_not_work() {
    let steady = |events: &[Event]| ask(events, |write_check| write_check.steady(&(at(0)..at(9))));
    assert!(steady(&[]).is_err());
    assert!(steady(&[write(1, "x", "elsewhere")]).is_err());
    assert!(steady(&[write(9, "x", "first")]).is_err(), "that was later");
    assert!(steady(&[write(1, "x", "first")]).unwrap().contains("1 changes of 1 objects"));
    assert!(steady(&[write(1, "x", "first"), write(2, "y", "first")]).is_err());
}

#[test]
fn two_writers_across_steps_are_found_in_the_whole_span() {
    let events = [write(1, "x", "first"), write(6, "standby", "first")];
    let steady = |span: Span| ask(&events, |write_check| write_check.steady(&span));
    assert!(steady(at(0)..at(4)).is_ok() && steady(at(4)..at(9)).is_ok());
    assert!(steady(at(0)..at(9)).is_err());
}

#[test]
fn what_is_seen_only_when_all_has_been_seen_counts_too() {
    let log = RefCell::new(vec![write(1, "x", "first")]);
    let settle = || {
        log.borrow_mut().push(write(2, "y", "first"));
        Ok(at(9))
    };
    let steady = |span: &Span| ask(&log.borrow(), |write_check| write_check.steady(span));
    assert!(steady(&(at(0)..at(9))).is_ok());
    assert!(once_seen(at(0), settle, steady).is_err());
}
