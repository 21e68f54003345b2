//! Interception survives the ends and upgrades of proxy and loader.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use aya::programs::links::{FdLink, PinnedLink};

use crate::bed::{Bed, ConnectCounts, PROXY, Process, TARGET, count, counted, until};
use crate::older::{LimitedBuild, once_written};
use ctrlmesh_intercept::{Error, Interceptor, ListenerCheck, Slot, listener};

/// The id of a pinned link, and of its program.
pub(crate) fn linked(path: &Path) -> (u32, u32) {
    let info = FdLink::from(PinnedLink::from_pin(path).unwrap()).info().unwrap();
    (info.id(), info.program_id())
}

/// Programs that are attached at a cgroup, and how many kinds of them, as the kernel says.
fn attached(cgroup: &Path) -> (usize, usize) {
    let mut command = Command::new("bpftool");
    let output = command.args(["--json", "cgroup", "show"]).arg(cgroup).output().unwrap();
    // It prints nothing where there is none.
    let programs: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let kinds: BTreeSet<_> = programs.iter().map(|program| &program["attach_type"]).map(ToString::to_string).collect();
    (programs.len(), kinds.len())
}

#[test]
fn a_proxy_that_is_killed_and_restarted_is_never_bypassed() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    attach.listener = ListenerCheck::Port;
    interceptor.attach(&attach).unwrap();
    let _target = bed.target(TARGET);
    let client = bed.hammer(&pod, TARGET, "target 10.96.0.1:");
    let rounds = count(1000);
    for round in 0..rounds {
        let relay = bed.relay();
        let before = counted(&interceptor, "redirected");
        until("the client is redirected", || counted(&interceptor, "redirected") > before);
        if round % 2 == 0 {
            interceptor.upgrade().unwrap();
        }
        let before = counted(&interceptor, "no_listener_refused");
        relay.kill();
        until("the client is refused", || counted(&interceptor, "no_listener_refused") > before);
        if round % 2 == 1 {
            interceptor.upgrade().unwrap();
        }
    }
    let seen: ConnectCounts = client.finish();
    eprintln!("{rounds} restarts and upgrades: {seen:?}");
    assert_eq!(seen.direct, 0, "{seen:?}");
    // Every round began with a connection that was redirected and ended with one that was refused; one that the relay
    // had when it was killed is broken.
    assert!(seen.proxied >= 1 && seen.refused >= rounds as u64 && seen.errors.is_empty(), "{seen:?}");
    assert!(seen.proxied + seen.broken >= rounds as u64, "{seen:?}");
    bypassed(&bed, &mut interceptor, &pod);
}

/// The control of a test that found no direct connection: detached, the same client makes nothing but direct ones.
fn bypassed(bed: &Bed, interceptor: &mut Interceptor, pod: &Path) {
    interceptor.detach(pod).unwrap();
    // The kernel lets go of a link in a work queue of its own, some time after the pin is gone.
    until("the programs are detached", || attached(pod).0 == 0);
    let mut client = bed.hammer(pod, TARGET, "proxy ");
    client.line();
    let seen: ConnectCounts = client.finish();
    assert!(seen.direct >= 1, "{seen:?}");
    assert_eq!((seen.proxied, seen.refused, seen.broken), (0, 0, 0), "{seen:?}");
}

#[test]
fn a_loader_upgrade_under_load_loses_no_connection() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pod));
    let _target = bed.target(TARGET);
    let client = bed.hammer(&pod, TARGET, "proxy 0 10.96.0.1:443\n");
    for _ in 0..count(1000) {
        let before = counted(&interceptor, "redirected");
        interceptor.upgrade().unwrap();
        until("the client goes on", || counted(&interceptor, "redirected") > before);
    }
    let seen: ConnectCounts = client.finish();
    eprintln!("{} upgrades: {seen:?}", count(1000));
    assert_eq!((seen.direct, seen.refused, seen.broken, seen.errors.len()), (0, 0, 0, 0), "{seen:?}");
    assert!(seen.proxied > count(1000) as u64);
    bypassed(&bed, &mut interceptor, &pod);
}

#[test]
fn webhook_calls_under_an_upgrade_all_reach_the_proxy() {
    const WEBHOOK: &str = "10.244.1.5:9443";
    let bed = Bed::new();
    bed.wire("node");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    let address: SocketAddr = WEBHOOK.parse().unwrap();
    let listener = listener::inbound(&bed.net(), address.ip()).unwrap();
    interceptor.take_inbound(slot, &bed.net(), address, &listener).unwrap();
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    let _server = bed.target(WEBHOOK);
    let pin = bed.pins().join(format!("pods/{slot}/inbound"));
    let before = linked(&pin);
    let client = bed.hammer_in("node", &bed.cgroup("node"), WEBHOOK, "proxy unknown\n");
    for _ in 0..count(1000) {
        let before = counted(&interceptor, "inbound_taken");
        interceptor.upgrade().unwrap();
        until("the client goes on", || counted(&interceptor, "inbound_taken") > before);
    }
    let seen: ConnectCounts = client.finish();
    assert_eq!((seen.direct, seen.refused, seen.broken, seen.errors.len()), (0, 0, 0, 0), "{seen:?}");
    assert_eq!((counted(&interceptor, "inbound_refused"), seen.proxied > 0), (0, true));
    let after = linked(&pin);
    assert!(before.0 != after.0 && before.1 != after.1, "the program is still the old one");
}

#[test]
fn an_upgrade_reports_the_webhook_program_it_cannot_replace() {
    let bed = Bed::new();
    let pods = ["lost", "other"].map(|name| bed.cgroup(name));
    let mut interceptor = Interceptor::open(bed.options("cli")).unwrap();
    let [lost, _] = pods.each_ref().map(|pod| interceptor.attach(&bed.attach(pod)).unwrap());
    let net = bed.net();
    let address: SocketAddr = "10.96.0.1:9443".parse().unwrap();
    let listener = listener::inbound(&net, address.ip()).unwrap();
    interceptor.take_inbound(lost, &net, address, &listener).unwrap();
    drop(interceptor);
    bed.outdate(lost);
    // It lives, held by us, and no path leads to it any more.
    std::fs::remove_file(bed.pin(lost, "netns")).unwrap();
    std::os::unix::fs::symlink("/run/netns/none", bed.pin(lost, "netns")).unwrap();
    std::fs::remove_file(bed.pin(lost, "inbound-object")).unwrap();
    std::os::unix::fs::symlink("another", bed.pin(lost, "inbound-object")).unwrap();
    let output = bed.command(&["upgrade"]).output().unwrap();
    let (shown, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let expected = format!("no process of {} is in network namespace", pods[0].display());
    assert!(!output.status.success() && error.contains(&expected), "{error}");
    assert_eq!(shown, format!("upgraded {}\n", pods[1].display()));
}

#[test]
fn an_upgrade_goes_on_answering_so_original_dst() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    attach.listener = ListenerCheck::Port;
    interceptor.attach(&attach).unwrap();
    interceptor.answer_original_destination(&bed.cgroup("proxy")).unwrap();
    let command = &mut bed.peer("", &bed.cgroup("proxy"), &["proxy", &PROXY.to_string()]);
    let mut proxy = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(proxy.line(), "ready");
    for _ in 0..3 {
        interceptor.upgrade().unwrap();
        assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy {TARGET}"));
    }
}

#[test]
fn a_missing_hook_is_attached_again_when_the_loader_starts() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    attach.targets = attach.targets.and_of_pod(&["*:8443".parse().unwrap()]);
    let slot = interceptor.attach(&attach).unwrap();
    let address: SocketAddr = "10.96.0.1:9443".parse().unwrap();
    let listener = listener::inbound(&bed.net(), address.ip()).unwrap();
    interceptor.take_inbound(slot, &bed.net(), address, &listener).unwrap();
    drop(interceptor);
    let folder = bed.pins().join("pods").join(slot.to_string());
    let hooks = ["connect4", "connect6", "getpeername4", "getpeername6", "sock_release", "inbound"];
    for hook in hooks {
        std::fs::remove_file(folder.join(hook)).unwrap();
        drop(bed.interceptor());
        let links: BTreeSet<_> = hooks.iter().map(|hook| linked(&folder.join(hook))).collect();
        assert_eq!(links.len(), hooks.len(), "{hook} is missing");
        // Each is attached, and none twice, as soon as the kernel has taken apart what nobody holds any more.
        until(hook, || attached(&pod) == (5, 5));
    }
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn the_end_of_sockets_is_looked_at_only_in_pods_that_have_a_port_at_any_address() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&pod);
    let slot = interceptor.attach(&attach).unwrap();
    let pin = bed.pins().join(format!("pods/{slot}/sock_release"));
    assert!(!pin.exists() && attached(&pod) == (4, 4));
    let without = attach.targets.clone();
    attach.targets = without.and_of_pod(&["*:8443".parse().unwrap()]);
    assert_eq!(interceptor.attach(&attach).unwrap(), slot);
    assert!(pin.exists());
    until("each hook is there once", || attached(&pod) == (5, 5));
    // Connections of before may still be open.
    attach.targets = without;
    interceptor.attach(&attach).unwrap();
    assert!(pin.exists());
    interceptor.upgrade().unwrap();
    until("each hook is there once", || attached(&pod) == (5, 5));
    interceptor.detach(&pod).unwrap();
    until("no hook is there", || attached(&pod) == (0, 0));
}

#[test]
fn attaching_again_what_is_attached_replaces_no_link() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    let slot: Slot = interceptor.attach(&attach).unwrap();
    let pin = bed.pins().join(format!("pods/{slot}/connect4"));
    let before = linked(&pin);
    attach.fail_open = true;
    interceptor.attach(&attach).unwrap();
    assert_eq!(linked(&pin), before);
}

#[test]
fn interception_outlives_the_loader_and_the_next_adopts_it() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&pod)).unwrap();
    drop(interceptor);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
    let mut next = bed.interceptor();
    let _proxy = bed.enrol(&mut next, &bed.attach(&pod));
    assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy {slot} {TARGET}"));
    assert_eq!(counted(&next, "no_listener_refused"), 1, "the counters go on");
}

#[test]
fn a_starting_loader_replaces_programs_of_another_version() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let slot = bed.interceptor().attach(&bed.attach(&pod)).unwrap();
    let folder = bed.pins().join("pods").join(slot.to_string());
    let ours = std::fs::read_link(folder.join("object")).unwrap();
    let link = || linked(&folder.join("connect4")).0;
    let before = link();
    drop(bed.interceptor());
    assert_eq!(link(), before, "the same version is left alone");
    bed.outdate(slot);
    drop(bed.interceptor());
    assert_ne!(link(), before);
    assert_eq!(std::fs::read_link(folder.join("object")).unwrap(), ours);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn a_newer_version_brings_its_programs_without_a_cut() {
    let bed = Bed::new();
    let (pod, slot) = (bed.cgroup("pod"), Slot::new(0));
    let ours = Path::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy")).to_owned();
    let newer = LimitedBuild::version();
    let run = |program: &Path, arguments: &[&str]| {
        let plain = bed.command(arguments);
        let output = once_written(Command::new(program).args(plain.get_args()));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let cgroup = pod.display().to_string();
    let attach = ["attach", "--cgroup", &cgroup, "--target", TARGET, "--to", "15001"];
    run(&ours, &attach);
    let _relay = bed.relay();
    let _target = bed.target(TARGET);
    let client = bed.hammer(&pod, TARGET, "target 10.96.0.1:");
    let state = || {
        let object = std::fs::read_link(bed.pin(slot, "object")).unwrap();
        (linked(&bed.pin(slot, "connect4")).1, object)
    };
    let before = state();
    run(&newer.path(), &attach);
    let after = state();
    assert!(after.0 != before.0 && after.1 != before.1);
    // And back, by a relay that is started.
    let relay = bed.command(&["run", "--to", "15002"]);
    let mut other = bed.inside(&bed.cgroup("other"), "", ours.to_str().unwrap());
    let other = Process(other.args(relay.get_args()).spawn().unwrap());
    until("the relay has replaced them", || state().1 == before.1);
    assert_ne!(state().0, after.0);
    other.kill();
    assert_eq!(run(&newer.path(), &["upgrade"]), format!("upgraded {cgroup}\n"));
    assert_eq!(state().1, after.1);
    let seen: ConnectCounts = client.finish();
    let lost = (seen.direct, seen.refused, seen.broken, seen.errors.len());
    assert_eq!(lost, (0, 0, 0, 0), "{seen:?}");
    assert!(seen.proxied > 0);
}

#[test]
fn a_failed_replacement_of_one_pod_stops_no_other() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let [held, other] = ["held/pod", "other"].map(|name| interceptor.attach(&bed.attach(&bed.cgroup(name))).unwrap());
    crate::life::hold(&bed.cgroup("held"), &bed.pin(other, "connect4"));
    drop(interceptor);
    for slot in [held, other] {
        bed.outdate(slot);
    }
    let links = || [held, other].map(|slot| linked(&bed.pin(slot, "connect4")).0);
    let first = links();
    let mut next = bed.interceptor();
    let second = links();
    assert!(first[0] == second[0] && first[1] != second[1]);
    let error = next.upgrade().unwrap_err();
    assert!(matches!(error, Error::Exclusive { .. }), "{error}");
    let third = links();
    assert!(third[0] == second[0] && third[1] != second[1]);
    let _target = bed.target(TARGET);
    for pod in ["held/pod", "other"] {
        assert_eq!(bed.connect(&bed.cgroup(pod), TARGET, "blocking").error, "ECONNREFUSED");
    }
}

#[test]
fn a_cgroup_that_goes_while_programs_are_replaced_stops_nobody() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pods: Vec<_> = (0..60).map(|n| bed.cgroup(&format!("pod-{n}"))).collect();
    let slots: Vec<_> = pods.iter().map(|pod| interceptor.attach(&bed.attach(pod)).unwrap()).collect();
    let first = bed.pin(slots[0], "connect4");
    let before = linked(&first);
    std::thread::scope(|scope| {
        // The last ones, when the first has its new programs.
        let removing = scope.spawn(|| {
            until("the first is replaced", || linked(&first) != before);
            pods[10..].iter().rev().for_each(|pod| std::fs::remove_dir(pod).unwrap());
        });
        interceptor.upgrade().unwrap();
        removing.join().unwrap();
    });
    let mut swept = interceptor.sweep().unwrap();
    swept.sort();
    assert_eq!(swept, slots[10..]);
}

#[test]
fn the_next_loader_mends_what_a_crashed_one_left() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&pod)).unwrap();
    let folder = bed.pins().join("pods").join(slot.to_string());
    // It died after it had put the new program beside the old one, and before another hook was pinned.
    std::fs::rename(folder.join("connect4"), folder.join("connect4-next")).unwrap();
    std::fs::remove_file(folder.join("connect6")).unwrap();
    // And another time between making a slot and saying whose.
    std::fs::create_dir(bed.pins().join("pods/77")).unwrap();
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pod));
    interceptor.sweep().unwrap();
    let hooks = &interceptor.status().unwrap().attachments[0].hooks;
    assert_eq!(hooks.len(), 4, "{hooks:?}");
    assert!(!folder.join("connect4-next").exists() && !bed.pins().join("pods/77").exists());
    assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy {slot} {TARGET}"));
}
