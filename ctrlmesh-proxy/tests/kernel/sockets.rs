//! Do sockets of unusual kinds get where they should?

use crate::bed::{Bed, TARGET, TARGET_V6, targets};
use crate::redirect::{direct, enrolled, redirected};

#[test]
fn a_multipath_socket_is_redirected() {
    let bed = enrolled(|_, _| {});
    for target in [TARGET, TARGET_V6] {
        for how in ["mptcp", "mptcp+nonblocking", "mptcp+uring", "mptcp+bound", "mptcp+fastopen"] {
            let seen = bed.connect(target, how);
            redirected(&seen, target);
            assert_eq!(seen.peer, target, "{how}");
        }
    }
    assert_eq!(bed.counted("redirected"), 10);
    direct(&bed.connect("10.96.0.1:444", "mptcp"));
}

#[test]
fn a_multipath_socket_is_refused_like_any_other() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    let _targets = [TARGET, TARGET_V6].map(|target| bed.target(target));
    for target in [TARGET, TARGET_V6] {
        for how in ["mptcp", "mptcp+nonblocking", "mptcp+fastopen", "fastopenconnect"] {
            assert_eq!(bed.connect(&bed.cgroup("pod"), target, how).error, "ECONNREFUSED", "{how}");
        }
    }
    assert_eq!(interceptor.status().unwrap().counters["no_listener_refused"], 8);
}

#[test]
fn a_socket_whose_syn_waits_for_data_is_redirected() {
    let bed = enrolled(|_, _| {});
    for target in [TARGET, TARGET_V6, "[::ffff:10.96.0.1]:443"] {
        let seen = bed.connect(target, "fastopenconnect");
        redirected(&seen, &target.replace("[::ffff:10.96.0.1]", "10.96.0.1"));
        assert_eq!(seen.peer, target);
    }
}

#[test]
fn a_socket_that_is_bound_to_a_device_is_refused_at_once_or_passes_and_is_counted() {
    const NEIGHBOUR: &str = "10.244.1.1:443";
    const NEIGHBOUR_V6: &str = "[fd00:244::1]:443";
    for fail_open in [false, true] {
        let bed = enrolled(|bed, attach| {
            bed.wire("b");
            attach.targets = targets(&[NEIGHBOUR, NEIGHBOUR_V6]);
            attach.fail_open = fail_open;
        });
        let _servers = [NEIGHBOUR, NEIGHBOUR_V6].map(|address| bed.bed.target_in("b", address));
        for target in [NEIGHBOUR, NEIGHBOUR_V6] {
            let seen = bed.connect(target, "device=eth0");
            if fail_open {
                direct(&seen);
            } else {
                assert_eq!(seen.error, "ECONNREFUSED");
            }
            redirected(&bed.connect(target, "device=lo"), target);
        }
        let counted = [bed.counted("device_refused"), bed.counted("device_passed")];
        assert_eq!(counted, if fail_open { [0, 2] } else { [2, 0] });
    }
}

#[test]
fn a_socket_that_is_bound_to_a_device_reaches_what_is_no_target() {
    let bed = enrolled(|bed, _| bed.wire("b"));
    let _server = bed.bed.target_in("b", "10.244.1.1:444");
    direct(&bed.connect("10.244.1.1:444", "device=eth0"));
}
