//! Several relays beside each other, and the state that they leave.

use std::process::Stdio;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::bed::{Bed, ClientReport, PROXY, Process, TARGET_V6, until, until_seen};
use crate::command::{attach, run, status};

fn signalled(process: &Process, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process.0.id()).unwrap());
    signal::kill(pid, signal).unwrap();
}

#[test]
fn webhook_calls_fail_as_the_pod_does_when_the_relay_hangs() {
    const WEBHOOK: &str = "10.244.1.5:9443";
    let bed = Bed::new();
    bed.wire("node");
    let pod = bed.cgroup("pod").display().to_string();
    let attach = |more: &[&str]| run(attach(&bed, &["--heartbeat", "2000"]).args(more));
    attach(&[]);
    let _server = bed.target(WEBHOOK);
    let relay = bed.relay_with(&["--webhook", WEBHOOK, "--cgroup", &pod]);
    let call = || -> ClientReport { bed.client_in("node", &bed.cgroup("node"), &["once", "10.244.1.5", "9443"]) };
    let relayed = |seen: &ClientReport| seen.answer.starts_with("target 127.0.0.2:");
    until_seen("the relay beats", call, relayed);
    signalled(&relay, Signal::SIGSTOP);
    let age = || status(&bed)["attachments"][0]["heartbeat_age"].as_f64();
    until("the beat is too old", || age().is_some_and(|age| age > 2.1));
    assert_eq!(call().error, "ECONNREFUSED");
    attach(&["--fail-open"]);
    assert!(call().answer.starts_with("target 10.244.1.1:"));
    signalled(&relay, Signal::SIGCONT);
    until_seen("the relay beats again", call, relayed);
}

#[test]
fn an_ending_relay_leaves_the_ipv6_of_another_alone() {
    let bed = Bed::new();
    let pods = [("a", PROXY), ("b", PROXY + 1)];
    let _processes = pods.map(|(pod, port)| {
        let port = port.to_string();
        let mut command = bed.command(&["attach", "--target", TARGET_V6, "--to", &port]);
        run(command.arg("--cgroup").arg(bed.cgroup(pod)));
        Process(bed.inside(&bed.cgroup(pod), "", "cat").stdin(Stdio::piped()).spawn().unwrap())
    });
    let native = |at: usize| status(&bed)["attachments"][at]["ipv6"] == true;
    // The first makes the prefix local, the second finds it so.
    let [mut first, _second] = [(0, PROXY), (1, PROXY + 1)].map(|(at, port)| {
        let relay = bed.relay_at(port, &[]);
        until("native IPv6 goes to the relay", || native(at));
        relay
    });
    let _target = bed.target(TARGET_V6);
    signalled(&first, Signal::SIGTERM);
    assert!(first.0.wait().unwrap().success());
    assert!(!native(0) && native(1));
    let seen = bed.connect(&bed.cgroup("b"), TARGET_V6, "v6only");
    assert!(seen.answer.starts_with("target ") && seen.peer == TARGET_V6, "{seen:?}");
    assert_ne!(seen.answer, format!("target {}", seen.local), "relayed, not direct");
}
