//! Connections to a port at any address go to the proxy, which finds out where they were meant to go.

use std::process::Stdio;
use std::time::Duration;

use crate::bed::{Bed, ClientReport, PROXY, Process, TARGET, TARGET_V6, count, counted, targets, until};
use crate::redirect::{EnrolledPod, direct, enrolled, redirected};
use ctrlmesh_intercept::{Attach, Interceptor, Limits, ListenerCheck, Options, Slot, listener};

/// Two exact targets, and every address at their port and at another one.
const TARGETS: [&str; 4] = [TARGET, TARGET_V6, "*:443", "*:444"];

/// Addresses that no target names.
const OTHERS: [&str; 4] = ["10.97.3.7:443", "[fd00:97::3:7]:443", "10.96.0.1:444", "127.0.0.1:444"];

fn by_port() -> EnrolledPod {
    enrolled(|_, attach| attach.targets = targets(&TARGETS))
}

/// How many connections are stored.
fn stored(interceptor: &Interceptor) -> usize {
    interceptor.stored_connections().unwrap()
}

#[test]
fn every_kind_of_socket_is_redirected_to_any_address() {
    let bed = by_port();
    for address in OTHERS {
        for how in ["blocking", "nonblocking", "uring"] {
            let seen = bed.connect(address, how);
            redirected(&seen, address);
            assert_eq!(seen.peer, address, "{seen:?}");
        }
    }
    redirected(&bed.connect("[::ffff:10.97.3.7]:443", "blocking"), "10.97.3.7:443");
    for how in ["v6only", "v6only+nonblocking", "v6only+uring", "v6only+bound", "v6only+fastopen"] {
        redirected(&bed.connect("[fd00:97::3:7]:443", how), "[fd00:97::3:7]:443");
    }
}

#[test]
fn an_exact_target_goes_before_and_other_ports_are_untouched() {
    let bed = by_port();
    for target in [TARGET, TARGET_V6] {
        redirected(&bed.connect(target, "blocking"), target);
    }
    assert_eq!(stored(&bed.interceptor), 0, "an exact target needs nothing stored");
    let _server = bed.bed.target("10.97.3.7:445");
    direct(&bed.connect("10.97.3.7:445", "blocking"));
    direct(&bed.bed.connect(&bed.bed.cgroup("other"), "10.97.3.7:443", "blocking"));
    // Where we send connections to is no address that anybody means.
    let _other = bed.bed.target("127.64.0.1:444");
    direct(&bed.connect("127.64.0.1:444", "blocking"));
}

#[test]
fn without_our_prefix_any_ipv6_address_goes_over_ipv4() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    let pod = bed.cgroup("pod");
    let slot = interceptor.attach(&Attach { targets: targets(&TARGETS), ..bed.attach(&pod) }).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    let target = "[fd00:97::3:7]:443";
    let seen = bed.connect(&pod, target, "blocking");
    redirected(&seen, target);
    assert_eq!(seen.peer, target);
    assert_eq!(bed.connect(&pod, target, "v6only").error, "ECONNREFUSED");
    assert_eq!(counted(&interceptor, "v6only_refused"), 1);
}

#[test]
fn a_bound_socket_is_refused_or_passes_and_nothing_is_stored() {
    for (fail_open, counter) in [(false, "bound_refused"), (true, "bound_passed")] {
        let bed = enrolled(|_, attach| {
            attach.targets = targets(&TARGETS);
            attach.fail_open = fail_open;
        });
        let seen = bed.connect("10.97.3.7:443", "bound");
        if fail_open {
            direct(&seen);
        } else {
            assert_eq!(seen.error, "ECONNREFUSED", "{seen:?}");
        }
        assert_eq!((bed.counted(counter), stored(&bed.interceptor)), (1, 0));
    }
}

#[test]
fn a_full_table_refuses_or_passes_and_is_counted() {
    for (fail_open, counter) in [(false, "connections_full_refused"), (true, "connections_full_passed")] {
        let bed = Bed::new();
        let limits = Limits { connections: Some(2), ..Limits::default() };
        let mut interceptor = Interceptor::open(Options { limits, ..bed.options("test") }).unwrap();
        let pod = bed.cgroup("pod");
        let attach = Attach { targets: targets(&TARGETS), fail_open, ..bed.attach(&pod) };
        let _proxy = bed.enrol(&mut interceptor, &attach);
        let _server = bed.target("10.97.3.7:443");
        let _held = bed.hold(&pod, "10.97.3.7:443", 2);
        let seen = bed.connect(&pod, "10.97.3.7:443", "blocking");
        if fail_open {
            direct(&seen);
        } else {
            assert_eq!(seen.error, "ECONNREFUSED", "{seen:?}");
        }
        assert_eq!(counted(&interceptor, counter), 1);
    }
}

#[test]
fn what_is_stored_goes_some_time_after_the_socket_and_with_the_pod() {
    let mut bed = by_port();
    for address in OTHERS {
        bed.connect(address, "blocking");
    }
    let held = bed.bed.hold(&bed.pod, "10.97.3.7:443", 3);
    let held_v6 = bed.bed.hold(&bed.pod, "[fd00:97::3:7]:443", 3);
    assert_eq!(stored(&bed.interceptor), OTHERS.len() + 6);
    bed.interceptor.forget_connections_closed_for(Duration::from_hours(1)).unwrap();
    assert_eq!(stored(&bed.interceptor), OTHERS.len() + 6, "the proxy may not have accepted them yet");
    bed.interceptor.forget_connections_closed_for(Duration::ZERO).unwrap();
    assert_eq!(stored(&bed.interceptor), 6, "of open sockets");
    held.kill();
    until("the sockets of a killed process are closed", || {
        bed.interceptor.forget_connections_closed_for(Duration::ZERO).unwrap();
        stored(&bed.interceptor) == 3
    });
    bed.interceptor.detach(&bed.pod).unwrap();
    assert_eq!(stored(&bed.interceptor), 0);
    held_v6.kill();
}

#[test]
fn a_client_that_has_closed_before_it_is_accepted_is_explained() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pod = bed.cgroup("pod");
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    let slot = interceptor.attach(&Attach { targets: targets(&TARGETS), ..bed.attach(&pod) }).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let script = "import socket; s = socket.create_connection(('10.97.3.7', 443)); s.sendall(b'hello'); s.close()";
    assert!(bed.inside(&pod, "", "python3").args(["-c", script]).status().unwrap().success());
    let (client, peer) = listener.accept().unwrap();
    let original = interceptor.originals().unwrap().find(client.local_addr().unwrap(), peer).unwrap().unwrap();
    assert_eq!((original.target.to_string(), original.by_port), ("10.97.3.7:443".to_owned(), true));
}

#[test]
fn many_connections_at_once_are_each_explained() {
    let bed = by_port();
    let hammers: Vec<(Process, &str)> = ["10.97.3.7:443", "10.96.0.1:444", "127.0.0.1:444"]
        .into_iter()
        .map(|address| (bed.bed.hammer(&bed.pod, address, &format!("proxy 0 {address}")), address))
        .collect();
    let enough = count(10_000) as u64;
    until("enough connections were made", || bed.counted("redirected") > enough);
    for (hammer, address) in hammers {
        let counts: crate::bed::ConnectCounts = hammer.finish();
        assert!(counts.proxied > 0 && counts.direct == 0 && counts.broken == 0, "{address}: {counts:?}");
    }
    assert_eq!(bed.counted("connections_full_refused"), 0);
}

#[test]
fn one_that_was_refused_may_connect_again_elsewhere() {
    let bed = by_port();
    let script = "import socket, sys\n\
        s = socket.socket()\n\
        s.connect(('10.97.3.7', 443)); s.makefile().readline()\n\
        s.close()\n\
        t = socket.socket()\n\
        try: t.connect(('10.97.3.7', 9))\n\
        except ConnectionRefusedError: pass\n\
        t.connect(('10.97.3.7', 443)); sys.stdout.write(t.makefile().readline())";
    let output = bed.bed.inside(&bed.pod, "", "python3").args(["-c", script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "proxy 0 10.97.3.7:443\n", "{output:?}");
}

#[test]
fn a_foreign_proxy_is_told_the_original_of_any_address() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.listener = ListenerCheck::Port;
    attach.targets = targets(&TARGETS);
    interceptor.attach(&attach).unwrap();
    interceptor.answer_original_destination(&bed.cgroup("proxy")).unwrap();
    let command = &mut bed.peer("", &bed.cgroup("proxy"), &["proxy", &PROXY.to_string()]);
    let mut proxy = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(proxy.line(), "ready");
    interceptor.serve_ipv6(Slot::new(0), &bed.net()).unwrap();
    for target in OTHERS {
        let seen: ClientReport = bed.connect(&bed.cgroup("pod"), target, "blocking");
        assert_eq!((seen.answer.as_str(), seen.peer.as_str()), (&*format!("proxy {target}"), target));
    }
}
