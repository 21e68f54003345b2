//! Pods of one Deployment that several managers admit at the same moment.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_common::wire;
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_testbed::ControlPlane;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};
use nix::sys::signal::Signal;
use rustls_pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::Code;

use crate::attacks;
use crate::bed::{AUDIENCE, Bed, eventually, soon};
use crate::harness;
use crate::process::Replica;
use crate::replicas::{believing, leader};
use crate::token;

/// Shards that the root makes, each of one pod.
const SHARDS: usize = 6;

/// A root that divides the Deployment `op`.
fn root() -> ShardingConfig {
    let auto = json!({"shardingSize": SHARDS, "everyShardReplicas": 1});
    serde_json::from_value(json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "root"},
        "spec": {"root": {"prefix": "op", "targetDeployment": "op", "auto": auto,
            "resourceSelector": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}]}},
    }))
    .unwrap()
}

/// The labels of a pod of this revision of the Deployment.
fn labels(revision: &str) -> Labels {
    let labels = [(label::ENABLE_PROXY, "true"), (label::POD_TEMPLATE_HASH, revision)];
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
async fn the_leader_places_pods_for_replicas_that_ask_it() {
    let bed = Bed::new().await;
    let mut config = root();
    config.metadata.namespace = Some(bed.namespace.clone());
    bed.sees(None, Some(&config)).await;
    let token = manager_token(&bed.client, &bed.namespace, "manager-1", bed.folder.path()).await;
    let pod = |labels, revision: &str| Member::of_replica_set(bed.namespace.clone(), labels, format!("op-{revision}"));
    let (_board, leader) = bed.other_replica(&token).await;
    // Once it is connected. An answer that is late is none: then it is tried with pods of another revision.
    let mut revisions = 0..;
    eventually("each shard to be given once", async || {
        let revision = revisions.next()?.to_string();
        let pods = || pod(labels(&revision), &revision);
        let there = (0..SHARDS / 2).map(|_| {
            let (leader, pod) = (leader.clone(), pods());
            async move { leader.assign_shard(&pod).await }
        });
        let here = (0..SHARDS / 2).map(|_| bed.placement.give(pods()));
        let (there, here) = tokio::join!(futures::future::join_all(there), futures::future::join_all(here));
        let given: Option<Vec<String>> = there.into_iter().chain(here).collect();
        given.inspect(|given| assert_eq!(counted(given.clone()), each_once()))
    })
    .await;
    assert_eq!(leader.assign_shard(&pod(Labels::default(), "x")).await, None, "it is of no shard");
    // Somebody else leads, and who asks has not noticed.
    bed.leadership().step_down();
    eventually("it not to lead", async || (!bed.leadership().is_held()).then_some(())).await;
    let token = fs::read_to_string(token).unwrap();
    assert_eq!(attacks::call(&bed, wire::ASSIGN_SHARD, Some(&token)).await, Code::FailedPrecondition);
}

/// Asks a manager about a pod of this revision of the Deployment; the shard that it gives. What is `tried` counts for
/// no other.
async fn ask((webhooks, believed): (SocketAddr, &str), namespace: &str, revision: &str, tried: bool) -> Option<String> {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("op-{revision}"), "uid": "u", "controller": true});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "operation": "CREATE", "namespace": namespace, "userInfo": {}, "dryRun": tried,
            "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "operator", "image": "none"}]},
                "metadata": {"generateName": "op-", "labels": labels(revision), "ownerReferences": [owner]}},
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
    let patch: Vec<u8> =
        serde_json::from_value(body["response"]["patch"].clone()).unwrap_or_else(|error| panic!("{error}: {body}"));
    let patch: Vec<Value> = serde_json::from_slice(&patch).unwrap();
    let injected = label::SHARDING_CONFIG_INJECTED.replace('/', "~1");
    let label = patch.iter().find(|one| one["path"] == format!("/metadata/labels/{injected}"));
    Some(label?["value"].as_str().unwrap().to_owned())
}

/// Two managers, each with its token.
async fn managers(plane: &ControlPlane, client: &Client, namespace: &str, folder: &Path) -> Vec<Replica> {
    let account = format!("{namespace}/manager");
    let mut replicas = Vec::new();
    for name in ["manager-0", "manager-1"] {
        let token = manager_token(client, namespace, name, folder).await;
        let token = token.display().to_string();
        let more = ["--account", &account, "--token", &token];
        replicas.push(Replica::start(plane, namespace, &more).await);
    }
    replicas
}

#[tokio::test]
async fn two_managers_asked_at_once_give_no_shard_twice() {
    let plane = ControlPlane::shared();
    let client = plane.client().await.unwrap();
    // In its own a manager serves nobody.
    let namespace = plane.namespace("placement").await.unwrap();
    let operators = plane.namespace("operators").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut replicas = managers(plane, &client, &namespace, folder.path()).await;
    harness::install(&client).await.unwrap();
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &operators);
    configs.create(&PostParams::default(), &root()).await.unwrap();
    for replica in &replicas {
        replica.until_ready().await;
    }
    let leader = eventually("a leader", async || leader(&replicas).await).await;
    let mut first = replicas.remove(leader);
    let mut follower = replicas.remove(0);
    soon("it to be told", follower.program().until_logged("receipts go to the leader")).await;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let data = secrets.get("ctrlmesh-ca").await.unwrap().data.unwrap();
    let believed = String::from_utf8(data["manager.crt"].0.clone()).unwrap();
    let (leading, following) = ((first.webhooks, &*believed), (follower.webhooks, &*believed));
    for replica in [leading, following] {
        let knows = async || ask(replica, &operators, "0", true).await;
        eventually("it to know the root", knows).await;
    }
    // Where the leader was late, which is said, it is tried with pods of another revision.
    let mut revisions = 1..;
    eventually("each shard to be given once", async || {
        let (revision, before) = (revisions.next()?.to_string(), alone(&mut follower));
        let asked = (0..SHARDS).map(|at| {
            let replica = if at % 2 == 0 { leading } else { following };
            ask(replica, &operators, &revision, false)
        });
        let given = futures::future::join_all(asked).await.into_iter().flatten();
        let given = counted(given);
        assert!(given == each_once() || alone(&mut follower) > before, "{given:?}");
        (given == each_once()).then_some(())
    })
    .await;
    // A leader that is there, and says nothing.
    first.program().send(Signal::SIGSTOP);
    let before = alone(&mut follower);
    for _ in 0..SHARDS {
        let shard = soon("an answer", ask(following, &operators, "x", false)).await.unwrap();
        assert!(each_once().contains_key(&shard), "{shard}");
    }
    eventually("it to say so", async || (alone(&mut follower) > before).then_some(())).await;
}

/// How often it has said that it gave shards alone, though another leads.
fn alone(replica: &mut Replica) -> usize {
    replica.program().log().matches("without the leader").count()
}
