//! The client and the proxy see the original destination.

use std::process::Stdio;

use crate::bed::{Bed, ClientReport, PROXY, Process, TARGET, TARGET_V6, targets, until_seen};
use crate::sockets::passive_fast_opens;
use ctrlmesh_intercept::{Interceptor, ListenerCheck, Slot};

/// A proxy that is not ours: it asks for `SO_ORIGINAL_DST`, as the world's proxies do.
fn foreign(bed: &Bed, interceptor: &mut Interceptor) -> Process {
    let proxy = foreign_over_ipv4(bed, interceptor);
    interceptor.serve_ipv6(Slot::new(0), &bed.net()).unwrap();
    proxy
}

fn foreign_over_ipv4(bed: &Bed, interceptor: &mut Interceptor) -> Process {
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.listener = ListenerCheck::Port;
    attach.targets = targets(&[TARGET, TARGET_V6, "10.97.0.0/16:443", "[fd00:97::/112]:443"]);
    interceptor.attach(&attach).unwrap();
    interceptor.answer_original_destination(&bed.cgroup("proxy")).unwrap();
    let command = &mut bed.peer("", &bed.cgroup("proxy"), &["proxy", &PROXY.to_string()]);
    let mut proxy = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(proxy.line(), "ready");
    proxy
}

#[test]
fn so_original_dst_shows_the_original_in_both_families() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let _proxy = foreign_over_ipv4(&bed, &mut interceptor);
    let pod = bed.cgroup("pod");
    for native in [false, true] {
        if native {
            interceptor.serve_ipv6(Slot::new(0), &bed.net()).unwrap();
        }
        for target in [TARGET, TARGET_V6, "10.97.3.7:443", "[fd00:97::9]:443"] {
            let seen = bed.connect(&pod, target, "blocking");
            assert_eq!(seen.answer, format!("proxy {target}"), "{seen:?}");
        }
    }
    for target in [TARGET_V6, "[fd00:97::9]:443"] {
        let seen = bed.connect(&pod, target, "v6only");
        assert_eq!((&seen.answer, &*seen.peer), (&format!("proxy {target}"), target));
    }
    assert_eq!(bed.connect(&pod, "[::ffff:10.96.0.1]:443", "blocking").answer, format!("proxy {TARGET}"));
    assert_eq!(bed.connect(&pod, "127.0.0.1:15001", "blocking").answer, "proxy unknown", "it was not redirected");
}

#[test]
fn the_command_answers_a_foreign_proxy_for_as_long_as_it_runs() {
    let bed = Bed::new();
    let (pod, proxy) = (bed.cgroup("pod"), bed.cgroup("proxy"));
    let attach = &mut bed.command(&["attach", "--target", TARGET, "--to", "15001", "--cgroup"]);
    assert!(attach.arg(&pod).status().unwrap().success());
    let answer = &mut bed.command(&["answer", "--cgroup"]);
    let mut answer = Process(answer.arg(&proxy).stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(answer.line(), format!("SO_ORIGINAL_DST is answered in {}", proxy.display()));
    let command = &mut bed.peer("", &proxy, &["proxy", &PROXY.to_string()]);
    let mut process = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(process.line(), "ready");
    assert_eq!(bed.connect(&pod, TARGET, "blocking").answer, format!("proxy {TARGET}"));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(answer.0.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(answer.0.wait().unwrap().success());
    let connect = || bed.connect(&pod, TARGET, "blocking");
    until_seen("nobody answers", connect, |seen| seen.answer == "proxy unknown");
}

#[test]
fn tcp_fast_open_with_a_cookie_shows_the_original() {
    let bed = Bed::new();
    bed.net().run(|| std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3")).unwrap().unwrap();
    let mut interceptor = bed.interceptor();
    let _proxy = foreign(&bed, &mut interceptor);
    for how in ["fastopen", "fastopen", "fastopen", "fastopenconnect", "fastopenconnect"] {
        let seen = bed.connect(&bed.cgroup("pod"), TARGET, how);
        assert_eq!((seen.answer, &*seen.peer), (format!("proxy {TARGET}"), TARGET), "{how}");
    }
    let taken = passive_fast_opens(&bed);
    assert!(taken >= 3, "too few SYNs carried data: the test tests nothing");
}

#[test]
fn getpeername_shows_the_original_to_the_client() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.targets = targets(&[TARGET, TARGET_V6, "10.97.0.0/16:443", "[fd00:97::/112]:443"]);
    let _proxy = bed.enrol(&mut interceptor, &attach);
    // An address of ours that leads nowhere stays as it is.
    let other = "127.64.0.1:9000";
    let _server = bed.target(other);
    for target in [TARGET, TARGET_V6, "10.97.3.7:443", "[fd00:97::9]:443", "[::ffff:10.96.0.1]:443", other] {
        let seen: ClientReport = bed.connect(&bed.cgroup("pod"), target, "blocking");
        assert_eq!(seen.peer, target, "{seen:?}");
    }
    for target in [TARGET_V6, "[fd00:97::9]:443"] {
        assert_eq!(bed.connect(&bed.cgroup("pod"), target, "v6only").peer, target);
    }
}

#[test]
fn a_connection_is_still_explained_after_its_target_is_gone() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    let proxy = bed.enrol(&mut interceptor, &attach);
    attach.targets = targets(&["10.97.3.7:443"]);
    interceptor.attach(&attach).unwrap();
    let originals = interceptor.originals().unwrap();
    let local = |index| std::net::SocketAddr::from(([127, 64, 0, index], PROXY));
    let peer = std::net::SocketAddr::from(([127, 0, 0, 1], 40_000));
    let known: Vec<String> = (1..=3)
        .filter_map(|index| originals.find(local(index), peer).unwrap())
        .map(|found| found.target.to_string())
        .collect();
    assert_eq!(known.len(), 3, "{known:?}");
    assert!(known.contains(&TARGET.to_owned()) && known.contains(&"10.97.3.7:443".to_owned()), "{known:?}");
    assert_eq!(bed.connect(&bed.cgroup("pod"), "10.97.3.7:443", "blocking").answer, "proxy 0 10.97.3.7:443");
    drop(proxy);
}
