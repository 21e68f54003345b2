//! The least privilege that is enough.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::bed::{Bed, PROXY, Process, TARGET, until};
use crate::older::{LimitedBuild, once_written};
use ctrlmesh_intercept::listener::{self, Namespace};
use ctrlmesh_intercept::{Interceptor, Options, Slot, Status};

/// What every command needs, and no more.
const THREE: &str = "-all,+bpf,+net_admin,+perfmon";

/// Our binary with no capability but these.
fn with(bed: &Bed, capabilities: &str, arguments: &[&str]) -> Output {
    limited(bed, capabilities, arguments).output().unwrap()
}

fn limited(bed: &Bed, capabilities: &str, arguments: &[&str]) -> Command {
    let plain = bed.command(arguments);
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", capabilities, "--inh-caps", capabilities, "--no-new-privs"]);
    command.arg(plain.get_program()).args(plain.get_args());
    command
}

fn attach(pod: &str) -> [&str; 7] {
    ["attach", "--cgroup", pod, "--target", TARGET, "--to", "15001"]
}

#[test]
fn three_capabilities_are_enough() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod").display().to_string();
    // On a machine where nobody has attached anything yet.
    assert!(!bed.pins().exists());
    let attach = attach(&pod);
    let all: [&[&str]; 6] = [&attach, &["status"], &attach, &["upgrade"], &["detach"], &["uninstall"]];
    for arguments in all {
        let output = with(&bed, THREE, arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        if arguments == ["status"] {
            let _target = bed.target(TARGET);
            assert_eq!(bed.connect(&bed.cgroup("pod"), TARGET, "blocking").error, "ECONNREFUSED");
        }
    }
}

#[test]
fn memory_that_nobody_may_lock_is_no_error() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod").display().to_string();
    // Since Linux 5.11 maps are accounted to a cgroup, and nothing is locked. Without CAP_SYS_RESOURCE the limit stays.
    let all: [&[&str]; 4] = [&attach(&pod), &["status"], &["upgrade"], &["uninstall"]];
    for arguments in all {
        let plain = limited(&bed, THREE, arguments);
        let mut command = Command::new("prlimit");
        command.arg("--memlock=0:0").arg(plain.get_program()).args(plain.get_args());
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
    }
}

#[test]
fn three_capabilities_are_enough_to_answer_a_foreign_proxy() {
    let bed = Bed::new();
    let proxy = bed.cgroup("proxy");
    let mut answer = limited(&bed, THREE, &["answer", "--cgroup"]);
    let mut answer = Process(answer.arg(&proxy).stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(answer.line(), format!("SO_ORIGINAL_DST is answered in {}", proxy.display()));
}

#[test]
fn whoever_may_not_touch_the_pins_is_told_whose_they_are() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod").display().to_string();
    bed.interceptor().attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    let binary = LimitedBuild::with(|_| {});
    let attach = attach(&pod);
    let all: [&[&str]; 5] = [&attach, &["status"], &["upgrade"], &["detach"], &["uninstall"]];
    for arguments in all {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(binary.path());
        let output = once_written(command.args(bed.command(arguments).get_args()));
        let error = String::from_utf8(output.stderr).unwrap();
        let whose = "pins are root's (0700): run as their owner";
        assert!(!output.status.success() && error.contains(whose), "{arguments:?}: {error}");
        assert!(!error.contains("CAP_"), "{arguments:?}: {error}");
    }
    assert_eq!(Status::read(&bed.pins()).unwrap().attachments.len(), 1);
}

#[test]
fn each_of_the_three_is_needed_and_named_when_missing() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod").display().to_string();
    for (given, missing) in [
        ("-all,+net_admin,+perfmon", "CAP_BPF"),
        ("-all,+bpf,+perfmon", "CAP_NET_ADMIN"),
        ("-all,+bpf,+net_admin", "CAP_PERFMON"),
        ("-all", "CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF"),
    ] {
        // Fresh pins: what exists could be opened with less.
        drop(std::fs::remove_dir_all(bed.pins()));
        let output = with(&bed, given, &attach(&pod));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{given} is enough");
        assert!(error.contains(&format!("not permitted; missing {missing}\n")), "{given}: {error}");
    }
    assert!(!bed.pins().join("pods/0/connect4").exists());
}

#[test]
fn entering_a_pods_namespace_takes_one_more_and_it_is_named() {
    let bed = Bed::new();
    for (given, enough) in
        [("-all,+bpf,+net_admin,+perfmon", false), ("-all,+bpf,+net_admin,+perfmon,+sys_admin", true)]
    {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", given, "--inh-caps", given]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", "privilege::listens_in_the_namespace_of_the_environment"]);
        let output = command.env("CTRLMESH_TEST_NAMESPACE", bed.path("")).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), enough, "{text}");
        assert_eq!(text.contains("not permitted; missing CAP_SYS_ADMIN"), !enough, "{text}");
    }
}

#[test]
fn making_our_prefix_local_takes_net_admin_and_it_is_named() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    interceptor.attach(&bed.attach(&pod)).unwrap();
    for (given, enough) in
        [("-all,+bpf,+perfmon,+sys_admin", false), ("-all,+bpf,+net_admin,+perfmon,+sys_admin", true)]
    {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", given, "--inh-caps", given]);
        command.arg(std::env::current_exe().unwrap()).args([
            "--exact",
            "--nocapture",
            "privilege::makes_our_prefix_local_in_the_namespace_of_the_environment",
        ]);
        command.env("CTRLMESH_TEST_NAMESPACE", bed.path(""));
        let output = command.env("CTRLMESH_TEST_PINS", bed.pins()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), enough, "{text}");
        let refused =
            text.contains("make our IPv6 prefix local in ") && text.contains("not permitted; missing CAP_NET_ADMIN");
        assert_eq!(refused, !enough, "{text}");
        assert_eq!(interceptor.status().unwrap().attachments[0].ipv6, enough);
    }
}

#[test]
fn a_beat_for_another_users_pod_takes_ptrace_and_it_is_named() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let attach = ["attach", "--target", TARGET, "--to", "15001", "--heartbeat", "60000"];
    assert!(bed.command(&attach).arg("--cgroup").arg(&pod).status().unwrap().success());
    let _operator = bed.nobody(&pod, "");
    for (given, enough) in
        [("-all,+bpf,+net_admin,+perfmon", false), ("-all,+bpf,+net_admin,+perfmon,+sys_ptrace", true)]
    {
        let plain = bed.command(&["run", "--to", "15001"]);
        let mut command = bed.inside(&bed.cgroup("relay"), "", "setpriv");
        command.args(["--bounding-set", given, "--inh-caps", given]);
        command.arg(plain.get_program()).args(plain.get_args());
        let log = tempfile::NamedTempFile::new().unwrap();
        command.env("RUST_LOG", "warn").env("NO_COLOR", "1").stderr(log.reopen().unwrap());
        let _relay = Process(command.spawn().unwrap());
        let age = || {
            let status = Status::read(&bed.pins()).unwrap();
            status.attachments[0].heartbeat_age
        };
        if enough {
            until("the relay beats", || age().is_some());
            continue;
        }
        let said = || std::fs::read_to_string(log.path()).unwrap();
        until("the relay says what it lacks", || said().contains("no beat for a pod"));
        assert!(said().contains("not permitted; missing CAP_SYS_PTRACE"), "{}", said());
        assert_eq!(age(), None, "it beats for a pod that it cannot see");
    }
}

#[test]
fn another_user_with_ptrace_finds_a_webhook_program() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&pod)).unwrap();
    let webhook: SocketAddr = "10.96.0.1:9443".parse().unwrap();
    let listener = listener::inbound(&bed.net(), webhook.ip()).unwrap();
    let (first, second) = (bed.nobody(&pod, ""), bed.nobody(&pod, ""));
    let path = PathBuf::from(format!("/proc/{}/ns/net", first.0.id()));
    let namespace = Namespace::open(&path).unwrap();
    interceptor.take_inbound(slot, &namespace, webhook, &listener).unwrap();
    drop(first);
    drop(interceptor);
    let object = bed.pins().join(format!("pods/{slot}/inbound-object"));
    for (given, enough) in
        [("-all,+bpf,+net_admin,+perfmon", false), ("-all,+bpf,+net_admin,+perfmon,+sys_ptrace", true)]
    {
        std::fs::remove_file(&object).unwrap();
        std::os::unix::fs::symlink("another", &object).unwrap();
        let output = with(&bed, given, &["--owner", "test", "detach", "--cgroup", "/nowhere"]);
        let replaced = std::fs::read_link(&object).unwrap() != Path::new("another");
        assert_eq!(replaced, enough, "{}", String::from_utf8_lossy(&output.stderr));
    }
    drop(second);
}

/// The part of the child in the test above; by itself it does nothing.
#[test]
fn makes_our_prefix_local_in_the_namespace_of_the_environment() {
    let Some(pins) = std::env::var_os("CTRLMESH_TEST_PINS") else { return };
    let namespace = std::env::var_os("CTRLMESH_TEST_NAMESPACE").unwrap();
    let namespace = Namespace::open(namespace.as_ref()).unwrap();
    let options = Options { pins: pins.into(), ..Options::new("test") };
    let served =
        Interceptor::open(options).and_then(|mut interceptor| interceptor.serve_ipv6(Slot::new(0), &namespace));
    if let Err(error) = served {
        panic!("{error}");
    }
}

/// The part of the child in the test above; by itself it does nothing.
#[test]
fn listens_in_the_namespace_of_the_environment() {
    let Some(path) = std::env::var_os("CTRLMESH_TEST_NAMESPACE") else { return };
    let namespace = Namespace::open(path.as_ref()).unwrap();
    if let Err(error) = listener::outbound(&namespace, PROXY) {
        panic!("{error}");
    }
}
