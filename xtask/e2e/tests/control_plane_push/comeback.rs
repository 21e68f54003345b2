//! Proxies reconnect to a replica that may have older state.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::wire::{Hello, PolicySummary, Update};
use ctrlmesh_manager::rules::compile::CompiledPolicy;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tonic::Code;

use crate::bed::{AUDIENCE, Bed, eventually, notices_of, of_node, of_pod, operator_of, policy, until};
use crate::harness;
use crate::stream::Stream;
use crate::token::TestPod;

/// What a proxy says whose policy of the pod is of that version.
fn knows(pod: &TestPod, version: u64) -> Hello {
    let mut id = of_pod(pod).pod.unwrap();
    id.uid.clone_from(&pod.uid);
    let operator = operator_of(pod);
    let known = PolicySummary { pod: Some(id), digest: version, epoch: version, operator, version, webhook: None };
    Hello { known: vec![known], ..of_pod(pod) }
}

/// What it is told, whatever its ticket is.
async fn update(stream: &mut Stream) -> Update {
    Update { ticket: Bytes::new(), servers: Vec::new(), ..stream.update().await }
}

/// Says hello, and is sent away.
async fn sent_away(bed: &Bed, token: &str, hello: Hello) {
    let status = eventually("to be sent away", async || {
        let mut stream = bed.follow(token, hello.clone()).await.ok()?;
        let status = stream.updates.message().await.unwrap_err();
        // An API server that is slow to answer settles nothing.
        (!status.message().contains("cannot be compared")).then_some(status)
    })
    .await;
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("knows less"), "{status}");
}

/// A ShardingConfig that speaks of the pods in the namespace of the bed.
async fn config(bed: &Bed) -> ShardingConfig {
    harness::install(&bed.client).await.unwrap();
    let config = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "op"},
        "spec": {
            "selector": {"matchLabels": {"app": "op"}}, "controller": {"leaderElectionName": "op"},
            "limits": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}], "selector": {"matchLabels": {"a": "1"}}}],
        },
    });
    let config = serde_json::from_value(config).unwrap();
    configs(bed).create(&PostParams::default(), &config).await.unwrap()
}

fn configs(bed: &Bed) -> Api<ShardingConfig> {
    Api::namespaced(bed.client.clone(), &bed.namespace)
}

fn version(config: &ShardingConfig) -> u64 {
    config.resource_version().unwrap().parse().unwrap()
}

/// Takes it out of the cluster at once.
async fn delete(bed: &Bed, pod: &TestPod) {
    let pods: Api<Pod> = Api::namespaced(bed.client.clone(), &pod.namespace);
    pods.delete(&pod.name, &DeleteParams::default().grace_period(0)).await.unwrap();
}

#[tokio::test]
async fn who_comes_back_is_told_only_what_it_does_not_know() {
    let bed = Bed::new().await;
    let (one, two) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-a").await);
    let gone = bed.pod("op-2", "node-a").await;
    let node = bed.node_pod("node-a").await;
    let token = node.token(&bed.client, AUDIENCE).await;
    bed.publish(&[(&one, "node-a", policy(1, "a=1")), (&two, "node-a", policy(1, "a=2"))]);
    let mut stream = bed.follow(&token, of_node("node-a")).await.unwrap();
    let known = update(&mut stream).await.policies.into_iter().map(|entry| PolicySummary {
        pod: entry.pod,
        digest: entry.digest,
        epoch: 1,
        operator: entry.operator,
        version: entry.version,
        webhook: None,
    });
    let mut hello = of_node("node-a");
    hello.known = known.chain(knows(&gone, 7).known).collect();
    drop(stream);
    delete(&bed, &gone).await;
    bed.publish(&[(&one, "node-a", policy(1, "a=1")), (&two, "node-a", policy(2, "a=3"))]);
    let mut again = bed.follow(&token, hello).await.unwrap();
    let update = update(&mut again).await;
    let names: Vec<_> = update.policies.iter().map(|entry| entry.pod.clone().unwrap().name).collect();
    assert_eq!(names, ["op-1"]);
    let names: Vec<_> = update.gone.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(names, ["op-2"]);
    until("what it has to be known", || bed.receipt(&one).is_some_and(|one| one.epoch == 1)).await;
}

#[tokio::test]
async fn a_pod_that_a_replica_has_not_seen_yet_is_not_said_to_be_gone() {
    let bed = Bed::new().await;
    harness::install(&bed.client).await.unwrap();
    let pod = bed.pod("op-0", "node-a").await;
    let token = bed.node_pod("node-a").await.token(&bed.client, AUDIENCE).await;
    let hello = || Hello { known: knows(&pod, 5).known, ..of_node("node-a") };
    // Another replica has told the proxy of it; the watch of this one is late.
    bed.publish(&[]);
    sent_away(&bed, &token, hello()).await;
    let mut stream = bed.follow(&token, hello()).await.unwrap();
    let (told, ()) = tokio::join!(update(&mut stream), async {
        bed.publish(&[(&pod, "node-a", policy(6, "a=1"))]);
        bed.sees(Some(&pod), None).await;
    });
    assert_eq!((told.policies.len(), told.gone.len()), (1, 0));
    drop(stream);
    // Of another incarnation it says nothing.
    let mut other = notices_of(&[(&pod, "node-a", policy(6, "a=1"))]);
    other[0].uid = "before".to_owned();
    bed.store.publish(other);
    bed.sees(None, None).await;
    sent_away(&bed, &token, hello()).await;

    delete(&bed, &pod).await;
    bed.publish(&[]);
    let mut stream = bed.follow(&token, hello()).await.unwrap();
    assert_eq!(update(&mut stream).await.gone.len(), 1, "now it is");
}

#[tokio::test]
async fn a_replica_that_lags_does_not_say_that_a_pod_has_no_shard() {
    let bed = Bed::new().await;
    let config = config(&bed).await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = bed.node_pod("node-a").await.token(&bed.client, AUDIENCE).await;
    let hello = || Hello { known: knows(&pod, version(&config)).known, ..of_node("node-a") };
    let mut nothing = notices_of(&[(&pod, "node-a", policy(1, "a=1"))]);
    nothing[0].policy = Some(Arc::new(CompiledPolicy::nothing()));
    bed.store.publish(nothing);
    bed.sees(Some(&pod), None).await;
    sent_away(&bed, &token, hello()).await;
    // It was deleted while the proxy was away.
    configs(&bed).delete("op", &DeleteParams::default()).await.unwrap();
    let mut stream = bed.follow(&token, hello()).await.unwrap();
    let update = update(&mut stream).await;
    assert_eq!(update.policies.iter().map(|one| one.operator.as_str()).collect::<Vec<_>>(), [""]);
}

#[tokio::test]
async fn a_replica_that_knows_less_than_the_proxy_waits() {
    let bed = Bed::new().await;
    let before = config(&bed).await;
    let mut after = before.clone();
    after.status = Some(ShardingConfigStatus { epoch: Some(1), ..Default::default() });
    let after = configs(&bed).replace_status("op", &PostParams::default(), &after).await.unwrap();
    let (pod, newest) = (bed.pod("op-0", "node-a").await, version(&after));
    let token = pod.token(&bed.client, AUDIENCE).await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    bed.sees(Some(&pod), Some(&before)).await;
    sent_away(&bed, &token, knows(&pod, newest)).await;
    // It has seen the change, and the epoch that follows is not written yet, or never will be: the pod keeps what it
    // has.
    bed.sees(Some(&pod), Some(&after)).await;
    let mut stream = bed.follow(&token, knows(&pod, newest)).await.unwrap();
    assert_eq!(update(&mut stream).await, Update { guard_reports: true, ..Update::default() });
    let (told, ()) = tokio::join!(stream.epochs(), async {
        bed.publish(&[(&pod, "node-a", policy(2, "a=2"))]);
        // Time to be told that, if it were.
        tokio::time::sleep(Duration::from_millis(500)).await;
        bed.publish(&[(&pod, "node-a", policy(newest + 1, "a=3"))]);
    });
    assert_eq!(told, [("op-0".to_owned(), newest + 1)].into());
    // The versions of another one say nothing about those of this one.
    let mut other = knows(&pod, newest + 9);
    other.known[0].operator = format!("{}/another", bed.namespace);
    let mut stream = bed.follow(&token, other).await.unwrap();
    assert_eq!(stream.epochs().await, [("op-0".to_owned(), newest + 1)].into());
}

#[tokio::test]
async fn the_api_servers_state_counts_also_after_an_etcd_restore() {
    let bed = Bed::new().await;
    let config = config(&bed).await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = pod.token(&bed.client, AUDIENCE).await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    bed.sees(Some(&pod), Some(&config)).await;
    let hello = knows(&pod, version(&config) + 1_000_000);
    let mut stream = bed.follow(&token, hello).await.unwrap();
    assert_eq!(stream.epochs().await, [("op-0".to_owned(), 1)].into());
}

#[tokio::test]
async fn a_node_keeps_the_policy_of_a_pod_that_is_undecided() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = bed.node_pod("node-a").await.token(&bed.client, AUDIENCE).await;
    let mut notices = notices_of(&[(&pod, "node-a", policy(1, "a=1"))]);
    notices[0].policy = None;
    bed.store.publish(notices);
    let hello = Hello { known: knows(&pod, 5).known, ..of_node("node-a") };
    let mut stream = bed.follow(&token, hello).await.unwrap();
    assert_eq!(update(&mut stream).await, Update { guard_reports: true, ..Update::default() });
}
