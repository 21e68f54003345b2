//! Webhook calls reach the proxy or the server.

use std::net::{SocketAddr, TcpStream};

use crate::bed::{Bed, ClientReport, Server, counted};
use crate::command::let_go;
use ctrlmesh_intercept::{INBOUND_SOURCE, INBOUND_SOURCE_V6, Interceptor, Slot, listener};

const WEBHOOK: &str = "10.244.1.5:9443";
const WEBHOOK_V6: &str = "[fd00:244::5]:9443";

struct ReceivedCall {
    bed: Bed,
    interceptor: Interceptor,
    slot: Slot,
    _servers: Vec<Server>,
}

/// A pod with a webhook server, wired to a node, whose port the proxy takes over.
fn taken(fail_open: bool) -> (ReceivedCall, [Server; 2]) {
    let bed = Bed::new();
    bed.wire("node");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.fail_open = fail_open;
    let slot = interceptor.attach(&attach).unwrap();
    let servers = [WEBHOOK, WEBHOOK_V6, "127.0.0.1:9443"].map(|address| bed.target(address));
    let proxy = take(&bed, &mut interceptor, slot);
    (ReceivedCall { bed, interceptor, slot, _servers: servers.into() }, proxy)
}

fn take(bed: &Bed, interceptor: &mut Interceptor, slot: Slot) -> [Server; 2] {
    [WEBHOOK, WEBHOOK_V6].map(|address| {
        let address: SocketAddr = address.parse().unwrap();
        let listener = listener::inbound(&bed.net(), address.ip()).unwrap();
        interceptor.take_inbound(slot, &bed.net(), address, &listener).unwrap();
        bed.proxy(interceptor.originals().unwrap(), listener)
    })
}

impl ReceivedCall {
    fn call(&self, host: &str, port: &str) -> ClientReport {
        self.bed.client_in("node", &self.bed.cgroup("node"), &["once", host, port])
    }

    /// The kernel looks a listener up for every packet that fits no connection, late ones too: a connection counts once
    /// or more often.
    fn counted(&self, name: &str) -> u64 {
        counted(&self.interceptor, name)
    }
}

#[test]
fn a_webhook_call_goes_to_the_proxy_in_both_families() {
    let (pod, _proxy) = taken(false);
    for host in ["10.244.1.5", "fd00:244::5"] {
        let seen = pod.call(host, "9443");
        assert_eq!(seen.answer, "proxy unknown", "{seen:?}");
    }
    assert!(pod.counted("inbound_taken") >= 2);
}

#[test]
fn the_proxy_reaches_the_real_server() {
    use std::io::Read as _;
    let (pod, _proxy) = taken(false);
    let call = |target: &str| {
        let target: SocketAddr = target.parse().unwrap();
        let source = SocketAddr::from((INBOUND_SOURCE, 0));
        let mut stream: TcpStream = pod.bed.net().run(|| connect_from(source, target)).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for target in [WEBHOOK, "127.0.0.1:9443"] {
        let answer = call(target);
        assert!(answer.starts_with("target 127.0.0.2:"), "{answer}");
    }
    assert!(pod.counted("inbound_own") >= 1);
}

#[test]
fn the_proxy_reaches_a_real_server_that_listens_on_ipv6_only() {
    use std::io::Read as _;
    const ONLY: &str = "[fd00:244::5]:9445";
    let (mut pod, _proxy) = taken(false);
    let address: SocketAddr = ONLY.parse().unwrap();
    let listener = listener::inbound(&pod.bed.net(), address.ip()).unwrap();
    let net = pod.bed.net();
    pod.interceptor.take_inbound(pod.slot, &net, address, &listener).unwrap();
    let _proxy = pod.bed.proxy(pod.interceptor.originals().unwrap(), listener);
    let _server = pod.bed.target_v6only("[::]:9445");
    assert_eq!(pod.call("fd00:244::5", "9445").answer, "proxy unknown");
    let before = pod.counted("inbound_own");
    let mut answer = String::new();
    let source = SocketAddr::from((INBOUND_SOURCE_V6, 0));
    let mut stream = net.run(|| connect_from(source, address)).unwrap();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("target [::1]:"), "{answer}");
    assert!(pod.counted("inbound_own") > before);
}

fn connect_from(source: SocketAddr, target: SocketAddr) -> TcpStream {
    use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
    use std::os::fd::AsRawFd as _;
    let family = if source.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let socket = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(source)).unwrap();
    socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(target)).unwrap();
    TcpStream::from(socket)
}

#[test]
fn another_port_of_the_pod_is_not_taken() {
    let (pod, _proxy) = taken(false);
    let server = pod.bed.target("10.244.1.5:9444");
    assert!(pod.call("10.244.1.5", "9444").answer.starts_with("target"));
    drop(server);
}

#[test]
fn without_a_proxy_only_an_open_webhook_reaches_the_server() {
    for fail_open in [false, true] {
        let (pod, proxy) = taken(fail_open);
        drop(proxy);
        let seen = pod.call("10.244.1.5", "9443");
        if fail_open {
            assert!(seen.answer.starts_with("target"), "{seen:?}");
            assert!(pod.counted("inbound_passed") >= 1);
        } else {
            assert_eq!(seen.error, "ECONNREFUSED", "{seen:?}");
            assert!(pod.counted("inbound_refused") >= 1);
        }
    }
}

#[test]
fn a_webhook_fails_as_its_pod_does_now() {
    let (mut pod, proxy) = taken(false);
    drop(proxy);
    let mut attach = pod.bed.attach(&pod.bed.cgroup("pod"));
    for fail_open in [true, false] {
        attach.fail_open = fail_open;
        pod.interceptor.attach(&attach).unwrap();
        let seen = pod.call("10.244.1.5", "9443");
        assert_eq!(seen.answer.starts_with("target"), fail_open, "{seen:?}");
        assert_eq!(seen.error == "ECONNREFUSED", !fail_open, "{seen:?}");
    }
}

#[test]
fn a_proxy_that_comes_back_takes_over_again() {
    let (mut pod, proxy) = taken(false);
    drop(proxy);
    let _proxy = take(&pod.bed, &mut pod.interceptor, pod.slot);
    assert_eq!(pod.call("10.244.1.5", "9443").answer, "proxy unknown");
}

#[test]
fn detaching_gives_the_webhook_back() {
    let (mut pod, _proxy) = taken(false);
    pod.interceptor.detach(&pod.bed.cgroup("pod")).unwrap();
    let_go("target", || pod.call("10.244.1.5", "9443"));
}

#[test]
fn the_proxys_socket_is_not_reachable_by_its_own_port() {
    let (pod, proxy) = taken(false);
    for (host, server) in ["10.244.1.5", "fd00:244::5"].iter().zip(&proxy) {
        assert_eq!(pod.call(host, &server.address.port().to_string()).error, "ECONNREFUSED");
    }
}

#[test]
fn a_pods_addresses_leave_room_for_all_pods_of_a_node() {
    use ctrlmesh_common::kernel::{INBOUND_PER_POD, MAX_INBOUND, MAX_PODS};
    use ctrlmesh_intercept::Error;
    assert_eq!(MAX_INBOUND, INBOUND_PER_POD * MAX_PODS);
    let (mut pod, _proxy) = taken(false);
    let mut take = |slot: Slot, port: u16| {
        let address = SocketAddr::from(([10, 244, 1, 5], port));
        let listener = listener::inbound(&pod.bed.net(), address.ip()).unwrap();
        pod.interceptor.take_inbound(slot, &pod.bed.net(), address, &listener)
    };
    // Two are taken already.
    take(pod.slot, 9445).unwrap();
    take(pod.slot, 9446).unwrap();
    let error = take(pod.slot, 9447).unwrap_err();
    assert!(matches!(error, Error::TooMany { .. }), "{error}");
    assert!(error.to_string().contains("10.244.1.5:9447"), "{error}");
    take(pod.slot, 9446).unwrap();
    let _server = pod.bed.target("10.244.1.5:9447");
    assert!(pod.call("10.244.1.5", "9447").answer.starts_with("target"));
}
