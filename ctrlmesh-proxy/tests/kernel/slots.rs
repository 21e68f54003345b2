//! Slots, indices and tables keep their meaning as long as a connection carries them.

use std::net::SocketAddr;
use std::time::Duration;

use crate::bed::{Bed, ClientReport, PROXY, Process, TARGET, counted, targets};
use ctrlmesh_common::kernel::Code;
use ctrlmesh_intercept::{
    Attach, Error, Heartbeat, Interceptor, Limits, ListenerCheck, Options, Slot, Targets, listener,
};

const OTHER: &str = "10.97.3.7:443";

fn one_slot(bed: &Bed) -> Interceptor {
    let limits = Limits { pods: Some(1), ..Limits::default() };
    Interceptor::open(Options { limits, ..bed.options("test") }).unwrap()
}

fn named(name: &str, list: &[&str]) -> Targets {
    Targets { name: name.to_owned(), ..targets(list) }
}

/// What the tables say of a connection.
fn explained(interceptor: &Interceptor, generation: u16, slot: u16, index: u8) -> Option<String> {
    let local = Code { generation, slot, index }.ipv4().to_ne_bytes();
    let peer = SocketAddr::from(([127, 0, 0, 1], 40_000));
    let found = interceptor.originals().unwrap().find(SocketAddr::from((local, PROXY)), peer);
    found.unwrap().map(|original| original.target.to_string())
}

#[test]
fn a_slot_that_is_given_again_has_no_listener_of_the_pod_before() {
    let bed = Bed::new();
    let mut interceptor = one_slot(&bed);
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&bed.cgroup("before")));
    interceptor.detach(&bed.cgroup("before")).unwrap();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("after"))).unwrap();
    assert_eq!(slot.get(), 0);
    assert_eq!(bed.connect(&bed.cgroup("after"), TARGET, "blocking").error, "ECONNREFUSED");
    assert_eq!(counted(&interceptor, "no_listener_refused"), 1);
}

#[test]
fn a_reused_slot_has_no_heartbeat_of_the_former_pod() {
    let bed = Bed::new();
    let mut interceptor = one_slot(&bed);
    let heartbeat = Some(Heartbeat { number: None, max_age: Duration::from_hours(1) });
    let attach = |name: &str| Attach { heartbeat, ..bed.attach(&bed.cgroup(name)) };
    let proxy = bed.enrol(&mut interceptor, &attach("before"));
    interceptor.beat(0).unwrap();
    assert!(bed.connect(&bed.cgroup("before"), TARGET, "blocking").answer.starts_with("proxy"));
    interceptor.detach(&bed.cgroup("before")).unwrap();
    drop(proxy);
    let _proxy = bed.enrol(&mut interceptor, &attach("after"));
    assert_eq!(bed.connect(&bed.cgroup("after"), TARGET, "blocking").error, "ECONNREFUSED");
    assert_eq!(counted(&interceptor, "no_heartbeat_refused"), 1);
    interceptor.beat(0).unwrap();
    assert!(bed.connect(&bed.cgroup("after"), TARGET, "blocking").answer.starts_with("proxy"));
}

#[test]
fn a_beat_that_another_pod_is_measured_by_stays_when_one_goes() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let heartbeat = Some(Heartbeat { number: Some(9), max_age: Duration::from_hours(1) });
    let attach = |name: &str| Attach { heartbeat, ..bed.attach(&bed.cgroup(name)) };
    interceptor.attach(&attach("goes")).unwrap();
    let _proxy = bed.enrol(&mut interceptor, &attach("stays"));
    interceptor.beat(9).unwrap();
    interceptor.detach(&bed.cgroup("goes")).unwrap();
    assert!(bed.connect(&bed.cgroup("stays"), TARGET, "blocking").answer.starts_with("proxy"));
}

#[test]
fn a_former_pods_connection_is_not_explained_by_the_next_pod() {
    let bed = Bed::new();
    let mut interceptor = one_slot(&bed);
    interceptor.attach(&bed.attach(&bed.cgroup("before"))).unwrap();
    assert_eq!(explained(&interceptor, 0, 0, 1).as_deref(), Some(TARGET));
    interceptor.detach(&bed.cgroup("before")).unwrap();
    assert_eq!(explained(&interceptor, 0, 0, 1), None);
    let mut attach = bed.attach(&bed.cgroup("after"));
    attach.targets = named("other", &[OTHER]);
    let _proxy = bed.enrol(&mut interceptor, &attach);
    assert_eq!(explained(&interceptor, 0, 0, 1), None);
    assert_eq!(explained(&interceptor, 1, 0, 1).as_deref(), Some(OTHER));
    let seen = bed.connect(&bed.cgroup("after"), OTHER, "blocking");
    assert_eq!((seen.answer, seen.peer.as_str()), (format!("proxy 0 {OTHER}"), OTHER));
}

#[test]
fn a_released_slot_comes_again_only_after_all_others() {
    let bed = Bed::new();
    let limits = Limits { pods: Some(3), ..Limits::default() };
    let open = || Interceptor::open(Options { limits, ..bed.options("test") }).unwrap();
    let mut given = Vec::new();
    for _ in 0..5 {
        let mut interceptor = open();
        given.push(interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap().get());
        interceptor.detach(&bed.cgroup("pod")).unwrap();
    }
    assert_eq!(given, [0, 1, 2, 0, 1]);
}

#[test]
fn a_waiting_connection_is_explained_by_the_former_table() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    let slot = interceptor.attach(&bed.attach(&pod)).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let mut waiting = bed.hold(&pod, TARGET, 1);
    let mut attach = bed.attach(&pod);
    attach.targets = named("other", &[OTHER]);
    assert_eq!(interceptor.attach(&attach).unwrap(), slot);
    let _target = bed.target(TARGET);
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    let seen: Vec<ClientReport> = released(&mut waiting);
    assert_eq!((seen[0].answer.as_str(), seen[0].peer.as_str()), ("proxy 0 10.96.0.1:443", TARGET));
    drop(waiting);
    assert_eq!(bed.connect(&pod, OTHER, "blocking").answer, format!("proxy 0 {OTHER}"));
    let seen = bed.connect(&pod, TARGET, "blocking");
    assert_eq!(seen.answer, format!("target {}", seen.local), "no target any more");
}

/// What a client that was holding connections reads from them.
fn released(process: &mut Process) -> Vec<ClientReport> {
    use std::io::Write as _;
    writeln!(process.0.stdin.as_mut().unwrap(), "read").unwrap();
    serde_json::from_str(&process.line()).unwrap()
}

#[test]
fn tables_of_former_names_do_not_fill_the_node() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    let proxy = bed.enrol(&mut interceptor, &attach);
    for round in 0..70 {
        attach.targets = named(&format!("round {round}"), &[TARGET]);
        interceptor.attach(&attach).unwrap();
    }
    assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy 0 {TARGET}"));
    drop(proxy);
}

#[test]
fn a_pods_new_list_name_leaves_pods_of_the_old_one_alone() {
    let bed = Bed::new();
    let pods = [bed.cgroup("a"), bed.cgroup("b")];
    let mut interceptor = bed.interceptor();
    interceptor.attach(&bed.attach(&pods[0])).unwrap();
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pods[1]));
    let mut attach = bed.attach(&pods[0]);
    attach.targets = named("other", &[OTHER]);
    interceptor.attach(&attach).unwrap();
    assert_eq!(bed.connect(&pods[1], TARGET, "blocking").answer, format!("proxy 1 {TARGET}"));
}

#[test]
fn a_full_table_is_replaced_for_every_pod_that_shares_it() {
    let bed = Bed::new();
    let pods = [bed.cgroup("a"), bed.cgroup("b")];
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pods[0]);
    attach.targets = targets(&[TARGET]);
    interceptor.attach(&attach).unwrap();
    let mut second = bed.attach(&pods[1]);
    second.targets = targets(&[TARGET]);
    let _proxy = bed.enrol(&mut interceptor, &second);
    for round in 0..254 {
        attach.targets = targets(&[&format!("10.1.{round}.1:443")]);
        interceptor.attach(&attach).unwrap();
    }
    assert_eq!(explained(&interceptor, 0, 1, 255).as_deref(), Some("10.1.253.1:443"));
    attach.targets = targets(&[OTHER]);
    interceptor.attach(&attach).unwrap();
    for slot in [0, 1] {
        assert_eq!(explained(&interceptor, 1, slot, 1).as_deref(), Some(OTHER));
        assert_eq!(explained(&interceptor, 0, slot, 1).as_deref(), Some(TARGET));
    }
    assert_eq!(bed.connect(&pods[1], OTHER, "blocking").answer, format!("proxy 1 {OTHER}"));
    let _target = bed.target("10.96.0.1:443");
    let seen = bed.connect(&pods[1], TARGET, "blocking");
    assert_eq!(seen.answer, format!("target {}", seen.local));
}

#[test]
fn only_ones_own_pods_get_a_listener_a_beat_or_webhook_calls() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    let mut other = Interceptor::open(bed.options("other")).unwrap();
    let outbound = listener::outbound(&bed.net(), PROXY).unwrap();
    let webhook: SocketAddr = "10.96.0.1:9443".parse().unwrap();
    let inbound = listener::inbound(&bed.net(), webhook.ip()).unwrap();
    let refused = |interceptor: &mut Interceptor, slot: Slot| {
        for result in [
            interceptor.listen(slot, &outbound),
            interceptor.serve_ipv6(slot, &bed.net()),
            interceptor.beat(u32::from(slot.get())),
            interceptor.take_inbound(slot, &bed.net(), webhook, &inbound),
        ] {
            assert!(matches!(result, Err(Error::NotYours { .. })), "{result:?}");
        }
    };
    refused(&mut other, slot);
    refused(&mut interceptor, Slot::new(1));
    refused(&mut interceptor, Slot::new(5000));
    interceptor.listen(slot, &outbound).unwrap();
    interceptor.beat(0).unwrap();
    std::fs::remove_dir(bed.cgroup("pod")).unwrap();
    refused(&mut interceptor, slot);
    interceptor.sweep().unwrap();
    refused(&mut interceptor, slot);
}

#[test]
fn two_pods_cannot_have_the_webhook_calls_of_one_address() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let webhook: SocketAddr = "10.96.0.1:9443".parse().unwrap();
    let listener = listener::inbound(&bed.net(), webhook.ip()).unwrap();
    let slots = ["a", "b"].map(|pod| interceptor.attach(&bed.attach(&bed.cgroup(pod))).unwrap());
    interceptor.take_inbound(slots[0], &bed.net(), webhook, &listener).unwrap();
    let again = interceptor.take_inbound(slots[1], &bed.net(), webhook, &listener);
    assert_eq!(again.unwrap_err().to_string(), "webhook calls to 10.96.0.1:9443 are taken for the pod in slot 0");
}

#[test]
fn two_links_redirect_and_refuse_once_and_pass_twice() {
    let bed = Bed::new();
    let (pod, container) = (bed.cgroup("pod"), bed.cgroup("pod/container"));
    let mut interceptor = bed.interceptor();
    interceptor.attach(&bed.attach(&pod)).unwrap();
    let attach = Attach { listener: ListenerCheck::Port, ..bed.attach(&container) };
    interceptor.attach(&attach).unwrap();
    let counted = |interceptor: &Interceptor| {
        let counters = interceptor.status().unwrap().counters;
        ["redirected", "no_listener_refused", "decided", "other_target"].map(|name| counters[name])
    };
    assert_eq!(bed.connect(&container, TARGET, "blocking").error, "ECONNREFUSED");
    assert_eq!(counted(&interceptor), [0, 1, 1, 0]);
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    let attach = Attach { listener: ListenerCheck::Held, ..attach };
    let slot = interceptor.attach(&attach).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    assert_eq!(bed.connect(&container, TARGET, "blocking").answer, format!("proxy 1 {TARGET}"));
    assert_eq!(counted(&interceptor), [1, 1, 2, 0]);
    let _target = bed.target(OTHER);
    assert!(bed.connect(&container, OTHER, "blocking").answer.starts_with("target"));
    assert_eq!(counted(&interceptor), [1, 1, 2, 2]);
}
