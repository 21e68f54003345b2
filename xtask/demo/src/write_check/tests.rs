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

fn moved(events: &[Event]) -> Result<MovedObjects> {
    ask(events, |write_check| write_check.moved(&(at(0)..at(9)), &replicas(), owners))
}

fn write(second: i64, pod: &str, space: &str) -> Event {
    write_in(space, second, pod, &format!("{space}-1"))
}

#[test]
fn what_moves_may_be_changed_by_both_its_owners_and_by_no_third() {
    let both = [write(1, "x", "moves"), write(2, "y", "moves"), write(3, "z", "elsewhere"), write(4, "x", "first")];
    assert_eq!(moved(&both).unwrap(), MovedObjects { changes: 3, objects: 2, both: 1 });
    // Nobody else has changed it, so that no object has two writers.
    let third = moved(&[write(1, "z", "moves")]).unwrap_err().to_string();
    assert!(third.contains("whose it was not") && third.contains("z: 1 changes in namespaces of"), "{third}");
    assert!(moved(&[write(1, "y", "first")]).is_err(), "that stays where it is");
    assert!(moved(&[write(1, "nobody", "first")]).is_err());
}

#[test]
fn what_does_not_move_is_changed_by_one_of_its_replicas_only() {
    assert!(moved(&[write(1, "x", "first"), write(2, "x", "first")]).is_ok());
    assert!(moved(&[write(1, "x", "first"), write(2, "standby", "first")]).is_err());
}

#[test]
fn a_change_of_the_old_owner_after_the_new_one_is_found() {
    let out_of_turn = moved(&[write(1, "x", "moves"), write(2, "y", "moves"), write(3, "x", "moves")]).unwrap_err();
    assert!(out_of_turn.to_string().contains("1 objects changed out of turn"), "{out_of_turn}");
    assert!(moved(&[write(1, "y", "moves"), write(2, "x", "moves")]).is_err());
    let standby = |last| [write(1, "x", "moves"), write(2, "standby", "moves"), write(3, "y", "moves"), last];
    assert!(moved(&standby(write(4, "y", "moves"))).is_ok(), "it took over, before it moved");
    assert!(moved(&standby(write(4, "x", "moves"))).is_err() && moved(&standby(write(4, "z", "moves"))).is_err());
    // It is another object each time.
    let other = |second, pod| write_in("moves", second, pod, "other");
    assert!(moved(&[write(1, "x", "moves"), write(2, "y", "moves"), other(3, "x"), other(4, "y")]).is_ok());
}

#[test]
fn unsharded_pods_take_turns_before_the_shard_and_never_after() {
    let mut all = replicas();
    all.extend(["lead", "next"].map(|pod| (pod.to_owned(), UNSHARDED.to_owned())));
    let turns = |pods: &[&str], owners: fn(&str) -> [String; 2]| {
        let events: Vec<Event> = (1..).zip(pods).map(|(second, pod)| write(second, pod, "first")).collect();
        ask(&events, |write_check| write_check.moved(&(at(0)..at(9)), &all, owners)).is_ok()
    };
    let enrolled = |space: &str| [UNSHARDED.to_owned(), space.to_owned()];
    assert!(turns(&["lead", "x"], enrolled) && turns(&["lead", "next", "x"], enrolled) && turns(&["x"], enrolled));
    assert!(!turns(&["lead", "x", "next"], enrolled) && !turns(&["lead", "x", "lead"], enrolled));
    assert!(!turns(&["lead", "next", "lead", "x"], enrolled), "its lock was gone");
    assert!(!turns(&["lead", "y"], enrolled) && !turns(&["lead", "x", "standby"], enrolled));
    let left = |space: &str| [space.to_owned(), UNSHARDED.to_owned()];
    assert!(turns(&["x", "lead"], left) && !turns(&["lead", "x"], left));
}

#[test]
fn only_the_kinds_that_are_asked_for_count() {
    let of = |plural: &str| {
        let named = |second, pod| {
            let resource = Resource::new("", plural);
            write_of(Object { resource, namespace: "moves".to_owned(), name: "1".to_owned() }, second, pod)
        };
        ask(&[named(1, "y"), named(2, "x"), write(3, "y", "moves")], |write_check| {
            let fenced = write_check.clone().of_kinds([Resource::new("web.example.com", "websites")]);
            let span = at(0)..at(9);
            (write_check.moved(&span, &replicas(), owners).is_ok(), fenced.moved(&span, &replicas(), owners).is_ok())
        })
    };
    assert_eq!(of("services"), (false, true));
    assert_eq!(of("events"), (true, true), "an Event records the past, and is no work");
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
