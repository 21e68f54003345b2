//! Pods of one Deployment, about which several managers are asked at the same moment.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_manager::pod::Member;
use ctrlmesh_testbed::ControlPlane;
use kube::api::PostParams;
use kube::{Api, Client};
use nix::sys::signal::Signal;
use rustls_pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::bed::{AUDIENCE, Bed, eventually, soon};
use crate::harness;
use crate::process::Replica;
use crate::replicas::{believing, bundle, leader};
use crate::token;

/// Shards that the root makes, each of one pod.
const SHARDS: usize = 6;

/// A root that divides the Deployment `op`.
fn root() -> ShardingConfig {
    let auto = json!({"shardingSize": SHARDS, "everyShardReplicas": 1});
    serde_json::from_value(json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "root"},
        "spec": {"root": {"prefix": "op", "targetDeployment": "op", "auto": auto}},
    }))
    .unwrap()
}

fn labels() -> Labels {
    let labels = [(label::ENABLE_PROXY, "true"), (label::POD_TEMPLATE_HASH, "5d")];
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// How many pods were given each shard.
fn counted(shards: impl IntoIterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counted = BTreeMap::new();
    shards.into_iter().for_each(|shard| *counted.entry(shard).or_default() += 1);
    counted
}

/// Each shard once.
fn each_once() -> BTreeMap<String, usize> {
    (1..=SHARDS).map(|number| (format!("op-{number}-normal"), 1)).collect()
}

/// A file with the token of a manager.
async fn manager_token(client: &Client, namespace: &str, name: &str, folder: &Path) -> PathBuf {
    let pod = token::pod(client, namespace, name, "manager", "node-a").await;
    let file = folder.join(name);
    fs::write(&file, pod.token(client, AUDIENCE).await).unwrap();
    file
}

#[tokio::test]
async fn the_leader_gives_pods_their_shards_for_those_who_ask_it_while_it_leads() {
    let bed = Bed::new().await;
    let mut config = root();
    config.metadata.namespace = Some(bed.namespace.clone());
    bed.sees(None, Some(&config)).await;
    let token = manager_token(&bed.client, &bed.namespace, "manager-1", bed.folder.path()).await;
    let pod = |labels| Member::of_replica_set(bed.namespace.clone(), labels, "op-5d".to_owned());
    let (_board, leader) = bed.other_replica(&token).await;
    // As soon as it is connected.
    let first = eventually("an answer", async || leader.seat(&pod(labels())).await).await;
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for at in 1..SHARDS {
        match at % 2 {
            0 => here.push(bed.seats.give(pod(labels()))),
            _ => there.push({
                let (leader, pod) = (leader.clone(), pod(labels()));
                async move { leader.seat(&pod).await }
            }),
        }
    }
    let (here, there) =
        tokio::join!(futures::future::join_all(here), futures::future::join_all(there));
    let given = here.into_iter().chain(there).map(Option::unwrap).chain([first]);
    assert_eq!(counted(given), each_once());
    assert_eq!(leader.seat(&pod(Labels::default())).await, None, "it is of no shard");
    // Somebody else leads, and it has not noticed.
    bed.leadership().give_up();
    eventually("nobody to be asked", async || {
        leader.seat(&pod(labels())).await.is_none().then_some(())
    })
    .await;
}

/// Asks a manager about a pod of the Deployment; the shard that it gives. What is `tried` counts for no other.
async fn ask(
    (webhooks, believed): (SocketAddr, &str),
    namespace: &str,
    tried: bool,
) -> Option<String> {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "op-5d", "uid": "u", "controller": true});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "operation": "CREATE", "namespace": namespace, "userInfo": {}, "dryRun": tried,
            "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "operator", "image": "none"}]},
                "metadata": {"generateName": "op-5d-", "labels": labels(), "ownerReferences": [owner]}},
        },
    })
    .to_string();
    let stream = TcpStream::connect(webhooks).await.unwrap();
    let tls = TlsConnector::from(Arc::new(believing(believed)));
    let mut stream = tls.connect(ServerName::try_from("127.0.0.1").unwrap(), stream).await.unwrap();
    let head = format!(
        "POST /inject HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        review.len()
    );
    stream.write_all((head + &review).as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    // Our library writes the bytes as numbers, which Go reads as well as Base64.
    let patch: Vec<u8> = serde_json::from_value(body["response"]["patch"].clone())
        .unwrap_or_else(|error| panic!("{error}: {body}"));
    let patch: Vec<Value> = serde_json::from_slice(&patch).unwrap();
    let injected = label::SHARDING_CONFIG_INJECTED.replace('/', "~1");
    let label = patch.iter().find(|one| one["path"] == format!("/metadata/labels/{injected}"));
    Some(label?["value"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn two_managers_that_are_asked_at_once_give_no_shard_twice_and_one_that_is_alone_answers() {
    let plane = ControlPlane::shared();
    let client = plane.client().await.unwrap();
    // In its own a manager serves nobody.
    let namespace = plane.namespace("seats").await.unwrap();
    let operators = plane.namespace("operators").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let account = format!("{namespace}/manager");
    let mut replicas = Vec::new();
    for name in ["manager-0", "manager-1"] {
        let token = manager_token(&client, &namespace, name, folder.path()).await;
        let token = token.display().to_string();
        let more = ["--account", &account, "--token", &token];
        replicas.push(Replica::start(plane, &namespace, &more).await);
    }
    harness::install(&client).await.unwrap();
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &operators);
    configs.create(&PostParams::default(), &root()).await.unwrap();
    for replica in &replicas {
        replica.until_ready().await;
    }
    let leader = eventually("a leader", async || leader(&replicas).await).await;
    let mut first = replicas.remove(leader);
    let mut follower = replicas.remove(0);
    soon("it to be told", follower.program().until_logged("tells the leader")).await;
    let believed =
        eventually("the authority", async || bundle(&client, &namespace, "manager-ca.crt").await)
            .await;
    let (leading, following) = ((first.webhooks, &*believed), (follower.webhooks, &*believed));
    for replica in [leading, following] {
        eventually("it to know the root", async || ask(replica, &operators, true).await).await;
    }
    let asked = (0..SHARDS).map(|at| {
        let replica = if at % 2 == 0 { leading } else { following };
        ask(replica, &operators, false)
    });
    let given = soon("all answers", futures::future::join_all(asked)).await;
    assert_eq!(counted(given.into_iter().flatten()), each_once());
    // A leader that is there, and says nothing.
    first.program().send(Signal::SIGSTOP);
    for _ in 0..SHARDS {
        let shard = soon("an answer", ask(following, &operators, false)).await.unwrap();
        assert!(each_once().contains_key(&shard), "{shard}");
    }
    soon("it to say so", follower.program().until_logged("the leader does not answer")).await;
}
