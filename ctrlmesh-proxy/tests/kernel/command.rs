//! `ctrlmesh-proxy intercept` on the command line.

use std::path::Path;
use std::process::{Command, Output};

use crate::bed::{Bed, ClientReport, PROXY, TARGET, TARGET_V6};

pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

pub(crate) fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn status(bed: &Bed) -> serde_json::Value {
    serde_json::from_slice(&run(&mut bed.command(&["status", "-o", "json"])).stdout).unwrap()
}

pub(crate) fn attach(bed: &Bed, more: &[&str]) -> Command {
    let mut command =
        bed.command(&["attach", "--target", TARGET, "--target", "10.97.0.0/16:443", "--to", "15001", "--cgroup"]);
    command.arg(bed.cgroup("pod")).args(more);
    command
}

/// That what connects is answered so, without us between: some time after the last file of a link is gone, the kernel
/// lets go of it by itself (`bpf_link_put`, which leaves that to a work queue).
pub(crate) fn let_go(answer: &str, connect: impl Fn() -> ClientReport) {
    crate::bed::until_seen("it is let go of", connect, |seen| seen.answer.starts_with(answer));
}

/// The same of a pod, and of what it connects to itself.
pub(crate) fn is_let_go(bed: &Bed, pod: &Path) {
    let connect = || bed.connect(pod, TARGET, "blocking");
    let is_direct = |seen: &ClientReport| seen.answer == format!("target {}", seen.local);
    crate::bed::until_seen("it is let go of", connect, is_direct);
}

#[test]
fn attach_run_status_detach() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    assert_eq!(text(&run(&mut bed.command(&["status"]))), "nothing is attached\n");
    assert_eq!(text(&run(&mut attach(&bed, &[]))), format!("attached {} in slot 0\n", pod.display()));
    let _targets = [bed.target(TARGET), bed.target("10.97.3.7:443")];
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
    let relay = bed.relay();
    for target in [TARGET, "10.97.3.7:443"] {
        let seen = bed.connect(&pod, target, "blocking");
        assert!(seen.answer.starts_with("target "), "{seen:?}");
        assert_ne!(seen.answer, format!("target {}", seen.local), "relayed, not direct");
        assert_eq!(seen.peer, target);
    }
    let status = status(&bed);
    assert_eq!(status["attachments"][0]["cgroup"], pod.display().to_string());
    assert_eq!(status["attachments"][0]["fail"], "closed");
    assert_eq!(status["attachments"][0]["to"], 15001);
    assert_eq!(status["counters"]["redirected"], 2);
    relay.kill();
    assert_eq!(text(&run(&mut bed.command(&["detach"]))), format!("detached {}\n", pod.display()));
    let_go("target ", || bed.connect(&pod, TARGET, "blocking"));
}

#[test]
fn the_heartbeat_of_a_relay_is_shown() {
    let bed = Bed::new();
    run(&mut attach(&bed, &["--heartbeat", "60000"]));
    let shown = || text(&run(&mut bed.command(&["status"])));
    assert!(shown().contains("  heartbeat  never\n"), "{}", shown());
    assert_eq!(status(&bed)["attachments"][0]["heartbeat_max_age"], 60.0);
    let _relay = bed.relay();
    let age = || status(&bed)["attachments"][0]["heartbeat_age"].as_f64();
    crate::bed::until("the relay beats", || age().is_some_and(|age| age < 30.0));
    assert!(shown().contains(" s ago, 60 s at most\n"), "{}", shown());
}

#[test]
fn a_relay_may_start_before_anything_is_attached() {
    let bed = Bed::new();
    // As if a loader had just begun: its folders are there, and no maps yet.
    drop(bed.interceptor());
    for map in std::fs::read_dir(bed.pins().join("maps")).unwrap().flatten() {
        std::fs::remove_file(map.path()).unwrap();
    }
    let mut relay = bed.relay();
    let _target = bed.target(TARGET);
    run(&mut attach(&bed, &["--heartbeat", "60000"]));
    crate::bed::until("the relay beats", || {
        bed.connect(&bed.cgroup("pod"), TARGET, "blocking").answer.starts_with("target")
    });
    assert!(relay.0.try_wait().unwrap().is_none(), "the relay ended");
}

#[test]
fn a_relay_shows_events_to_whoever_debugs() {
    use std::io::{BufRead as _, BufReader};
    let bed = Bed::new();
    run(&mut attach(&bed, &["--report"]));
    let mut command = bed.inside(&bed.cgroup("relay"), "", env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
    command.args(["intercept", "--pin-dir"]).arg(bed.pins()).args(["run", "--to", "15001"]);
    command.env("RUST_LOG", "debug").env("NO_COLOR", "1").stderr(std::process::Stdio::piped());
    let mut relay = crate::bed::Process(command.spawn().unwrap());
    let mut lines = BufReader::new(relay.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("relay listens")));
    assert_eq!(bed.connect(&bed.cgroup("pod"), "10.97.3.7:443", "bound").error, "ECONNREFUSED");
    let event = lines.find(|line| line.contains("kernel event")).unwrap();
    assert!(event.contains("bound_refused") && event.contains("10.97.3.7:443"), "{event}");
}

#[test]
fn attaching_again_changes_the_attachment_in_place() {
    let bed = Bed::new();
    run(&mut attach(&bed, &[]));
    run(&mut attach(&bed, &["--fail-open"]));
    let status = status(&bed);
    assert_eq!(status["attachments"].as_array().unwrap().len(), 1);
    assert_eq!(status["attachments"][0]["fail"], "open");
}

#[test]
fn attachments_with_the_same_targets_share_a_table() {
    let bed = Bed::new();
    let tables = |pod: &str, targets: [&str; 2]| {
        let mut command = bed.command(&["attach", "--to", "15001", "--cgroup"]);
        command.arg(bed.cgroup(pod));
        run(command.args(targets.map(|target| format!("--target={target}"))));
        let map = aya::maps::MapData::from_pin(bed.pins().join("maps/TABLES")).unwrap();
        let map = aya::maps::Map::from_map_data(map).unwrap();
        let map: aya::maps::Array<_, u64> = map.try_into().unwrap();
        map.iter().filter(|name| !matches!(name, Ok(0))).count()
    };
    let (these, others) = ([TARGET, "10.97.0.0/16:443"], [TARGET, TARGET_V6]);
    assert_eq!(tables("a", these), 1);
    assert_eq!(tables("b", [these[1], these[0]]), 1);
    assert_eq!(tables("c", others), 2);
    assert_eq!(tables("c", these), 2, "the former one still explains");
    let shown: Vec<_> = status(&bed)["attachments"].as_array().unwrap().clone();
    assert!(shown.iter().all(|one| one["targets"] == shown[0]["targets"]), "{shown:?}");
}

#[test]
fn a_relay_in_the_intercepted_cgroup_is_reported() {
    let bed = Bed::new();
    run(&mut attach(&bed, &[]));
    let relay = |cgroup: &str| {
        let mut command = bed.inside(&bed.cgroup(cgroup), "", env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        command.args(["intercept", "--pin-dir"]).arg(bed.pins()).args(["run", "--to", "15001"]);
        command
    };
    let output = relay("pod/below").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("its own connections would come back to it"), "{error}");
    let below = bed.cgroup("pod/below").display().to_string();
    run(&mut attach(&bed, &["--except", &below]));
    let child = crate::bed::Process(relay("pod/below").spawn().unwrap());
    let _target = bed.target(TARGET);
    crate::bed::until("the relay takes connections", || {
        bed.connect(&bed.cgroup("pod"), TARGET, "blocking").answer.starts_with("target")
    });
    child.kill();
}

#[test]
fn errors_say_what_to_do() {
    let bed = Bed::new();
    let fails = |command: &mut Command, with: &str| {
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(with), "{error}");
    };
    fails(
        &mut bed.command(&["attach", "--cgroup", "/tmp", "--target", TARGET, "--to", "1"]),
        "/tmp is not a cgroup of the cgroup2 file system at",
    );
    fails(
        &mut bed.command(&["attach", "--cgroup", "/tmp", "--target", "10.0.0.0/8:443", "--to", "1"]),
        "a prefix of this family has at least 10 bits",
    );
    fails(
        &mut bed.command(&["attach", "--cgroup", "/tmp", "--target", "127.64.0.1:443", "--to", "1"]),
        "are where redirected connections go, and cannot be targets",
    );
    fails(&mut attach(&bed, &["--heartbeat", "499"]), "499 is not in 500..");
    fails(&mut bed.command(&["detach", "--cgroup", "/tmp"]), "nothing is attached at /tmp");
    run(&mut bed.command(&["detach"]));
    run(&mut bed.command(&["upgrade"]));
    assert!(!bed.pins().exists(), "what was refused has made nothing");
    run(&mut attach(&bed, &[]));
    fails(&mut attach(&bed, &["--owner", "other"]), "is attached by `cli` (`--owner cli` speaks for it)");
    fails(
        bed.command(&["detach", "--owner", "other", "--cgroup"]).arg(bed.cgroup("pod")),
        "is attached by `cli` (`--owner cli` speaks for it)",
    );
}

#[test]
fn whoever_has_read_enough_of_the_status_need_not_read_on() {
    let bed = Bed::new();
    run(&mut attach(&bed, &[]));
    for output in ["text", "json"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let command = &mut bed.command(&["status", "-o", output]);
        let output = command.stdout(writer).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && error.is_empty(), "{error}");
    }
}

#[test]
fn a_relay_takes_webhook_calls_too_and_passes_them_on() {
    const WEBHOOKS: [&str; 2] = ["10.244.1.5:9443", "[fd00:244::5]:9443"];
    let bed = Bed::new();
    bed.wire("node");
    let pod = bed.cgroup("pod").display().to_string();
    let _servers = WEBHOOKS.map(|address| bed.target(address));
    let call = |host: &str| -> ClientReport { bed.client_in("node", &bed.cgroup("node"), &["once", host, "9443"]) };
    let webhooks = ["--webhook", WEBHOOKS[0], "--webhook", WEBHOOKS[1], "--cgroup", &pod];
    let early = bed.command(&["run", "--to", "15001"]).args(webhooks).output().unwrap();
    let error = String::from_utf8(early.stderr).unwrap();
    assert!(error.contains(&format!("nothing is attached at {pod}")), "{error}");
    run(&mut attach(&bed, &[]));
    let relay = bed.relay_with(&webhooks);
    for (host, source) in [("10.244.1.5", "127.0.0.2:"), ("fd00:244::5", "[::1]:")] {
        crate::bed::until_seen(
            "the call is taken",
            || call(host),
            |seen| seen.answer.starts_with(&format!("target {source}")),
        );
    }
    let shown = text(&run(&mut bed.command(&["status"])));
    for webhook in WEBHOOKS {
        assert!(shown.contains(&format!("  webhook    {webhook}\n")), "{shown}");
    }
    relay.kill();
    assert_eq!(call("10.244.1.5").error, "ECONNREFUSED");
    run(&mut bed.command(&["detach"]));
    let_go("target 10.244.1.1:", || call("10.244.1.5"));
}

#[test]
fn a_relay_beats_for_pods_of_its_own_network_namespace_only() {
    let bed = Bed::new();
    bed.namespace("b");
    let mut ages = Vec::new();
    // The other one first: when the relay has come to ours, it has passed by that.
    for (pod, suffix) in [("elsewhere", "b"), ("here", "")] {
        let pod = bed.cgroup(pod);
        let mut process = bed.inside(&pod, suffix, "cat");
        let process = process.stdin(std::process::Stdio::piped()).spawn().unwrap();
        ages.push(crate::bed::Process(process));
        let arguments = ["attach", "--target", TARGET, "--to", "15001", "--heartbeat", "60000"];
        run(bed.command(&arguments).arg("--cgroup").arg(&pod));
    }
    let namespaces = || ages.iter().map(|process| bed.network(process)).collect::<Vec<_>>();
    crate::bed::until("both are where they belong", || {
        let found = namespaces();
        found[0] != found[1] && !found.contains(&std::fs::read_link("/proc/self/ns/net").unwrap())
    });
    let _relay = bed.relay();
    let age = |at: usize| status(&bed)["attachments"][at]["heartbeat_age"].as_f64();
    crate::bed::until("the relay beats", || age(1).is_some());
    assert_eq!(age(0), None, "it beats for a pod of another namespace");
}

#[test]
fn a_relay_takes_sockets_for_ipv6_only() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    run(attach(&bed, &[]).args(["--target", TARGET_V6]));
    let mut process = bed.inside(&pod, "", "cat");
    let process = process.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let _process = crate::bed::Process(process);
    let mut relay = bed.relay();
    let _target = bed.target(TARGET_V6);
    crate::bed::until("native IPv6 goes to the relay", || status(&bed)["attachments"][0]["ipv6"] == true);
    let seen = bed.connect(&pod, TARGET_V6, "v6only");
    assert!(seen.answer.starts_with("target ") && seen.peer == TARGET_V6, "{seen:?}");
    assert_ne!(seen.answer, format!("target {}", seen.local), "relayed, not direct");
    let text = text(&run(&mut bed.command(&["status"])));
    assert!(text.contains("fails closed, checks port, IPv6 natively"), "{text}");
    assert_eq!(bed.local_routes().matches("fd63:746c:6d65:7368::/64").count(), 1);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(relay.0.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(relay.0.wait().unwrap().success());
    assert_eq!(status(&bed)["attachments"][0]["ipv6"], false, "nothing is sent along the route");
}

#[test]
fn a_relay_relays_nothing_from_outside_the_pod() {
    let bed = Bed::new();
    bed.wire("b");
    let attach = ["attach", "--target", TARGET, "--to", "15001", "--cgroup"];
    run(bed.command(&attach).arg(bed.cgroup("pod")));
    let _relay = bed.relay();
    let _target = bed.target(TARGET);
    bed.ip("b", "-6 route add fd63:746c:6d65:7368::/64 via fd00:244::5");
    let outside = bed.cgroup("outside");
    // The first target's address, as a process of the pod could dial it.
    let address = "fd63:746c:6d65:7368::1";
    crate::bed::until("from inside it leads to the target", || {
        let seen = bed.connect(&outside, &format!("[{address}]:15001"), "blocking");
        seen.answer.starts_with("target ")
    });
    let seen: ClientReport = bed.client_in("b", &outside, &["once", address, "15001"]);
    assert_eq!((seen.answer.as_str(), seen.error.as_str()), ("", ""), "{seen:?}");
}

#[test]
fn a_relay_without_room_for_another_connection_goes_on() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    run(&mut attach(&bed, &[]));
    let mut command = bed.inside(&bed.cgroup("relay"), "", "prlimit");
    command.args(["--nofile=24:24", env!("CARGO_BIN_EXE_ctrlmesh-proxy"), "intercept"]);
    command.arg("--pin-dir").arg(bed.pins()).args(["run", "--to", "15001"]);
    command.env("RUST_LOG", "warn").env("NO_COLOR", "1").stderr(std::process::Stdio::piped());
    let mut relay = crate::bed::Process(command.spawn().unwrap());
    let mut lines = {
        use std::io::BufRead as _;
        std::io::BufReader::new(relay.0.stderr.take().unwrap()).lines().map_while(Result::ok)
    };
    bed.listening(PROXY);
    let _target = bed.target(TARGET);
    let holding = bed.hold(&pod, TARGET, 40);
    let line = lines.find(|line| line.contains("no room for another connection"));
    assert!(line.unwrap().contains("refused=1"));
    drop(holding);
    crate::bed::until("there is room again", || bed.connect(&pod, TARGET, "blocking").answer.starts_with("target "));
    assert!(relay.0.try_wait().unwrap().is_none(), "the relay ended");
}
