//! Every outcome is counted once, under its own name.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;

use crate::bed::{Bed, ClientReport, ConnectCounts, PROXY, Process, TARGET, TARGET_V6, counted, echo, until};
use ctrlmesh_intercept::{Event, Events, Interceptor, ListenerCheck, listener};

/// What was counted since the last time.
struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    fn of(interceptor: &Interceptor) -> Self {
        Self(interceptor.status().unwrap().counters)
    }

    /// The counters that have moved.
    fn moved(&mut self, interceptor: &Interceptor) -> Vec<(&'static str, u64)> {
        let now = interceptor.status().unwrap().counters;
        let moved = now.iter().filter(|(name, count)| **count > self.0[*name]);
        let moved = moved.map(|(name, count)| (*name, count - self.0[name])).collect();
        self.0 = now;
        moved
    }
}

#[test]
fn a_client_that_asks_for_its_peer_is_counted() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pod = bed.cgroup("pod");
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pod));
    let _servers = ["10.96.0.1:444", "127.64.0.1:9000", "[fd00:96::1]:444"].map(|at| bed.target(at));
    let mut counts = Counts::of(&interceptor);
    for target in [TARGET, TARGET_V6, "[::ffff:10.96.0.1]:443"] {
        bed.connect(&pod, target, "blocking");
        assert_eq!(counts.moved(&interceptor), [("peer_answered", 1), ("redirected", 1)]);
    }
    for target in ["10.96.0.1:444", "[fd00:96::1]:444"] {
        bed.connect(&pod, target, "blocking");
        assert_eq!(counts.moved(&interceptor), [("other_target", 1), ("peer_other", 1)]);
    }
    // An address of ours that leads nowhere.
    bed.connect(&pod, "127.64.0.1:9000", "blocking");
    assert_eq!(counts.moved(&interceptor), [("decided", 1), ("peer_unknown", 1)]);
    let echo = echo(&bed, TARGET);
    let seen: ClientReport = bed.client(&pod, &["datagram", "10.96.0.1", "443"]);
    echo.join().unwrap();
    assert_eq!(seen.peer, TARGET);
    assert_eq!(counts.moved(&interceptor), [("other_protocol", 1), ("peer_other", 1)]);
}

#[test]
fn a_proxy_that_asks_for_the_original_is_counted() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.listener = ListenerCheck::Port;
    interceptor.attach(&attach).unwrap();
    interceptor.answer_original_destination(&bed.cgroup("proxy")).unwrap();
    let command = &mut bed.peer("", &bed.cgroup("proxy"), &["proxy", &PROXY.to_string()]);
    let mut proxy = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(proxy.line(), "ready");
    let mut counts = Counts::of(&interceptor);
    bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
    assert_eq!(
        counts.moved(&interceptor),
        [("option_other", 1), ("original_answered", 1), ("peer_answered", 1), ("redirected", 1)]
    );
    // Asked for both families, and of neither there is anything to say.
    bed.connect(&bed.cgroup("outside"), "127.0.0.1:15001", "blocking");
    assert_eq!(counts.moved(&interceptor), [("option_other", 1), ("original_unknown", 2)]);
}

#[test]
fn what_arrives_in_a_pod_is_counted() {
    let bed = Bed::new();
    bed.wire("node");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    let address: SocketAddr = "10.244.1.5:9443".parse().unwrap();
    let listener = listener::inbound(&bed.net(), address.ip()).unwrap();
    interceptor.take_inbound(slot, &bed.net(), address, &listener).unwrap();
    let _servers = [bed.target("10.244.1.5:9444"), bed.proxy(interceptor.originals().unwrap(), listener)];
    let mut counts = Counts::of(&interceptor);
    // The kernel looks for a listener as often as it likes: once or more.
    let mut names = || counts.moved(&interceptor).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let call = |command: &[&str]| -> ClientReport { bed.client_in("node", &bed.cgroup("node"), command) };
    call(&["once", "10.244.1.5", "9443"]);
    assert_eq!(names(), ["inbound_taken"]);
    call(&["once", "10.244.1.5", "9444"]);
    assert_eq!(names(), ["inbound_other_port"]);
    let echo = echo(&bed, "10.244.1.5:9443");
    call(&["datagram", "10.244.1.5", "9443"]);
    echo.join().unwrap();
    assert_eq!(names(), ["inbound_other_protocol"]);
}

#[test]
fn an_event_that_does_not_fit_is_counted_the_others_are_kept() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.report = true;
    let slot = interceptor.attach(&attach).unwrap();
    let client = bed.hammer(&attach.cgroup, TARGET, "proxy ");
    let counted = |name: &str| counted(&interceptor, name);
    until("the ring buffer is full", || counted("event_lost") > 0);
    let seen: ConnectCounts = client.finish();
    assert_eq!(counted("no_listener_refused"), seen.refused);
    let events: Vec<Event> = Events::open(&bed.pins()).unwrap().collect();
    assert_eq!(events.len() as u64 + counted("event_lost"), seen.refused);
    assert!(events.len() > 1000, "{}", events.len());
    assert!(events.iter().all(|event| event.slot == slot && event.outcome == "no_listener_refused"));
}

#[test]
fn a_count_is_not_lost_when_a_program_is_interrupted_by_another() {
    let bed = Bed::new();
    let slot = bed.interceptor().attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    // Nobody can make the kernel do so at the one instruction where it would matter: that one is looked for.
    for hook in ["connect4", "connect6", "getpeername4", "getpeername6"] {
        let (_, program) = crate::upgrade::linked(&bed.pin(slot, hook));
        let mut command = std::process::Command::new("bpftool");
        let command = command.args(["prog", "dump", "xlated", "id", &program.to_string()]);
        let shown = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(shown.contains("lock *(u64 *)"), "{hook} does not add at once:\n{shown}");
    }
}
