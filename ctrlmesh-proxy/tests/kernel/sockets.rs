//! Sockets of unusual kinds are redirected, too.

use crate::bed::{Bed, TARGET, TARGET_V6, counted, targets};
use crate::redirect::{direct, enrolled, redirected};

/// From now on a SYN may carry data there, to any listener that begins to listen.
fn fast_open(bed: &Bed) {
    // Client and server, and every listener without being asked.
    let every = (1 | 2 | 0x400).to_string();
    let write = || std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", every);
    bed.net().run(write).unwrap().unwrap();
}

/// How often the kernel took data from a SYN in a namespace, by its `/proc/net/netstat`: names in one line, values in
/// the next.
pub(crate) fn passive_fast_opens(bed: &Bed) -> u64 {
    let command = &mut bed.inside(&bed.cgroup("other"), "", "cat");
    let netstat = command.arg("/proc/self/net/netstat").output().unwrap();
    let netstat = String::from_utf8(netstat.stdout).unwrap();
    let mut lines = netstat.lines().filter(|line| line.starts_with("TcpExt:")).map(|line| line.split(' '));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    names.zip(values).find(|(name, _)| *name == "TCPFastOpenPassive").unwrap().1.parse().unwrap()
}

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
    assert_eq!(counted(&interceptor, "no_listener_refused"), 8);
}

#[test]
fn a_socket_whose_syn_carries_data_is_redirected() {
    let bed = enrolled(|bed, _| fast_open(bed));
    for target in [TARGET, TARGET_V6, "[::ffff:10.96.0.1]:443"] {
        // Without a cookie, which the first gets, the SYN carries no data and does not wait for any.
        for how in ["fastopen", "fastopen", "fastopenconnect", "fastopenconnect"] {
            let seen = bed.connect(target, how);
            redirected(&seen, &target.replace("[::ffff:10.96.0.1]", "10.96.0.1"));
            assert_eq!(seen.peer, target);
        }
    }
    assert!(passive_fast_opens(&bed.bed) >= 5, "too few SYNs carried data");
}

#[test]
fn a_socket_bound_to_a_device_is_counted_either_way() {
    const NEIGHBOUR: &str = "10.244.1.1:443";
    const NEIGHBOUR_V6: &str = "[fd00:244::1]:443";
    for fail_open in [false, true] {
        let bed = enrolled(|bed, attach| {
            bed.wire("b");
            attach.targets = targets(&[NEIGHBOUR, NEIGHBOUR_V6]);
            attach.fail_open = fail_open;
        });
        let _servers = [NEIGHBOUR, NEIGHBOUR_V6, "10.244.1.1:444"].map(|address| bed.bed.target_in("b", address));
        direct(&bed.connect("10.244.1.1:444", "device=eth0"));
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
