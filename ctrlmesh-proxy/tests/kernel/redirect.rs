//! Which connections go to the proxy, and which do not.

use std::net::SocketAddr;

use crate::bed::{Bed, ClientReport, PROXY, TARGET, TARGET_V6, counted, echo, targets};
use ctrlmesh_intercept::{Attach, Interceptor, listener};

pub(crate) struct EnrolledPod {
    pub(crate) bed: Bed,
    pub(crate) pod: std::path::PathBuf,
    pub(crate) interceptor: Interceptor,
    _servers: Vec<crate::bed::Server>,
}

/// A pod, its proxy, and a server at each target, so that a connection that is missed arrives there.
pub(crate) fn enrolled(change: impl FnOnce(&Bed, &mut Attach)) -> EnrolledPod {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    change(&bed, &mut attach);
    let mut servers = vec![bed.enrol(&mut interceptor, &attach)];
    servers.extend(
        [TARGET, TARGET_V6, "10.97.3.7:443", "[fd00:97::3:7]:443", "10.96.0.1:444"].map(|address| bed.target(address)),
    );
    EnrolledPod { bed, pod, interceptor, _servers: servers }
}

impl EnrolledPod {
    pub(crate) fn counted(&self, name: &str) -> u64 {
        counted(&self.interceptor, name)
    }

    pub(crate) fn connect(&self, address: &str, how: &str) -> ClientReport {
        self.bed.connect(&self.pod, address, how)
    }
}

#[track_caller]
pub(crate) fn redirected(seen: &ClientReport, target: &str) {
    assert_eq!(seen.answer, format!("proxy 0 {target}"), "{seen:?}");
}

#[track_caller]
pub(crate) fn direct(seen: &ClientReport) {
    assert_eq!(seen.answer, format!("target {}", canonical(&seen.local)), "{seen:?}");
}

/// A name as a server of the other family writes it.
pub(crate) fn canonical(name: &str) -> String {
    let address: SocketAddr = name.parse().unwrap_or_else(|_| panic!("{name:?} is no address"));
    SocketAddr::new(address.ip().to_canonical(), address.port()).to_string()
}

#[test]
fn every_kind_of_socket_is_redirected() {
    let bed = enrolled(|_, _| {});
    for (address, target) in [(TARGET, TARGET), (TARGET_V6, TARGET_V6), ("[::ffff:10.96.0.1]:443", TARGET)] {
        for how in ["blocking", "nonblocking", "uring", "bound"] {
            redirected(&bed.connect(address, how), target);
        }
    }
    for how in ["v6only", "v6only+nonblocking", "v6only+uring", "v6only+bound", "v6only+fastopen"] {
        redirected(&bed.connect(TARGET_V6, how), TARGET_V6);
    }
    assert_eq!(bed.counted("redirected"), 17);
}

#[test]
fn an_ipv6_only_socket_is_redirected_even_if_bound() {
    let bed = enrolled(|_, attach| attach.targets = targets(&["[fd00:97::/106]:443"]));
    for how in ["blocking", "bound", "v6only", "v6only+bound"] {
        redirected(&bed.connect("[fd00:97::3:7]:443", how), "[fd00:97::3:7]:443");
        redirected(&bed.connect("[fd00:97::3f:ffff]:443", how), "[fd00:97::3f:ffff]:443");
    }
}

#[test]
fn without_our_prefix_an_ipv6_only_socket_is_counted() {
    for (fail_open, counter) in [(false, "v6only_refused"), (true, "v6only_passed")] {
        let bed = over_ipv4(fail_open);
        for how in ["v6only", "v6only+nonblocking"] {
            let seen = bed.connect(TARGET_V6, how);
            if fail_open {
                assert_eq!(seen.answer, format!("target {}", seen.local), "{seen:?}");
            } else {
                assert_eq!(seen.error, "ECONNREFUSED", "{seen:?}");
            }
        }
        assert_eq!(bed.counted(counter), 2);
    }
}

#[test]
fn without_our_prefix_a_bound_ipv6_socket_does_not_bypass() {
    assert_eq!(over_ipv4(false).connect(TARGET_V6, "v6only+bound").error, "ENETUNREACH");
}

#[test]
fn without_our_prefix_ipv6_goes_over_ipv4() {
    let bed = over_ipv4(false);
    for how in ["blocking", "nonblocking", "uring", "bound"] {
        let seen = bed.connect(TARGET_V6, how);
        redirected(&seen, TARGET_V6);
        assert!(seen.local.starts_with("[::ffff:127.0.0.1]:"), "{seen:?}");
        assert_eq!(seen.peer, TARGET_V6);
    }
}

#[test]
fn a_namespace_without_ipv6_says_so_and_goes_on() {
    let bed = Bed::new();
    let off = "/proc/sys/net/ipv6/conf/lo/disable_ipv6";
    bed.net().run(|| std::fs::write(off, "1")).unwrap().unwrap();
    let mut interceptor = bed.interceptor();
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let error = interceptor.serve_ipv6(slot, &bed.net()).unwrap_err().to_string();
    assert!(error.starts_with("make our IPv6 prefix local in "), "{error}");
    assert!(!interceptor.status().unwrap().attachments[0].ipv6);
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    redirected(&bed.connect(&bed.cgroup("pod"), TARGET, "blocking"), TARGET);
}

#[test]
fn the_proxy_cannot_be_reached_from_outside_the_pod() {
    let bed = enrolled(|_, _| {});
    bed.bed.wire("b");
    let outside = bed.bed.cgroup("outside");
    bed.bed.ip("b", "-6 route add fd63:746c:6d65:7368::/64 via fd00:244::5");
    let prefix = "fd63:746c:6d65:7368::1";
    for address in ["10.244.1.5", prefix] {
        let seen: ClientReport = bed.bed.client_in("b", &outside, &["once", address, "15001"]);
        assert_eq!(seen.error, "ECONNREFUSED", "{seen:?}");
    }
    // From inside it can: the prefix is a hint, no proof, and loopback explains nothing.
    for (address, answer) in
        [(format!("[{prefix}]:15001"), format!("proxy 0 {TARGET}")), ("127.0.0.1:15001".into(), "proxy unknown".into())]
    {
        let seen = bed.bed.connect(&outside, &address, "blocking");
        assert_eq!(seen.answer, answer, "{seen:?}");
    }
}

/// A pod whose namespace does not have our prefix.
fn over_ipv4(fail_open: bool) -> EnrolledPod {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    let slot = interceptor.attach(&Attach { fail_open, ..bed.attach(&pod) }).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    let servers = vec![proxy, bed.target(TARGET), bed.target(TARGET_V6)];
    EnrolledPod { bed, pod, interceptor, _servers: servers }
}

#[test]
fn every_process_and_thread_of_a_pod_is_redirected() {
    let bed = enrolled(|_, _| {});
    redirected(&bed.bed.client(&bed.pod, &["fork", "10.96.0.1", "443"]), TARGET);
    let seen: Vec<ClientReport> = bed.bed.client(&bed.pod, &["thread", "10.96.0.1", "443"]);
    assert_eq!(seen.len(), 8);
    for seen in &seen {
        redirected(seen, TARGET);
    }
    let below = bed.bed.cgroup("pod/container/worker");
    redirected(&bed.bed.connect(&below, TARGET, "blocking"), TARGET);
}

#[test]
fn other_processes_targets_and_protocols_are_not_redirected() {
    let bed = enrolled(|_, _| {});
    direct(&bed.bed.connect(&bed.bed.cgroup("other"), TARGET, "blocking"));
    direct(&bed.connect("10.96.0.1:444", "blocking"));
    direct(&bed.connect("10.97.3.7:443", "blocking"));
    let _server = bed.bed.target("[fd00:96::1]:444");
    direct(&bed.connect("[fd00:96::1]:444", "v6only"));
    for (target, host) in [(TARGET, "10.96.0.1"), (TARGET_V6, "fd00:96::1")] {
        let echo = echo(&bed.bed, target);
        let seen: ClientReport = bed.bed.client(&bed.pod, &["datagram", host, "443"]);
        assert_eq!((seen.answer.as_str(), seen.peer.as_str()), ("target", target));
        echo.join().unwrap();
    }
}

#[test]
fn every_address_of_a_prefix_is_redirected_and_explained() {
    let bed = enrolled(|_, attach| {
        attach.targets = targets(&["10.64.0.0/10:443", "[fd00:97::/108]:443"]);
    });
    redirected(&bed.connect("10.97.3.7:443", "blocking"), "10.97.3.7:443");
    redirected(&bed.connect("10.96.0.1:443", "nonblocking"), "10.96.0.1:443");
    redirected(&bed.connect("10.64.0.0:443", "blocking"), "10.64.0.0:443");
    redirected(&bed.connect("10.127.255.255:443", "blocking"), "10.127.255.255:443");
    redirected(&bed.connect("[::ffff:10.97.3.7]:443", "blocking"), "10.97.3.7:443");
    redirected(&bed.connect("[fd00:97::3:7]:443", "blocking"), "[fd00:97::3:7]:443");
    direct(&bed.connect("10.96.0.1:444", "blocking"));
}

#[test]
fn the_longest_prefix_wins() {
    let bed = enrolled(|_, attach| attach.targets = targets(&["10.96.0.0/16:443", TARGET]));
    let seen = bed.connect(TARGET, "blocking");
    redirected(&seen, TARGET);
    assert!(seen.local.starts_with("127.0.0.1:"), "an exact target needs no source: {seen:?}");
}

#[test]
fn a_bound_socket_to_a_prefix_is_counted_either_way() {
    for (fail_open, counter) in [(false, "bound_refused"), (true, "bound_passed")] {
        let bed = enrolled(|_, attach| {
            attach.targets = targets(&["10.96.0.0/16:443"]);
            attach.fail_open = fail_open;
        });
        let seen = bed.connect(TARGET, "bound");
        if fail_open {
            direct(&seen);
        } else {
            assert_eq!(seen.error, "ECONNREFUSED");
        }
        assert_eq!(bed.counted(counter), 1);
    }
}

#[test]
fn the_proxys_own_connections_pass() {
    let bed = enrolled(|bed, attach| attach.except = vec![bed.cgroup("pod/proxy")]);
    direct(&bed.bed.connect(&bed.bed.cgroup("pod/proxy"), TARGET, "blocking"));
    direct(&bed.bed.connect(&bed.bed.cgroup("pod/proxy/worker"), TARGET, "blocking"));
    redirected(&bed.bed.connect(&bed.bed.cgroup("pod/operator"), TARGET, "blocking"), TARGET);
    assert_eq!(bed.counted("own_connection"), 2);
}

#[test]
fn two_pods_on_one_node_use_the_same_port() {
    let bed = Bed::new();
    bed.namespace("b");
    let mut interceptor = bed.interceptor();
    let mut proxies = Vec::new();
    for (pod, suffix) in [("pod-a", ""), ("pod-b", "b")] {
        let namespace = listener::Namespace::open(&bed.path(suffix)).unwrap();
        let listener = listener::outbound(&namespace, PROXY).unwrap();
        let slot = interceptor.attach(&bed.attach(&bed.cgroup(pod))).unwrap();
        interceptor.listen(slot, &listener).unwrap();
        proxies.push(bed.proxy(interceptor.originals().unwrap(), listener));
    }
    for (slot, pod, suffix) in [(0, "pod-a", ""), (1, "pod-b", "b")] {
        let seen: ClientReport = bed.client_in(suffix, &bed.cgroup(pod), &["once", "10.96.0.1", "443"]);
        assert_eq!(seen.answer, format!("proxy {slot} {TARGET}"), "{seen:?}");
    }
}

#[test]
fn two_pods_in_one_namespace_share_a_listener_yet_are_distinct() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pods = [bed.cgroup("pod-a"), bed.cgroup("pod-b")];
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    for (slot, pod) in pods.iter().enumerate() {
        let attached = interceptor.attach(&bed.attach(pod)).unwrap();
        assert_eq!(usize::from(attached.get()), slot);
        interceptor.listen(attached, &listener).unwrap();
    }
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    for (slot, pod) in pods.iter().enumerate() {
        assert_eq!(bed.connect(pod, TARGET, "blocking").answer, format!("proxy {slot} {TARGET}"));
    }
}
