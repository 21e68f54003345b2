//! Pods as seen by proxies that mount the cgroups at another place.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::{Attach, Error, Heartbeat, Interceptor, Slot, listener};

use crate::bed::{Bed, PROXY, TARGET};
use crate::command::{attach, run, status, text};
use crate::upgrade::linked;

/// Where cgroup v2 is on machines that have no other.
const V2_MOUNT: &str = "/sys/fs/cgroup";

/// What runs its arguments where the cgroups are seen at `at` only, as from a container.
pub(crate) fn elsewhere(at: &Path) -> Command {
    mounted(at, r#"mount --bind "$0" "$1" && umount --lazy "$0" && shift && exec "$@""#)
}

/// What runs its arguments where only the cgroups below `part` are seen, at `at`, as in a cgroup namespace of its own.
fn within(part: &Path, at: &Path) -> Command {
    let script = r#"mount --bind "$2" "$1" && umount --lazy "$0" && shift 2 && exec "$@""#;
    let mut command = mounted(at, script);
    command.arg(part);
    command
}

/// The same where they are seen at `at`, too.
fn beside(at: &Path) -> Command {
    mounted(at, r#"mount --bind "$0" "$1" && shift && exec "$@""#)
}

/// What runs its arguments as on a machine that has cgroup v2 only, where that is mounted there.
fn v2_only() -> Command {
    let script = r#"umount --recursive --lazy "$0" && mount -t cgroup2 cgroup2 "$0" && exec "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, V2_MOUNT]);
    command
}

fn mounted(at: &Path, script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).arg(Hierarchy::find().unwrap().mount()).arg(at);
    command
}

#[test]
fn another_owners_pods_stay_when_cgroups_are_elsewhere() {
    let bed = Bed::new();
    run(&mut attach(&bed, &["--owner", "other"]));
    let at = tempfile::tempdir().unwrap();
    let uninstall = bed.command(&["uninstall"]);
    let refused = |command: &mut Command| {
        let output = command.arg(uninstall.get_program()).args(uninstall.get_args()).output();
        let output = output.unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        let whose = error.contains("attached by `other`; nothing of this owner's");
        assert!(!output.status.success() && whose, "{error}");
        assert_eq!(status(&bed)["attachments"].as_array().unwrap().len(), 1);
    };
    refused(&mut elsewhere(at.path()));
    fs::remove_dir(bed.cgroup("pod")).unwrap();
    refused(&mut beside(at.path()));
    run(&mut bed.command(&["uninstall", "--force"]));
    assert!(!bed.pins().exists());
}

#[test]
fn a_pod_is_the_same_to_its_owner_who_sees_cgroups_elsewhere() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    run(&mut attach(&bed, &[]));
    let pin = bed.pin(Slot::new(0), "connect4");
    let before = linked(&pin);
    let at = tempfile::tempdir().unwrap();
    let there = |arguments: &[&str]| {
        let plain = bed.command(arguments);
        let command = &mut elsewhere(at.path());
        text(&run(command.arg(plain.get_program()).args(plain.get_args())))
    };
    let mount = Hierarchy::find().unwrap();
    let name = pod.strip_prefix(mount.mount()).unwrap();
    let seen = at.path().join(name).display().to_string();
    let shown = there(&["status"]);
    assert!(shown.contains(&format!("slot 0  {seen}\n")), "{shown}");
    let attach = ["attach", "--target", TARGET, "--to", "15001", "--cgroup", name.to_str().unwrap()];
    // It sweeps first.
    assert_eq!(there(&attach), format!("attached {seen} in slot 0\n"));
    assert_eq!(there(&attach), format!("attached {seen} in slot 0\n"));
    let mut interceptor = Interceptor::open(bed.options("cli")).unwrap();
    assert_eq!(interceptor.sweep().unwrap(), []);
    assert_eq!(interceptor.status().unwrap().attachments[0].cgroup, pod);
    assert_eq!(linked(&pin), before, "it was attached all the time");
    assert_eq!(there(&["detach"]), format!("detached {seen}\n"));
}

#[test]
fn a_machine_with_cgroup_v2_only_is_served() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mount = Hierarchy::find().unwrap();
    let name = pod.strip_prefix(mount.mount()).unwrap();
    let there = |arguments: &[&str]| {
        let plain = bed.command(arguments);
        text(&run(v2_only().arg(plain.get_program()).args(plain.get_args())))
    };
    let seen = Path::new(V2_MOUNT).join(name).display().to_string();
    let attach = ["attach", "--target", TARGET, "--to", "15001", "--cgroup", name.to_str().unwrap()];
    assert_eq!(there(&attach), format!("attached {seen} in slot 0\n"));
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED", "nobody listens at the port");
    let shown = there(&["status"]);
    assert!(shown.contains(&format!("slot 0  {seen}\n")), "{shown}");
    assert_eq!(there(&["detach"]), format!("detached {seen}\n"));
    assert!(bed.connect(&pod, TARGET, "blocking").answer.starts_with("target"));
}

#[test]
fn a_pod_that_is_not_to_be_seen_from_here_is_not_called_gone() {
    let bed = Bed::new();
    run(&mut attach(&bed, &[]));
    let (at, plain) = (tempfile::tempdir().unwrap(), bed.command(&["status"]));
    let elsewhere = &mut within(&bed.cgroup("part"), at.path());
    let shown = text(&run(elsewhere.arg(plain.get_program()).args(plain.get_args())));
    assert!(shown.contains(" (not to be seen from here)\n"), "{shown}");
    fs::remove_dir(bed.cgroup("pod")).unwrap();
    let shown = text(&run(&mut bed.command(&["status"])));
    assert!(shown.contains(" (gone; `detach` sweeps it)\n"), "{shown}");
    assert_eq!(status(&bed)["attachments"][0]["gone"], true);
}

#[test]
fn a_cgroup_has_one_name_by_any_mount_and_no_root_is_taken() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let at = tempfile::tempdir().unwrap();
    let mount = Hierarchy::find().unwrap();
    let there = |cgroup: &Path| {
        let plain = bed.command(&["attach", "--target", TARGET, "--to", "15001", "--cgroup"]);
        let command = &mut beside(at.path());
        command.arg(plain.get_program()).args(plain.get_args()).arg(cgroup).output().unwrap()
    };
    for root in [at.path(), mount.mount()] {
        let error = String::from_utf8(there(root).stderr).unwrap();
        let expected = format!("{} is the root of all cgroups", root.display());
        assert!(error.contains(&expected), "{error}");
    }
    assert!(!bed.pins().exists());
    let output = there(&at.path().join(pod.strip_prefix(mount.mount()).unwrap()));
    assert_eq!(text(&output), format!("attached {} in slot 0\n", pod.display()));
}

#[test]
fn a_partial_view_of_cgroups_sweeps_no_pod_outside_it() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    run(&mut attach(&bed, &[]));
    bed.cgroup("part/inner");
    let at = tempfile::tempdir().unwrap();
    let there = |arguments: &[&str]| {
        let plain = bed.command(arguments);
        let command = &mut within(&bed.cgroup("part"), at.path());
        text(&run(command.arg(plain.get_program()).args(plain.get_args())))
    };
    // It sweeps first.
    let attached = there(&["attach", "--target", TARGET, "--to", "15001", "--cgroup", "inner"]);
    assert_eq!(attached, format!("attached {}/inner in slot 1\n", at.path().display()));
    assert_eq!(status(&bed)["attachments"].as_array().unwrap().len(), 2);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn a_proxy_goes_on_beside_a_pod_in_another_cgroup_mount() {
    let bed = Bed::new();
    let heartbeat = Heartbeat { number: None, max_age: Duration::from_hours(1) };
    let attach = Attach { heartbeat: Some(heartbeat), ..bed.attach(&bed.cgroup("pod")) };
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&attach).unwrap();
    let at = tempfile::tempdir().unwrap();
    let plain = bed.command(&["upgrade", "--owner", "test"]);
    let output = run(elsewhere(at.path()).arg(plain.get_program()).args(plain.get_args()));
    assert!(text(&output).starts_with(&format!("upgraded {}", at.path().display())));
    let number = u32::from(slot.get());
    interceptor.beat(number).unwrap();
    let listener = listener::outbound(&bed.net(), PROXY).unwrap();
    interceptor.listen(slot, &listener).unwrap();
    let address = "10.96.0.1:9443".parse().unwrap();
    let inbound = listener::inbound(&bed.net(), "10.96.0.1".parse().unwrap()).unwrap();
    interceptor.take_inbound(slot, &bed.net(), address, &inbound).unwrap();
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    assert!(bed.connect(&attach.cgroup, TARGET, "blocking").answer.starts_with("proxy"));
    fs::remove_dir(&attach.cgroup).unwrap();
    assert!(matches!(interceptor.beat(number), Err(Error::NotYours { .. })));
}
