//! The control-plane bed itself: its programs are real, and nothing of it stays.
#![expect(clippy::large_futures, reason = "one per test, and never moved")]

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::fnv1a;
use ctrlmesh_testbed::{ControlPlane, Network, Options, folder_prefix, skipped};
use k8s_openapi::List;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;
use xtask::tools;

use crate::starter::Starter;

mod starter;

/// Tells a child of this very binary what to do; see [`starts_a_control_plane_for_its_parent`].
const ROLE: &str = "CTRLMESH_TESTBED_CHILD";

#[tokio::test]
async fn the_api_server_is_real_and_of_the_pinned_version() -> Result<()> {
    let client = ControlPlane::shared().client().await?;
    let version = client.apiserver_version().await?;
    let (release, _) = tools::KUBERNETES.rsplit_once('.').context("a patch release")?;
    assert_eq!(format!("v{}.{}", version.major, version.minor), release, "{version:?}");
    // Those of the user's own folder may be of another patch.
    match tools::assets() {
        Some(_) => ensure!(version.git_version.starts_with(&format!("{release}.")), "{version:?}"),
        None => assert_eq!(version.git_version, tools::KUBERNETES),
    }
    Ok(())
}

#[tokio::test]
async fn a_token_that_is_bound_to_a_pod_names_it() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("token").await?;
    let bound = plane.pod_token(&namespace, "operator-0", &["ctrlmesh"]).await?;
    let review = TokenReview {
        spec: TokenReviewSpec { token: bound.token, audiences: Some(vec!["ctrlmesh".to_owned()]) },
        ..TokenReview::default()
    };
    let answer = Api::all(plane.client().await?).create(&PostParams::default(), &review).await?;
    let user = answer.status.context("status")?.user.context("user")?;
    let extra = user.extra.context("extra")?;
    assert_eq!(extra["authentication.kubernetes.io/pod-name"], ["operator-0"]);
    assert_eq!(extra["authentication.kubernetes.io/pod-uid"], [bound.pod_uid]);
    Ok(())
}

#[tokio::test]
async fn what_is_asked_for_is_there() -> Result<()> {
    let options = Options {
        audit: true,
        feature_gates: vec!["ShardedListAndWatch=true".to_owned()],
        controller_manager: true,
        ..Options::default()
    };
    let plane = ControlPlane::start(&options)?;
    let client = plane.client().await?;
    let namespace = plane.namespace("full").await?;
    // Only a controller manager makes the default service account. That it works has been waited for.
    let default: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    default.get("default").await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    ctrlmesh_testbed::retry(|| accounts.get("default")).await?;
    let request = http::Request::get("/metrics").body(Vec::new())?;
    let metrics = client.request_text(request).await?;
    ensure!(metrics.contains(r#"kubernetes_feature_enabled{name="ShardedListAndWatch",stage="ALPHA"} 1"#));
    its_sharded_list_hashes_as_we_do(&client).await?;
    let audit = fs::read_to_string(plane.audit_log())?;
    ensure!(audit.lines().any(|line| line.contains(&namespace)), "the audit log does not name {namespace}");
    Ok(())
}

/// Asks for the lower half of all hashes, and for the upper one, among objects of a few namespaces.
async fn its_sharded_list_hashes_as_we_do(client: &Client) -> Result<()> {
    let spaces: Api<Namespace> = Api::all(client.clone());
    for name in ["shop", "pay", "ns-a", "ctrlmesh", "a", "b"] {
        let space = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        spaces.create(&PostParams::default(), &space).await?;
    }
    let all = ["shop", "pay", "ns-a", "ctrlmesh", "a", "b", "default", "kube-system"];
    for name in all {
        let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "hashed"}}))?;
        Api::namespaced(client.clone(), name).create(&PostParams::default(), &map).await?;
    }
    let half = 1 << 63;
    for (range, is_upper) in
        [("'0x0000000000000000', '0x8000000000000000'", false), ("'0x8000000000000000', '0x10000000000000000'", true)]
    {
        let selector = format!("shardRange(object.metadata.namespace, {range})").replace(' ', "%20");
        let path = format!("/api/v1/configmaps?fieldSelector=metadata.name%3Dhashed&shardSelector={selector}");
        let list: List<ConfigMap> = client.request(http::Request::get(path).body(Vec::new())?).await?;
        let theirs: BTreeSet<String> = list.items.into_iter().filter_map(|map| map.metadata.namespace).collect();
        let ours = all.iter().filter(|name| (fnv1a(name.as_bytes()) >= half) == is_upper);
        assert_eq!(theirs, ours.map(ToString::to_string).collect(), "{range}");
        ensure!(!theirs.is_empty() && theirs.len() < all.len(), "all are in one half");
    }
    Ok(())
}

#[tokio::test]
async fn two_control_planes_at_once_do_not_see_each_other() -> Result<()> {
    let other = ControlPlane::start(&Options::default())?;
    let namespace = other.namespace("other").await?;
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "here"}}))?;
    Api::namespaced(other.client().await?, &namespace).create(&PostParams::default(), &map).await?;
    let shared: Api<ConfigMap> = Api::namespaced(ControlPlane::shared().client().await?, &namespace);
    ensure!(shared.get_opt("here").await?.is_none());
    Ok(())
}

#[tokio::test]
async fn two_api_servers_share_one_etcd_and_a_service() -> Result<()> {
    let addresses = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
    let network = match Network::make(&addresses) {
        Ok(network) => network,
        Err(error) if tools::on_path("ip") => return Err(error),
        Err(error) => return Ok(skipped("two_api_servers_share_one_etcd_and_a_service", &format!("{error:#}"))?),
    };
    let _entered = network.enter()?;
    let audit_bodies = vec!["configmaps".to_owned()];
    let options = Options { audit: true, audit_bodies, addresses: addresses.to_vec(), ..Options::default() };
    let mut plane = ControlPlane::start(&options)?;
    let urls: Vec<String> = plane.urls().map(str::to_owned).collect();
    assert_eq!(urls, ["https://192.0.2.1:6443", "https://192.0.2.2:6443"]);
    let namespace = plane.namespace("two").await?;
    let first: Api<ConfigMap> = Api::namespaced(plane.client().await?, &namespace);
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "by-the-first"}}))?;
    first.create(&PostParams::default(), &map).await?;
    let second = plane.client_of(1).await?;
    let maps: Api<ConfigMap> = Api::namespaced(second.clone(), &namespace);
    let made = maps.get("by-the-first").await?;
    maps.delete("by-the-first", &DeleteParams::default()).await?;
    let slices: Api<EndpointSlice> = Api::namespaced(second, "default");
    let both = || async {
        let slice = slices.get("kubernetes").await?;
        let named: Vec<String> =
            slice.endpoints.into_iter().flatten().flat_map(|endpoint| endpoint.addresses).collect();
        ensure!(named == addresses.map(|address| address.to_string()), "{named:?}");
        Ok(())
    };
    ctrlmesh_testbed::retry(both).await?;
    plane.restart_apiserver_of(1, || Ok(()))?;
    let logs: Vec<String> = plane.audit_logs().map(fs::read_to_string).collect::<std::io::Result<_>>()?;
    let version = format!(r#""resourceVersion":"{}""#, made.metadata.resource_version.context("a version")?);
    ensure!(logs[0].contains(&version) && !logs[1].contains(r#""verb":"create","user":{"username":"admin""#));
    ensure!(logs[1].lines().any(|line| line.contains(r#""verb":"delete""#) && line.contains("by-the-first")));
    Ok(())
}

#[test]
fn nothing_is_left_when_a_control_plane_is_dropped() -> Result<()> {
    let plane = ControlPlane::start(&Options::default())?;
    let folder = plane.folder().to_owned();
    assert!(!processes_of(&folder)?.is_empty());
    drop(plane);
    assert_eq!(processes_of(&folder)?, Vec::<String>::new());
    assert!(!folder.exists());
    Ok(())
}

#[test]
fn nothing_is_left_when_the_process_is_killed_while_it_starts() -> Result<()> {
    for _ in 0..5 {
        let mut child = start("KILL")?;
        let prefix = folder_prefix(child.0.id());
        until("the folder to appear", || Ok(folders()?.iter().any(|name| name.starts_with(&prefix))))?;
        child.0.kill()?;
        child.0.wait()?;
        until("the folder to go", || Ok(!folders()?.iter().any(|name| name.starts_with(&prefix))))?;
    }
    Ok(())
}

#[test]
fn a_program_that_does_not_start_says_why() -> Result<()> {
    let assets = tempfile::tempdir()?;
    for (program, script) in
        [("etcd", "#!/bin/sh\necho 'as asked' >&2\nexit 1\n"), ("kube-apiserver", "#!/bin/sh\nexec sleep 60\n")]
    {
        fs::write(assets.path().join(program), script)?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(assets.path().join(program), mode)?;
    }
    let output = Command::new(env::current_exe()?)
        .args(["--exact", "starts_a_control_plane_for_its_parent", "--nocapture"])
        .env(ROLE, "KILL")
        .env("KUBEBUILDER_ASSETS", assets.path())
        .output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(!output.status.success() && said.contains("as asked"), "{said}");
    Ok(())
}

fn start(end: &str) -> Result<Starter> {
    Starter::start("starts_a_control_plane_for_its_parent", (ROLE, end))
}

/// The names of all folders of control planes.
fn folders() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(env::temp_dir())? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// Waits for a condition, for at most 20 s.
fn until(what: &str, holds: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds()? {
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn nothing_is_left_after_a_panic_an_interrupt_or_a_kill() -> Result<()> {
    for end in ["panic", "INT", "KILL"] {
        let mut child = start(end)?;
        let folder = child.folder()?;
        if end != "panic" {
            Command::new("kill").args(["-s", end, &child.0.id().to_string()]).status()?;
        }
        child.0.wait()?;
        let deadline = Instant::now() + Duration::from_secs(20);
        while folder.exists() || !processes_of(&folder)?.is_empty() {
            ensure!(Instant::now() < deadline, "{end}: {:?} is left of {}", processes_of(&folder)?, folder.display());
            thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// The part of the child in the test above; by itself it does nothing.
#[test]
fn starts_a_control_plane_for_its_parent() -> Result<()> {
    let Ok(end) = env::var(ROLE) else {
        return Ok(());
    };
    let plane = ControlPlane::start(&Options::default())?;
    println!("folder={}", plane.folder().display());
    assert!(end != "panic", "as asked");
    loop {
        thread::park();
    }
}

/// The commands of all processes that name `folder`.
fn processes_of(folder: &Path) -> Result<Vec<String>> {
    let folder = folder.display().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Ok(command) = fs::read_to_string(entry?.path().join("cmdline")) else {
            continue;
        };
        if command.contains(&folder) {
            found.push(command.replace('\0', " "));
        }
    }
    Ok(found)
}
