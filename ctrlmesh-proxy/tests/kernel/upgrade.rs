//! Does interception survive what happens to the proxy and to the loader?

use crate::bed::{Bed, Hammered, TARGET, count, until};
use ctrlmesh_proxy::intercept::{Interceptor, ListenerCheck};

fn counted(interceptor: &Interceptor, name: &str) -> u64 {
    interceptor.status().unwrap().counters[name]
}

#[test]
fn a_proxy_that_is_killed_and_restarted_is_never_bypassed() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    attach.listener = ListenerCheck::Port;
    interceptor.attach(&attach).unwrap();
    let _target = bed.target(TARGET);
    let client = bed.hammer(&pod, TARGET);
    let rounds = count(1000);
    for round in 0..rounds {
        let relay = bed.relay();
        let before = counted(&interceptor, "redirected");
        until("the client is redirected", || counted(&interceptor, "redirected") > before);
        if round % 2 == 0 {
            interceptor.upgrade().unwrap();
        }
        let before = counted(&interceptor, "no_listener_refused");
        relay.kill();
        until("the client is refused", || counted(&interceptor, "no_listener_refused") > before);
        if round % 2 == 1 {
            interceptor.upgrade().unwrap();
        }
    }
    let seen: Hammered = client.finish();
    eprintln!("{rounds} restarts and upgrades: {seen:?}");
    assert_eq!(seen.direct, 0, "{seen:?}");
    assert!(
        seen.proxied >= 1 && seen.refused >= rounds as u64 && seen.errors.is_empty(),
        "{seen:?}"
    );
}

#[test]
fn a_loader_upgrade_under_load_loses_no_connection() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pod));
    let _target = bed.target(TARGET);
    let client = bed.hammer(&pod, TARGET);
    for _ in 0..count(1000) {
        let before = counted(&interceptor, "redirected");
        interceptor.upgrade().unwrap();
        until("the client goes on", || counted(&interceptor, "redirected") > before);
    }
    let seen: Hammered = client.finish();
    eprintln!("{} upgrades: {seen:?}", count(1000));
    assert_eq!(
        (seen.direct, seen.refused, seen.broken, seen.errors.len()),
        (0, 0, 0, 0),
        "{seen:?}"
    );
    assert!(seen.proxied > count(1000) as u64);
}

#[test]
fn interception_stays_when_the_loader_ends_and_the_next_one_adopts_it() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&pod)).unwrap();
    drop(interceptor);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
    let mut next = bed.interceptor();
    let _proxy = bed.enrol(&mut next, &bed.attach(&pod));
    assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy {slot} {TARGET}"));
    assert_eq!(counted(&next, "no_listener_refused"), 1, "the counters go on");
}

#[test]
fn programs_of_another_version_are_replaced_when_the_loader_starts() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let slot = bed.interceptor().attach(&bed.attach(&pod)).unwrap();
    let folder = bed.pins().join("pods").join(slot.to_string());
    let ours = std::fs::read_link(folder.join("object")).unwrap();
    let link = || {
        aya::programs::links::PinnedLink::from_pin(folder.join("connect4"))
            .map(aya::programs::links::FdLink::from)
    };
    let before = link().unwrap().info().unwrap().id();
    drop(bed.interceptor());
    assert_eq!(link().unwrap().info().unwrap().id(), before, "the same version is left alone");
    std::fs::remove_file(folder.join("object")).unwrap();
    std::os::unix::fs::symlink("another", folder.join("object")).unwrap();
    drop(bed.interceptor());
    assert_ne!(link().unwrap().info().unwrap().id(), before);
    assert_eq!(std::fs::read_link(folder.join("object")).unwrap(), ours);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn a_loader_that_crashed_half_way_leaves_nothing_that_the_next_cannot_mend() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&pod)).unwrap();
    let folder = bed.pins().join("pods").join(slot.to_string());
    // It died after it had put the new program beside the old one, and before another hook was pinned.
    std::fs::rename(folder.join("connect4"), folder.join("connect4-next")).unwrap();
    std::fs::remove_file(folder.join("connect6")).unwrap();
    // And another time between making a slot and saying whose.
    std::fs::create_dir(bed.pins().join("pods/77")).unwrap();
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pod));
    interceptor.sweep().unwrap();
    let hooks = &interceptor.status().unwrap().attachments[0].hooks;
    assert_eq!(hooks.len(), 4, "{hooks:?}");
    assert!(!folder.join("connect4-next").exists() && !bed.pins().join("pods/77").exists());
    assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy {slot} {TARGET}"));
}
