//! Connections that the proxy cannot take.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use crate::bed::{Bed, ClientReport, PROXY, Process, TARGET, TARGET_V6, counted, until_seen};
use ctrlmesh_intercept::{Heartbeat, ListenerCheck, listener};

/// Longest that a refusal may take, in milliseconds: a SYN that is lost costs a second.
const REFUSED_WITHIN: f64 = 10.0;
const ATTEMPTS: usize = 7;

#[test]
fn without_a_listener_a_closed_pod_is_refused_at_once() {
    for check in [ListenerCheck::Held, ListenerCheck::Port] {
        let bed = Bed::new();
        let mut interceptor = bed.interceptor();
        let mut attach = bed.attach(&bed.cgroup("pod"));
        attach.listener = check;
        interceptor.attach(&attach).unwrap();
        let _targets = [bed.target(TARGET), bed.target(TARGET_V6)];
        let mut attempts = 0;
        for (target, how) in [
            (TARGET, "blocking"),
            (TARGET_V6, "blocking"),
            (TARGET, "nonblocking"),
            (TARGET, "uring"),
            (TARGET, "fastopen"),
        ] {
            let mut times: Vec<f64> = (0..ATTEMPTS)
                .map(|_| {
                    let seen = bed.connect(&bed.cgroup("pod"), target, how);
                    assert_eq!(seen.error, "ECONNREFUSED", "{how} {check:?}");
                    seen.ms
                })
                .collect();
            attempts += ATTEMPTS as u64;
            // On a machine that has other work to do a process may wait long for its turn, but not each time.
            times.sort_by(f64::total_cmp);
            let (fastest, median) = (times[0], times[ATTEMPTS / 2]);
            assert!(fastest < REFUSED_WITHIN && median < 500.0, "{how} {check:?}: {times:?} ms");
        }
        assert_eq!(counted(&interceptor, "no_listener_refused"), attempts);
    }
}

#[test]
fn without_a_listener_an_open_pod_reaches_the_target() {
    for check in [ListenerCheck::Held, ListenerCheck::Port] {
        let bed = Bed::new();
        let mut interceptor = bed.interceptor();
        let mut attach = bed.attach(&bed.cgroup("pod"));
        attach.listener = check;
        attach.fail_open = true;
        interceptor.attach(&attach).unwrap();
        let _target = bed.target(TARGET);
        let seen = bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
        assert_eq!(seen.answer, format!("target {}", seen.local));
        assert_eq!(counted(&interceptor, "no_listener_passed"), 1);
    }
}

#[test]
fn a_closing_and_a_returning_listener_are_noticed_at_once() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let attach = bed.attach(&bed.cgroup("pod"));
    for _ in 0..3 {
        let proxy = bed.enrol(&mut interceptor, &attach);
        assert_eq!(bed.connect(&bed.cgroup("pod"), TARGET, "blocking").answer, format!("proxy 0 {TARGET}"));
        drop(proxy);
        assert_eq!(bed.connect(&bed.cgroup("pod"), TARGET, "blocking").error, "ECONNREFUSED");
    }
}

#[test]
fn a_socket_that_was_refused_can_try_again() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let attach = bed.attach(&bed.cgroup("pod"));
    interceptor.attach(&attach).unwrap();
    let command = &mut bed.peer("", &bed.cgroup("pod"), &["twice", "10.96.0.1", "443"]);
    let mut client = Process(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(client.line(), "once");
    let _proxy = bed.enrol(&mut interceptor, &attach);
    writeln!(client.0.stdin.as_mut().unwrap(), "go").unwrap();
    let seen: Vec<ClientReport> = client.finish();
    assert_eq!(seen[0].error, "ECONNREFUSED");
    assert_eq!((seen[1].answer.as_str(), seen[1].peer.as_str()), ("proxy 0 10.96.0.1:443", TARGET));
}

#[test]
fn a_lost_heartbeat_refuses_or_passes_as_the_pod_says() {
    for fail_open in [false, true] {
        let bed = Bed::new();
        let mut interceptor = bed.interceptor();
        let mut attach = bed.attach(&bed.cgroup("pod"));
        attach.fail_open = fail_open;
        let max_age = Duration::from_hours(1);
        attach.heartbeat = Some(Heartbeat { number: Some(7), max_age });
        let _proxy = bed.enrol(&mut interceptor, &attach);
        let _target = bed.target(TARGET);
        let connect = || bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
        interceptor.beat(7).unwrap();
        assert_eq!(connect().answer, format!("proxy 0 {TARGET}"));
        // The beat stays, and what counts as life becomes shorter than its age.
        attach.heartbeat = Some(Heartbeat { number: Some(7), max_age: Duration::from_nanos(1) });
        interceptor.attach(&attach).unwrap();
        let seen = connect();
        if fail_open {
            assert_eq!(seen.answer, format!("target {}", seen.local));
            assert_eq!(counted(&interceptor, "no_heartbeat_passed"), 1);
        } else {
            assert_eq!(seen.error, "ECONNREFUSED");
            assert_eq!(counted(&interceptor, "no_heartbeat_refused"), 1);
        }
        attach.heartbeat = Some(Heartbeat { number: Some(7), max_age });
        interceptor.attach(&attach).unwrap();
        assert_eq!(connect().answer, format!("proxy 0 {TARGET}"));
    }
}

#[test]
fn a_proxy_that_never_beat_is_not_alive() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.heartbeat = Some(Heartbeat { number: None, max_age: Duration::from_hours(24 * 365) });
    let _proxy = bed.enrol(&mut interceptor, &attach);
    assert_eq!(bed.connect(&bed.cgroup("pod"), TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn a_relay_that_is_stopped_loses_its_heartbeat() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.listener = ListenerCheck::Port;
    attach.heartbeat = Some(Heartbeat { number: None, max_age: Duration::from_secs(1) });
    interceptor.attach(&attach).unwrap();
    let _target = bed.target(TARGET);
    let relay = bed.relay_with(&["--owner", "test"]);
    let connect = || bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
    until_seen("the relay beats", connect, |seen| seen.answer.starts_with("target"));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(relay.0.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    until_seen("the heartbeat is lost", connect, |seen| seen.error == "ECONNREFUSED");
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    until_seen("the relay beats again", connect, |seen| seen.answer.starts_with("target"));
}

#[test]
fn events_name_the_outcome_the_pod_and_the_target() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    interceptor.attach(&attach).unwrap();
    let mut events = ctrlmesh_intercept::Events::open(&bed.pins()).unwrap();
    bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
    assert_eq!(events.next(), None, "off by default");
    attach.report = true;
    let slot = interceptor.attach(&attach).unwrap();
    bed.connect(&bed.cgroup("pod"), TARGET_V6, "blocking");
    let event = events.next().unwrap();
    assert_eq!(
        (event.outcome, event.slot, event.target.to_string()),
        ("no_listener_refused", slot, TARGET_V6.to_owned())
    );
    assert_eq!(events.next(), None);
}

#[test]
fn a_listener_needs_a_free_port() {
    let bed = Bed::new();
    let _first = listener::outbound(&bed.net(), PROXY).unwrap();
    let error = listener::outbound(&bed.net(), PROXY).unwrap_err();
    assert_eq!(error.to_string(), "listen on [::]:15001");
}
