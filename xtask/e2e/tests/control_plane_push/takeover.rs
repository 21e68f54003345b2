//! Two managers, whose leader is killed again and again while shards change.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::{Arc, Mutex};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_testbed::{ControlPlane, Options};
use futures::StreamExt as _;
use kube::api::ListParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tempfile::TempDir;

use crate::audit::requests;
use crate::bed::{AUDIENCE, eventually};
use crate::follow::operator;
use crate::full::{OPERATOR, ROOT, SYSTEM, Teams, believed, divide, parted, world};
use crate::process::{ProxySettings, Replica, Sidecar};
use crate::replicas::leader;
use crate::token::{self, TestPod};

/// How often the leader is killed; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const KILLS: usize = 2;

/// What was ever written of shards: by name and UID, the generations, each a change of the spec.
type WrittenEpochs = Arc<Mutex<BTreeMap<(String, String), BTreeSet<i64>>>>;

/// Two managers, each of which keeps its address when it is started anew.
struct Managers<'a> {
    cluster: &'a ControlPlane,
    arguments: [Vec<String>; 2],
    replicas: [Replica; 2],
}

impl<'a> Managers<'a> {
    async fn start(cluster: &'a ControlPlane, client: &Client, folder: &TempDir) -> Self {
        let mut arguments = [Vec::new(), Vec::new()];
        for (at, arguments) in arguments.iter_mut().enumerate() {
            // With its token it tells the leader what its proxies say.
            let name = format!("ctrlmesh-manager-{at}");
            let pod = token::pod(client, SYSTEM, &name, "ctrlmesh-manager", "node-a").await;
            let file = folder.path().join(&name);
            fs::write(&file, pod.token(client, AUDIENCE).await).unwrap();
            arguments.extend(["--token".to_owned(), file.display().to_string()]);
        }
        let first = begin(cluster, &arguments[0]).await;
        let second = begin(cluster, &arguments[1]).await;
        let replicas = [first, second];
        for (arguments, replica) in arguments.iter_mut().zip(&replicas) {
            arguments.extend(["--listen-grpc".to_owned(), replica.grpc.to_string()]);
            replica.until_ready().await;
        }
        Self { cluster, arguments, replicas }
    }

    /// Kills the one that leads, waits for the other to lead, and starts the first anew.
    async fn take_over(&mut self) {
        let leader = eventually("a leader", async || leader(&self.replicas).await).await;
        self.replicas[leader].program().kill();
        let other = &self.replicas[1 - leader];
        eventually("the other to lead", async || other.leads().await.then_some(())).await;
        self.replicas[leader] = begin(self.cluster, &self.arguments[leader]).await;
        // One that has not seen everything would not take over.
        self.replicas[leader].until_ready().await;
    }
}

async fn begin(cluster: &ControlPlane, arguments: &[String]) -> Replica {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    Replica::start(cluster, SYSTEM, &arguments).await
}

/// Looks on what is written of shards, for as long as the runtime is there.
fn watch(client: &Client) -> WrittenEpochs {
    let written = WrittenEpochs::default();
    let (shards, seen) = (Api::<ShardingConfig>::namespaced(client.clone(), OPERATOR), written.clone());
    tokio::spawn(async move {
        let mut events = std::pin::pin!(watcher::watcher(shards, watcher::Config::default()));
        while let Some(event) = events.next().await {
            if let Ok(Event::Apply(shard) | Event::InitApply(shard)) = event
                && shard.name_any() != ROOT
            {
                let key = (shard.name_any(), shard.uid().unwrap());
                let generation = shard.metadata.generation.unwrap();
                seen.lock().unwrap().entry(key).or_default().insert(generation);
            }
        }
    });
    written
}

/// Waits until status says that both pods, and no others, follow what the root says now.
async fn programmed(client: &Client) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    eventually("the root to be programmed", async || {
        let root = roots.get(ROOT).await.ok()?;
        let status = root.status?;
        let current = status.observed_generation == root.metadata.generation;
        let programmed = status.conditions.iter().find(|one| one.type_ == "Programmed")?;
        (current && programmed.status == "True").then_some(())
    })
    .await;
}

/// Waits until there are these shards and no others, and they have been seen as they are.
async fn shards(client: &Client, written: &WrittenEpochs, names: BTreeSet<&str>) {
    let shards: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    eventually("the shards to be the root's", async || {
        let there = shards.list(&ListParams::default()).await.ok()?.items;
        let there: Vec<_> = there.into_iter().filter(|one| one.name_any() != ROOT).collect();
        let seen = written.lock().unwrap();
        let all_seen = there.iter().all(|one| {
            let generations = seen.get(&(one.name_any(), one.uid().unwrap_or_default()));
            generations.is_some_and(|all| one.metadata.generation.is_some_and(|it| all.contains(&it)))
        });
        let there: BTreeSet<String> = there.iter().map(kube::ResourceExt::name_any).collect();
        (all_seen && there.iter().map(String::as_str).eq(names.iter().copied())).then_some(())
    })
    .await;
}

/// Waits until the shard that stays was changed so often: twice before it is written once, it would be as it was.
async fn changed(written: &WrittenEpochs, times: usize) {
    let was = || {
        let seen = written.lock().unwrap().clone();
        let mut stays = seen.into_iter().filter(|((name, _), _)| name == "op-1-normal");
        stays.any(|(_, generations)| generations.len() > times)
    };
    eventually("the shard that stays to be changed", async || was().then_some(())).await;
}

#[tokio::test]
async fn killed_leaders_lose_nothing_and_do_nothing_twice() {
    let cluster = ControlPlane::start(&Options { audit: true, ..Options::default() }).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let written = watch(&client);
    let mut managers = Managers::start(&cluster, &client, &folder).await;
    divide(&client, 2, None).await;
    let pods = [
        token::pod_with_proxy(&client, OPERATOR, "op-0").await,
        token::pod_with_proxy(&client, OPERATOR, "op-1").await,
    ];
    let settings = |at: usize| ProxySettings {
        url: cluster.url().to_owned(),
        ca: cluster.ca().to_owned(),
        manager: managers.replicas[at].grpc,
        folder: folder.path().to_owned(),
    };
    believed(&client, &settings(0)).await;
    let start = async |pod: &TestPod, settings: ProxySettings| {
        let sidecar = Sidecar::start(&settings, pod, &pod.token(&client, AUDIENCE).await).await;
        let through = operator(&client, &settings, pod, &sidecar).await;
        (sidecar, through)
    };
    // One follows the manager that leads, the other the one that does not.
    let one = start(&pods[0], settings(0)).await;
    let two = start(&pods[1], settings(1)).await;
    let clients = [one.1, two.1];
    parted(&clients, |_, _| true).await;
    programmed(&client).await;
    let full = ctrlmesh_testbed::is_full();
    let kills = if full { KILLS * 10 } else { KILLS };
    for round in 0..kills {
        if round % 2 == 0 {
            divide(&client, 1, Some(json!({"replicas": 1, "inNamespaces": ["team-3"]}))).await;
        } else {
            divide(&client, 2, None).await;
        }
        managers.take_over().await;
        let canary: Teams = ["team-3".to_owned()].into();
        parted(&clients, |one, _| (*one == canary) == (round % 2 == 0)).await;
        programmed(&client).await;
        // One that is not removed before it is wanted again stays, and is not made anew.
        let other = if round % 2 == 0 { "op-0-canary" } else { "op-2-normal" };
        shards(&client, &written, [other, "op-1-normal"].into()).await;
        changed(&written, round + 1).await;
    }
    assert_written_once(&written, kills);
    assert_asked_once(&cluster, kills);
}

/// Two shards are made at first. Each change of the root makes one, changes the one that stays, and removes one.
fn assert_written_once(written: &WrittenEpochs, changes: usize) {
    let written = written.lock().unwrap().clone();
    let count: usize = written.values().map(BTreeSet::len).sum();
    assert_eq!(count, 2 + 2 * changes, "{written:?}");
    let stays = written.iter().filter(|((name, _), _)| name == "op-1-normal");
    let generations: Vec<&BTreeSet<i64>> = stays.map(|(_, generations)| generations).collect();
    assert_eq!(generations.len(), 1, "it was deleted and made anew: {written:?}");
    assert_eq!(generations[0].len(), 1 + changes, "{written:?}");
}

/// The same by what the API server was asked: who writes again what is there already changes nothing that is seen. What
/// a leader was killed in the middle of may have been done, and the log says that nobody was there for the answer.
fn assert_asked_once(cluster: &ControlPlane, changes: usize) {
    let mut asked: BTreeMap<String, usize> = BTreeMap::new();
    for request in requests(cluster) {
        let writes = ["create", "update", "patch"].contains(&request.verb.as_str());
        // The root gets a finalizer.
        if writes && request.resource == "shardingconfigs" && request.name != ROOT {
            *asked.entry(request.name).or_default() += 1;
        }
    }
    let count: usize = asked.values().sum();
    assert!((2 + changes..=2 + 2 * changes).contains(&count), "{asked:?}");
    assert!(asked["op-1-normal"] <= 1 + changes, "{asked:?}");
}
