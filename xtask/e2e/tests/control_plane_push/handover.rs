//! Ownership moves from one real proxy to another, under the fence of a real API server.

use std::net::Ipv4Addr;
use std::pin::pin;
use std::time::{Duration, Instant};

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_testbed::{ControlPlane, Network, Options, skipped};
use futures::StreamExt as _;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::tools;

use crate::bed::{AUDIENCE, eventually, soon};
use crate::follow::operator;
use crate::full::{OPERATOR, ROOT, SYSTEM, Teams, believed, parted, seen, world};
use crate::process::{ProxySettings, Replica, Sidecar};
use crate::token::{self, TestPod};

/// Of the API server, which the Service `default/kubernetes` names.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// How often a share moves while the time is taken.
const MOVES: usize = 20;

/// Shorter than the default, so that a silent proxy costs the test less.
const FLAGS: [&str; 2] = ["--acknowledge-within", "2s"];

/// Applies a fenced root of two shards, with a canary where `canary` names its namespaces.
async fn divide(client: &Client, canary: &[&str]) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let (shards, pinned) =
        if canary.is_empty() { (2, Value::Null) } else { (1, json!({"replicas": 1, "inNamespaces": canary})) };
    let resources = json!([{"apiGroups": [""], "resources": ["configmaps"]}]);
    let root = json!({
        "prefix": "op", "fence": "Server", "targetStatefulSet": "op", "canary": pinned,
        "auto": {"shardingSize": shards, "everyShardReplicas": 1},
        "resourceSelector": [{"relateResources": resources}],
    });
    let config = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "ShardingConfig",
        "metadata": {"name": ROOT},
        "spec": {"controller": {"leaderElectionName": "op"}, "root": root},
    });
    roots.patch(ROOT, &PatchParams::apply("test").force(), &Patch::Apply(&config)).await.unwrap();
}

/// The status of the root, as soon as nothing is on its way by what the root says now.
async fn settled(client: &Client) -> ShardingConfigStatus {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let one = watcher::Config::default().fields(&format!("metadata.name={ROOT}"));
    let mut roots_seen = pin!(watcher(roots, one).default_backoff().applied_objects());
    let found = async {
        loop {
            // One that fails begins again.
            let Some(Ok(root)) = roots_seen.next().await else { continue };
            let generation = root.metadata.generation;
            let Some(status) = root.status else { continue };
            let condition = status.conditions.iter().find(|condition| condition.type_ == "Settled");
            if condition.is_some_and(|one| one.status == "True" && one.observed_generation == generation) {
                return status;
            }
        }
    };
    soon("the root to be settled", found).await
}

async fn start(client: &Client, settings: &ProxySettings, pod: &TestPod) -> (Sidecar, Client) {
    let sidecar = Sidecar::start(settings, pod, &pod.token(client, AUDIENCE).await).await;
    let through = operator(client, settings, pod, &sidecar).await;
    (sidecar, through)
}

#[tokio::test]
async fn a_share_moves_under_the_fence_and_past_a_dead_proxy() {
    let network = match Network::make(&[ADDRESS]) {
        Ok(network) => network,
        Err(error) if tools::on_path("ip") => panic!("{error:#}"),
        Err(error) => {
            skipped("a_share_moves_under_the_fence_and_past_a_dead_proxy", &format!("{error:#}")).unwrap();
            return;
        }
    };
    let _entered = network.enter().unwrap();
    let plane = ControlPlane::start(&Options { addresses: vec![ADDRESS], ..Options::default() }).unwrap();
    let client = plane.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let manager = Replica::start(&plane, SYSTEM, &FLAGS).await;
    let pods = [
        token::pod_with_proxy(&client, OPERATOR, "op-0").await,
        token::pod_with_proxy(&client, OPERATOR, "op-1").await,
    ];
    divide(&client, &[]).await;
    let settings = ProxySettings {
        url: plane.url().to_owned(),
        ca: plane.ca().to_owned(),
        manager: manager.grpc,
        folder: folder.path().to_owned(),
    };
    believed(&client, &settings).await;
    let (mut first, one) = start(&client, &settings, &pods[0]).await;
    let (_second, two) = start(&client, &settings, &pods[1]).await;
    let status = settled(&client).await;
    assert_eq!(status.ownership.unwrap().pod_uids.len(), 2);
    let clients = [one, two];
    parted(&clients, |_, _| true).await;
    move_often(&client, &clients).await;
    // A proxy that says nothing any more is not waited for: the API server refuses what it would let pass.
    first.kill();
    divide(&client, &["team-3"]).await;
    settled(&client).await;
    divide(&client, &[]).await;
    let table = settled(&client).await.ownership.unwrap();
    assert!(table.revoked.is_none() && table.is_total(), "{table:?}");
    hand_back(&client).await;
    eventually("nobody to see anything", async || seen(&clients[1]).await?.is_empty().then_some(())).await;
}

/// Moves a share to and fro. How long that took is printed.
#[expect(clippy::print_stdout, reason = "a figure for whoever runs it by itself")]
async fn move_often(client: &Client, clients: &[Client; 2]) {
    let canary: Teams = ["team-3".to_owned()].into();
    let mut times: Vec<Duration> = Vec::new();
    let mut epoch = 0;
    for round in 0..MOVES {
        let pinned: &[&str] = if round % 2 == 0 { &["team-3"] } else { &[] };
        let begun = Instant::now();
        divide(client, pinned).await;
        let table = settled(client).await.ownership.unwrap();
        times.push(begun.elapsed());
        assert!(table.epoch >= epoch + 2, "it is revoked in one epoch and granted in a later one: {table:?}");
        epoch = table.epoch;
        parted(clients, |one, _| (*one == canary) == (round % 2 == 0)).await;
    }
    times.sort();
    println!("of {MOVES} moves, half took at most {:?}, and all at most {:?}", times[MOVES / 2], times[MOVES - 1]);
    let events: Api<Event> = Api::namespaced(client.clone(), OPERATOR);
    for reason in ["Revoked", "Granted"] {
        eventually(reason, async || {
            let all = events.list(&ListParams::default()).await.ok()?.items;
            all.iter().any(|event| event.reason.as_deref() == Some(reason)).then_some(())
        })
        .await;
    }
}

/// Deletes the root, which stays until it has handed everything back.
async fn hand_back(client: &Client) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let root = roots.get(ROOT).await.unwrap();
    assert_eq!(root.metadata.finalizers.unwrap(), ["ctrlmesh.kusionstack.io/ownership"]);
    roots.delete(ROOT, &DeleteParams::default()).await.unwrap();
    eventually("the root to be gone", async || roots.get_opt(ROOT).await.unwrap().is_none().then_some(())).await;
}
