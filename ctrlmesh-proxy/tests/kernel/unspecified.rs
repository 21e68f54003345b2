//! Connections to the unspecified address, which the kernel gives an address of this host.

use crate::bed::{Bed, ClientReport, Server, TARGET, TARGET_V6, targets};
use crate::redirect::{EnrolledPod, canonical, direct, enrolled, redirected};
use ctrlmesh_intercept::Events;

const UNSPECIFIED: &str = "0.0.0.0:443";
const UNSPECIFIED_V6: &str = "[::]:443";
const MAPPED: &str = "[::ffff:0.0.0.0]:443";
const LOOPBACK: &str = "127.0.0.1:443";
const LOOPBACK_V6: &str = "[::1]:443";

/// A pod whose targets are local, with a server at each that a missed connection reaches.
fn local(list: &[&str]) -> (EnrolledPod, Vec<Server>) {
    let bed = enrolled(|_, attach| attach.targets = targets(list));
    let servers = [LOOPBACK, LOOPBACK_V6, "127.0.0.1:444", "[::1]:444"];
    let servers = servers.map(|address| bed.bed.target(address)).into();
    (bed, servers)
}

/// What the kernel makes of it without us.
fn outside(bed: &Bed, address: &str, how: &str) -> ClientReport {
    bed.connect(&bed.cgroup("outside"), address, how)
}

#[test]
fn an_unspecified_address_is_loopback() {
    let (bed, _servers) = local(&[LOOPBACK, LOOPBACK_V6]);
    for (address, target) in [(UNSPECIFIED, LOOPBACK), (UNSPECIFIED_V6, LOOPBACK_V6), (MAPPED, LOOPBACK)] {
        assert!(outside(&bed.bed, address, "blocking").answer.starts_with("target "), "a way past");
        for how in ["blocking", "nonblocking", "uring", "fastopen", "bound", "mptcp"] {
            let seen = bed.connect(address, how);
            redirected(&seen, target);
            assert_eq!(canonical(&seen.peer), target, "{seen:?}");
        }
    }
}

#[test]
fn an_unspecified_address_means_the_one_the_socket_is_bound_to() {
    let (bed, _servers) = local(&[TARGET]);
    for (address, how) in [
        (UNSPECIFIED, "source=10.96.0.1"),
        (UNSPECIFIED, "source=10.96.0.1+nonblocking"),
        (UNSPECIFIED, "source=10.96.0.1+device=lo"),
        (MAPPED, "source=::ffff:10.96.0.1"),
    ] {
        let seen = outside(&bed.bed, address, how);
        assert!(seen.answer.starts_with("target 10.96.0.1:"), "a way past: {seen:?}");
        redirected(&bed.connect(address, how), TARGET);
    }
    // Bound to another address it means another one.
    direct(&bed.connect(UNSPECIFIED, "source=10.97.3.7"));
    direct(&bed.connect(UNSPECIFIED, "blocking"));
}

#[test]
fn over_ipv6_only_the_family_of_the_socket_s_own_address_counts() {
    let (bed, _servers) = local(&[LOOPBACK, LOOPBACK_V6]);
    for (source, target) in [("fd00:96::1", LOOPBACK_V6), ("::ffff:10.96.0.1", LOOPBACK)] {
        let how = format!("source={source}");
        assert!(outside(&bed.bed, UNSPECIFIED_V6, &how).answer.starts_with("target "));
        redirected(&bed.connect(UNSPECIFIED_V6, &how), target);
    }
    redirected(&bed.connect(UNSPECIFIED_V6, "v6only"), LOOPBACK_V6);
    let (bed, _servers) = local(&[TARGET_V6]);
    direct(&bed.connect(UNSPECIFIED_V6, "source=fd00:96::1"));
}

#[test]
fn an_unspecified_address_at_another_port_is_untouched() {
    let (bed, _servers) = local(&[LOOPBACK, LOOPBACK_V6, TARGET]);
    for address in ["0.0.0.0:444", "[::]:444", "[::ffff:0.0.0.0]:444"] {
        for how in ["blocking", "bound"] {
            let seen = bed.connect(address, how);
            direct(&seen);
            let expected = outside(&bed.bed, address, how);
            let without_port = |name: &str| name.rsplit_once(':').unwrap().0.to_owned();
            assert_eq!(seen.peer, expected.peer);
            assert_eq!(without_port(&seen.local), without_port(&expected.local));
        }
    }
    assert_eq!(bed.counted("other_target"), 6);
}

#[test]
fn without_a_proxy_an_unspecified_address_is_refused_too() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.targets = targets(&[LOOPBACK, LOOPBACK_V6]);
    interceptor.attach(&attach).unwrap();
    let _servers = [LOOPBACK, LOOPBACK_V6].map(|address| bed.target(address));
    for address in [UNSPECIFIED, UNSPECIFIED_V6, MAPPED] {
        assert_eq!(bed.connect(&attach.cgroup, address, "blocking").error, "ECONNREFUSED");
    }
    attach.fail_open = true;
    interceptor.attach(&attach).unwrap();
    for address in [UNSPECIFIED, UNSPECIFIED_V6, MAPPED] {
        direct(&bed.connect(&attach.cgroup, address, "blocking"));
    }
    let counters = interceptor.status().unwrap().counters;
    assert_eq!((counters["no_listener_refused"], counters["no_listener_passed"]), (3, 3));
}

#[test]
fn an_unspecified_address_of_a_device_is_refused() {
    const OWN: &str = "10.244.1.5:443";
    let bed = enrolled(|bed, attach| {
        bed.wire("b");
        attach.targets = targets(&[OWN]);
        attach.report = true;
    });
    let mut events = Events::open(&bed.bed.pins()).unwrap();
    let _server = bed.bed.target(OWN);
    for address in [UNSPECIFIED, MAPPED] {
        let seen = outside(&bed.bed, address, "device=eth0");
        assert!(seen.answer.starts_with("target 10.244.1.5:"), "a way past: {seen:?}");
        assert_eq!(bed.connect(address, "device=eth0").error, "ECONNREFUSED");
        let event = events.next().unwrap();
        assert_eq!((event.outcome, &*event.target.to_string()), ("device_refused", UNSPECIFIED));
    }
    assert_eq!(bed.counted("device_refused"), 2);
}

#[test]
fn a_socket_that_is_bound_to_a_group_gets_nowhere() {
    let (bed, _servers) = local(&[LOOPBACK]);
    let seen = outside(&bed.bed, UNSPECIFIED, "source=224.0.0.1");
    assert!(seen.answer.starts_with("target "), "a way past: {seen:?}");
    let seen = bed.connect(UNSPECIFIED, "source=224.0.0.1");
    assert!(seen.answer.is_empty() && !seen.error.is_empty(), "{seen:?}");
}
