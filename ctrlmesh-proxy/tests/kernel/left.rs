//! State that stays or goes when something was removed.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Stdio;

use ctrlmesh_intercept::{Error, Interceptor, Limits, Options};

use crate::bed::{Bed, ClientReport, PROXY, Process, TARGET, until, until_seen};
use crate::command::{attach, is_let_go, run, status, text};

#[test]
fn a_node_releases_its_pods_beside_a_dead_one_of_another() {
    let bed = Bed::new();
    run(&mut attach(&bed, &[]));
    fs::remove_dir(bed.cgroup("pod")).unwrap();
    let pods = ["a", "b"].map(|name| bed.cgroup(name));
    let mut node = Interceptor::open(bed.options("node")).unwrap();
    let proxies = pods.each_ref().map(|pod| {
        let port = PROXY + u16::from(pod.ends_with("b"));
        bed.enrol(&mut node, &ctrlmesh_intercept::Attach { port, ..bed.attach(pod) })
    });
    drop(proxies);
    let error = ctrlmesh_intercept::uninstall(&bed.options("node"), false).unwrap_err();
    assert!(matches!(&error, Error::Others { owner, .. } if owner == "cli"), "{error}");
    let left = status(&bed)["attachments"].as_array().unwrap().clone();
    assert_eq!((left.len(), &left[0]["owner"]), (1, &"cli".into()));
    let _target = bed.target(TARGET);
    for pod in &pods {
        is_let_go(&bed, pod);
        let member = format!("cgroups/{}", fs::metadata(pod).unwrap().ino());
        assert!(fs::symlink_metadata(bed.pins().join(member)).is_err());
    }
    // The maps are the same, and whoever has them open goes on with them.
    node.attach(&bed.attach(&pods[0])).unwrap();
    assert_eq!(bed.connect(&pods[0], TARGET, "blocking").error, "ECONNREFUSED");
    run(&mut bed.command(&["detach"]));
    ctrlmesh_intercept::uninstall(&bed.options("node"), false).unwrap();
    assert!(!bed.pins().exists());
}

#[test]
fn a_folder_outside_a_bpf_file_system_is_not_uninstalled() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let own = folder.path().join("maps");
    fs::create_dir(&own).unwrap();
    let uninstall =
        |pins: &Path| ctrlmesh_intercept::uninstall(&Options { pins: pins.to_owned(), ..Options::new("test") }, true);
    let error = uninstall(folder.path()).unwrap_err();
    assert!(matches!(error, Error::NoBpffs { .. }), "{error}");
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().flatten().collect();
    assert!(names.len() == 1 && names[0].path() == own, "{names:?}");
    uninstall(&folder.path().join("absent")).unwrap();
}

#[test]
fn half_made_leftovers_of_a_loader_are_uninstalled_too() {
    let bed = Bed::new();
    bed.interceptor().attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    std::os::unix::fs::symlink("2", bed.pins().join("next-next")).unwrap();
    ctrlmesh_intercept::uninstall(&bed.options("test"), false).unwrap();
    assert!(!bed.pins().exists());
}

#[test]
fn a_gone_cgroup_is_detached_by_its_name() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let hierarchy = ctrlmesh_intercept::cgroup::Hierarchy::find().unwrap();
    let name = pod.strip_prefix(hierarchy.mount()).unwrap();
    for name in [name, &Path::new("/").join(name), &pod] {
        fs::create_dir_all(&pod).unwrap();
        run(bed.command(&["attach", "--target", TARGET, "--to", "15001", "--cgroup"]).arg(name));
        fs::remove_dir(&pod).unwrap();
        run(bed.command(&["detach", "--cgroup"]).arg(name));
        assert_eq!(status(&bed)["attachments"], serde_json::json!([]));
    }
}

#[test]
fn a_closed_pod_that_failed_to_attach_is_found_again() {
    let bed = Bed::new();
    let (first, closed) = (bed.cgroup("first"), bed.cgroup("closed"));
    let limits = Limits { pods: Some(1), ..Limits::default() };
    let options = Options { limits, ..bed.options("cli") };
    let mut interceptor = Interceptor::open(options).unwrap();
    let full = |interceptor: &mut Interceptor| {
        let error = interceptor.attach(&bed.attach(&closed)).unwrap_err();
        assert!(matches!(error, Error::Full { .. }), "{error}");
    };
    interceptor.attach(&bed.attach(&first)).unwrap();
    full(&mut interceptor);
    interceptor.detach(&first).unwrap();
    let mut stranger = bed.attach(&closed);
    stranger.except = vec![first.clone()];
    let error = interceptor.attach(&stranger).unwrap_err();
    assert!(matches!(error, Error::NotBelow { .. }), "{error}");
    interceptor.attach(&bed.attach(&first)).unwrap();
    // Not a second time.
    full(&mut interceptor);
    assert_eq!(interceptor.status().unwrap().attachments.len(), 2);
    let mut other = Interceptor::open(bed.options("other")).unwrap();
    assert!(matches!(other.attach(&bed.attach(&closed)), Err(Error::Owned { .. })));
    let detached = text(&run(&mut bed.command(&["detach"])));
    assert_eq!(detached, format!("detached {}\ndetached {}\n", closed.display(), first.display()));
    let _target = bed.target(TARGET);
    is_let_go(&bed, &closed);
}

#[test]
fn a_loader_does_not_attach_with_maps_that_were_removed() {
    let bed = Bed::new();
    let mut before = bed.interceptor();
    ctrlmesh_intercept::uninstall(&bed.options("test"), false).unwrap();
    let after = bed.interceptor();
    let error = before.attach(&bed.attach(&bed.cgroup("pod"))).unwrap_err();
    assert!(matches!(error, Error::Replaced(_)), "{error}");
    assert!(after.status().unwrap().attachments.is_empty());
}

#[test]
fn a_relay_beats_for_its_owners_pods_only() {
    let bed = Bed::new();
    // Another owner's first: when the relay has come to ours, it has passed by that.
    for (owner, pod) in [("other", "a"), ("cli", "b")] {
        let arguments = ["attach", "--target", TARGET, "--to", "15001", "--heartbeat", "60000"];
        let mut command = bed.command(&arguments);
        run(command.args(["--owner", owner, "--cgroup"]).arg(bed.cgroup(pod)));
    }
    let _relay = bed.relay();
    let age = |at: usize| status(&bed)["attachments"][at]["heartbeat_age"].as_f64();
    until("the relay beats", || age(1).is_some());
    assert_eq!(age(0), None, "it beats for another owner's pod");
}

#[test]
fn a_relay_stops_taking_webhook_calls_it_no_longer_serves() {
    let bed = Bed::new();
    bed.wire("node");
    run(&mut attach(&bed, &[]));
    let pod = bed.cgroup("pod").display().to_string();
    let relay = bed.relay_with(&["--webhook", "10.244.1.5:9443", "--webhook", "10.244.1.5:9444", "--cgroup", &pod]);
    let taken = || status(&bed)["attachments"][0]["webhooks"].clone();
    until("both are taken", || taken().as_array().is_some_and(|taken| taken.len() == 2));
    relay.kill();
    let _servers = ["10.244.1.5:9443", "10.244.1.5:9444"].map(|address| bed.target(address));
    let relay = bed.relay_with(&["--webhook", "10.244.1.5:9443", "--cgroup", &pod]);
    until("one is given up", || taken() == serde_json::json!(["10.244.1.5:9443"]));
    let call =
        |port: &str| -> ClientReport { bed.client_in("node", &bed.cgroup("node"), &["once", "10.244.1.5", port]) };
    until_seen("it is relayed", || call("9443"), |seen| seen.answer.starts_with("target 127."));
    assert!(call("9444").answer.starts_with("target 10.244.1.1:"));
    relay.kill();
    assert_eq!(call("9443").error, "ECONNREFUSED");
    let _relay = bed.relay_with(&["--cgroup", &pod]);
    until("the other one is given up, too", || taken() == serde_json::json!([]));
    assert!(call("9443").answer.starts_with("target 10.244.1.1:"));
}

#[test]
fn a_relay_takes_no_webhook_calls_of_a_pod_that_is_elsewhere() {
    let bed = Bed::new();
    bed.namespace("b");
    run(&mut attach(&bed, &[]));
    let pod = bed.cgroup("pod");
    let process = Process(bed.inside(&pod, "b", "cat").stdin(Stdio::piped()).spawn().unwrap());
    let there = format!("net:[{}]", fs::metadata(bed.path("b")).unwrap().ino());
    until("it is there", || bed.network(&process) == Path::new(&there));
    let mut command = bed.inside(&bed.cgroup("relay"), "", env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
    command.args(["intercept", "--pin-dir"]).arg(bed.pins()).args(["run", "--to", "15001"]);
    command.args(["--webhook", "10.96.0.1:9443", "--cgroup"]).arg(&pod);
    let output = command.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = format!("no process of {} is in network namespace", pod.display());
    assert!(!output.status.success() && error.contains(&expected), "{error}");
    assert_eq!(status(&bed)["attachments"][0]["webhooks"], serde_json::json!([]));
}
