//! The steps with the example operator (controller-runtime, with a lock).

use std::ffi::OsString;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_demo::install::ROLLED_OUT_WITHIN;
use ctrlmesh_demo::steps::{
    ADDED, BAD, CANARY, ELASTIC, END, LEAVE, MANAGER, PROXY, REFERENCE, REPLICA, ROLLOUT, SHARDS, WILD,
};
use ctrlmesh_demo::work::Work;
use ctrlmesh_testbed::Cluster;
use xtask::images::Image;

mod stage;

#[test]
fn three_shards_of_the_example_do_what_one_replica_does() -> Result<()> {
    let steps = [REFERENCE, SHARDS, CANARY, PROXY, ROLLOUT, MANAGER, REPLICA, ADDED, WILD, BAD, END, LEAVE, ELASTIC];
    let environment = stage::stage(Work::Websites, 60, &[Image::ExampleOperator], &[])?;
    checked(&environment.cluster)?;
    let (before, after) = steps.split_at(2);
    stage::play_on(&environment, before)?;
    // Each fails where no proxy's metrics can be read through the API server.
    called(&environment.cluster, &["top", "-A", "--by", "pod", "--interval", "2s"])?;
    // An idle replica asks for its lock every two seconds.
    let rebalance = "rebalance example-operator -n example-operator --by requests --sample 10s --dry-run";
    called(&environment.cluster, &rebalance.split(' ').collect::<Vec<_>>())?;
    traced(&environment.cluster)?;
    stage::play_on(&environment, after)
}

/// Follows a replica through its node's proxy: it renews its lock, whatever else it does.
fn traced(cluster: &Cluster) -> Result<()> {
    let list = ["--namespace", "example-operator", "get", "pods", "--selector=app=example-operator", "--output=name"];
    let pods = cluster.ask(&list, "")?;
    let pod = pods.lines().next().and_then(|name| name.strip_prefix("pod/")).context("a replica")?;
    called(cluster, &["trace", pod, "-n", "example-operator", "--verb", "update", "--count", "3", "--for", "60s"])
}

/// Calls `ctrlmesh`, which prints for whoever reads the test.
fn called(cluster: &Cluster, arguments: &[&str]) -> Result<()> {
    let arguments = ["ctrlmesh"].iter().chain(arguments).map(OsString::from);
    let code = ctrlmesh::main(arguments.chain(["--kubeconfig".into(), cluster.kubeconfig().into()]))?;
    ensure!(code == ExitCode::SUCCESS, "`ctrlmesh` ended with {code:?}");
    Ok(())
}

/// Waits until `ctrlmesh check` finds no failure in the new installation.
fn checked(cluster: &Cluster) -> Result<()> {
    let arguments = ["ctrlmesh", "check", "--kubeconfig"].map(OsString::from);
    let arguments = [&arguments[..], &[cluster.kubeconfig().into()]].concat();
    let begun = Instant::now();
    while ctrlmesh::main(arguments.clone())? != ExitCode::SUCCESS {
        ensure!(begun.elapsed() < ROLLED_OUT_WITHIN, "`ctrlmesh check` still finds a failure, which it printed");
        // The leader writes the bundles of the webhooks a moment after it is ready.
        thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}
