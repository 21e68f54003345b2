//! How little privilege is enough?

use std::process::{Command, Output};

use crate::bed::{Bed, PROXY, TARGET};
use ctrlmesh_proxy::intercept::listener::{self, Namespace};
use ctrlmesh_proxy::intercept::{Interceptor, Options, Slot};

/// Our binary with no capability but these.
fn with(bed: &Bed, capabilities: &str, arguments: &[&str]) -> Output {
    let plain = bed.command(arguments);
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", capabilities, "--inh-caps", capabilities, "--no-new-privs"]);
    command.arg(plain.get_program()).args(plain.get_args()).output().unwrap()
}

fn attach(pod: &str) -> [&str; 7] {
    ["attach", "--cgroup", pod, "--target", TARGET, "--to", "15001"]
}

#[test]
fn three_capabilities_are_enough() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod").display().to_string();
    // The folders must be root's, and the file system mounted, by whoever prepares the node.
    drop(bed.interceptor());
    let all: [&[&str]; 4] = [&attach(&pod), &["status"], &attach(&pod), &["detach"]];
    for arguments in all {
        let output = with(&bed, "-all,+bpf,+net_admin,+perfmon", arguments);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        if arguments == ["status"] {
            let _target = bed.target(TARGET);
            assert_eq!(bed.connect(&bed.cgroup("pod"), TARGET, "blocking").error, "ECONNREFUSED");
        }
    }
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
    for (given, enough) in [
        ("-all,+bpf,+net_admin,+perfmon", false),
        ("-all,+bpf,+net_admin,+perfmon,+sys_admin", true),
    ] {
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set", given, "--inh-caps", given])
            .arg(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "--nocapture",
            "privilege::listens_in_the_namespace_of_the_environment",
        ]);
        let output = command.env("CTRLMESH_TEST_NAMESPACE", bed.path("")).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
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
    for (given, enough) in [
        ("-all,+bpf,+perfmon,+sys_admin", false),
        ("-all,+bpf,+net_admin,+perfmon,+sys_admin", true),
    ] {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", given, "--inh-caps", given]);
        command.arg(std::env::current_exe().unwrap()).args([
            "--exact",
            "--nocapture",
            "privilege::makes_our_prefix_local_in_the_namespace_of_the_environment",
        ]);
        command.env("CTRLMESH_TEST_NAMESPACE", bed.path(""));
        let output = command.env("CTRLMESH_TEST_PINS", bed.pins()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), enough, "{text}");
        let refused = text.contains("make our IPv6 prefix local in ")
            && text.contains("not permitted; missing CAP_NET_ADMIN");
        assert_eq!(refused, !enough, "{text}");
        assert_eq!(interceptor.status().unwrap().attachments[0].ipv6, enough);
    }
}

/// The part of the child in the test above; by itself it does nothing.
#[test]
fn makes_our_prefix_local_in_the_namespace_of_the_environment() {
    let Some(pins) = std::env::var_os("CTRLMESH_TEST_PINS") else { return };
    let namespace = std::env::var_os("CTRLMESH_TEST_NAMESPACE").unwrap();
    let namespace = Namespace::open(namespace.as_ref()).unwrap();
    let options = Options { pins: pins.into(), ..Options::new("test") };
    let served = Interceptor::open(options)
        .and_then(|mut interceptor| interceptor.serve_ipv6(Slot::new(0), &namespace));
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
