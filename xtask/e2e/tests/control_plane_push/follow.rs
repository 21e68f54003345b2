//! Policies reach real proxies, which keep serving without the manager.

use std::fs;
use std::sync::Arc;
use std::time::SystemTime;

use ctrlmesh_common::policy::{Lock, Policy};
use ctrlmesh_common::wire::{Content, Report, Traffic, TrafficReport, Verdict};
use ctrlmesh_manager::push::policy_store::Receipt;
use ctrlmesh_manager::rules::pod::PodName;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Config};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::json;
use tonic::Code;

use crate::bed::{AUDIENCE, Bed, eventually, inside, notices_of, of_node, of_pod, policy, soon, until};
use crate::process::{ProxySettings, Sidecar};
use crate::token::{self, TestPod};

const API: &str = "https://kubernetes.default.svc";

/// A client as an operator is one: it believes the mesh's authority only.
pub(crate) async fn operator(admin: &Client, settings: &ProxySettings, pod: &TestPod, sidecar: &Sidecar) -> Client {
    Client::try_from(operator_config(admin, settings, pod, sidecar).await).unwrap()
}

/// The same, before its client is made.
pub(crate) async fn operator_config(
    admin: &Client,
    settings: &ProxySettings,
    pod: &TestPod,
    sidecar: &Sidecar,
) -> Config {
    let mut config = Config::new(format!("https://{}", sidecar.address).parse().unwrap());
    let mesh = CertificateDer::pem_file_iter(settings.folder.join("mesh.crt")).unwrap();
    config.root_cert = Some(mesh.map(|one| one.unwrap().to_vec()).collect());
    config.auth_info.token = Some(pod.token(admin, API).await.into());
    config
}

/// The names of the `ConfigMaps` that it sees.
async fn seen(client: &Client, namespace: &str) -> Option<Vec<String>> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let list = maps.list(&ListParams::default()).await.ok()?;
    Some(list.items.into_iter().filter_map(|map| map.metadata.name).collect())
}

async fn with_objects(bed: &Bed) {
    let maps: Api<ConfigMap> = Api::namespaced(bed.client.clone(), &bed.namespace);
    for number in 0..4 {
        let map = json!({"metadata": {"name": format!("c{number}"), "labels": {"slot": number.to_string()}}});
        maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    }
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": bed.namespace}],
    });
    let bindings: Api<k8s_openapi::api::rbac::v1::RoleBinding> = Api::namespaced(bed.client.clone(), &bed.namespace);
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
}

async fn until_sees(client: &Client, namespace: &str, names: &[&str]) {
    eventually(&format!("to see {names:?}"), async || (seen(client, namespace).await? == names).then_some(())).await;
}

#[tokio::test]
async fn proxies_go_on_and_start_without_the_manager() {
    let mut bed = Bed::new().await;
    with_objects(&bed).await;
    let pods = [bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-b").await];
    let publish = |bed: &Bed, epoch, halves: [&str; 2]| {
        bed.publish(&[
            (&pods[0], "node-a", inside(policy(epoch, halves[0]))),
            (&pods[1], "node-b", inside(policy(epoch, halves[1]))),
        ]);
    };
    publish(&bed, 1, ["slot in (0,1)", "slot in (2,3)"]);
    let mut sidecars = Vec::new();
    for pod in &pods {
        let token = pod.token(&bed.client, AUDIENCE).await;
        sidecars.push(Sidecar::start(&bed.settings(), pod, &token).await);
    }
    let mut clients = Vec::new();
    for (pod, sidecar) in pods.iter().zip(&sidecars) {
        clients.push(operator(&bed.client, &bed.settings(), pod, sidecar).await);
    }
    until_sees(&clients[0], &bed.namespace, &["c0", "c1"]).await;
    until_sees(&clients[1], &bed.namespace, &["c2", "c3"]).await;

    publish(&bed, 2, ["slot=0", "slot!=0"]);
    for pod in &pods {
        until("both to acknowledge", || bed.receipt(pod).is_some_and(|one| one.epoch == 2)).await;
        let receipt = bed.receipt(pod).unwrap();
        assert!(receipt.connected && receipt.refused.is_none(), "{receipt:?}");
    }
    until_sees(&clients[0], &bed.namespace, &["c0"]).await;
    until_sees(&clients[1], &bed.namespace, &["c1", "c2", "c3"]).await;

    bed.stop().await;
    until_sees(&clients[0], &bed.namespace, &["c0"]).await;
    for (pod, sidecar) in pods.iter().zip(&mut sidecars) {
        sidecar.kill();
        *sidecar = Sidecar::start_again(&bed.settings(), pod).await;
    }
    let restarted = operator(&bed.client, &bed.settings(), &pods[1], &sidecars[1]).await;
    until_sees(&restarted, &bed.namespace, &["c1", "c2", "c3"]).await;
    assert!(sidecars[1].metric("ctrlmesh_proxy_manager_connected").await < 1.0);

    bed.restart().await;
    publish(&bed, 3, ["slot=3", "slot!=3"]);
    until("the proxies to come back", || pods.iter().all(|pod| bed.receipt(pod).is_some_and(|one| one.epoch == 3)))
        .await;
    until_sees(&restarted, &bed.namespace, &["c0", "c1", "c2"]).await;
}

#[tokio::test]
async fn a_proxy_with_a_broken_file_waits_for_the_manager() {
    let mut bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", inside(policy(1, "slot=0")))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let mut sidecar = Sidecar::start(&bed.settings(), &pod, &token).await;
    // It serves before it has written the file, and says so afterwards.
    until("its verdict", || bed.receipt(&pod).is_some_and(|one| one.epoch == 1)).await;
    sidecar.kill();
    bed.stop().await;
    let state = bed.settings().state(&pod);
    let mut broken = fs::read(state.join("policies")).unwrap();
    let last = broken.len() - 3;
    broken[last] ^= 1;
    fs::write(state.join("policies"), &broken).unwrap();
    let mut waiting = Sidecar::begin(&bed.settings(), &pod);
    soon("the file to be set aside", waiting.until_logged("is not believed")).await;
    soon("the manager to be missed", waiting.until_logged("the manager is away")).await;
    assert_eq!(fs::read(state.join("policies.broken")).unwrap(), broken);
    assert!(!waiting.log().contains("\"purpose\":\"operators\""), "{}", waiting.log());
    bed.restart().await;
    bed.publish(&[(&pod, "node-a", inside(policy(2, "slot=0")))]);
    let sidecar = soon("the proxy to serve", waiting.ready()).await;
    until("its verdict", || bed.receipt(&pod).is_some_and(|one| one.epoch == 2)).await;
    drop(sidecar);
}

#[tokio::test]
async fn a_refused_policy_is_reported_and_the_last_one_stays() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", inside(policy(1, "slot=0")))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let sidecar = Sidecar::start(&bed.settings(), &pod, &token).await;
    let mut wrong = inside(policy(2, "slot=1"));
    wrong.lock = Some(Lock { namespace: "ns".into(), name: "NOT A NAME".into(), shard: "s".into() });
    bed.publish(&[(&pod, "node-a", wrong)]);
    until("the refusal", || bed.receipt(&pod).is_some_and(|one| one.refused.is_some())).await;
    let receipt = bed.receipt(&pod).unwrap();
    assert_eq!(receipt.epoch, 1);
    assert!(receipt.refused.as_deref().unwrap().contains("lock.name"), "{receipt:?}");
    assert!(sidecar.metric("ctrlmesh_proxy_policies_refused_total").await > 0.0);
    let shown = format!("ctrlmesh_proxy_policy_epoch{{pod=\"{}/op-0\"}}", bed.namespace);
    assert!((sidecar.metric(&shown).await - 1.0).abs() < f64::EPSILON);
    bed.publish(&[(&pod, "node-a", inside(policy(3, "slot=1")))]);
    until("the next", || bed.receipt(&pod).is_some_and(|one| one.epoch == 3)).await;
    assert_eq!(bed.receipt(&pod).unwrap().refused, None);
}

#[tokio::test]
async fn a_node_is_told_of_pods_that_come_change_and_go() {
    let bed = Bed::new().await;
    let (one, two) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-a").await);
    let node = bed.node_pod("node-a").await;
    let token = node.token(&bed.client, AUDIENCE).await;
    bed.publish(&[(&one, "node-a", policy(1, "a=1"))]);
    let mut stream = bed.follow(&token, of_node("node-a")).await.unwrap();
    let first = stream.update().await;
    assert_eq!(first.policies[0].pod.as_ref().unwrap().name, "op-0");
    // Where the API server is; at loopback, as here, it says nothing of an endpoint.
    assert_eq!(first.servers, ["10.96.0.1:443"]);
    bed.publish(&[(&one, "node-a", policy(1, "a=1")), (&two, "node-a", policy(5, "a=2"))]);
    assert_eq!(stream.epochs().await, [("op-1".to_owned(), 5)].into(), "only what changed");
    bed.publish(&[(&two, "node-a", policy(5, "a=2"))]);
    let update = stream.update().await;
    assert!(update.policies.is_empty() && update.servers.is_empty());
    assert_eq!(update.gone[0].name, "op-0");
}

#[tokio::test]
async fn a_client_that_does_not_read_gets_the_newest_policy_later() {
    let bed = Bed::new().await;
    let (slow, quick) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-b").await);
    let publish = |epoch: u64| {
        // Large, so that a few fill every window and buffer on the way.
        let values: Vec<String> = (0..4000).map(|n| format!("value-{n:040}-{epoch}")).collect();
        let selector = format!("a in ({})", values.join(","));
        bed.publish(&[(&slow, "node-a", policy(epoch, &selector)), (&quick, "node-b", policy(epoch, "a=1"))]);
    };
    publish(1);
    let slow_token = slow.token(&bed.client, AUDIENCE).await;
    let quick_token = quick.token(&bed.client, AUDIENCE).await;
    let mut dead = bed.follow(&slow_token, of_pod(&slow)).await.unwrap();
    let mut live = bed.follow(&quick_token, of_pod(&quick)).await.unwrap();
    assert_eq!(live.epochs().await, [("op-1".to_owned(), 1)].into());
    for epoch in 2..50 {
        publish(epoch);
        assert_eq!(live.epochs().await, [("op-1".to_owned(), epoch)].into());
    }
    let mut told = 0;
    let mut last = 0;
    while last != 49 {
        last = dead.epochs().await["op-0"];
        told += 1;
    }
    assert!(told < 25, "{told} of 49 were kept for it");
}

#[tokio::test]
async fn the_same_pod_has_one_stream_and_the_newer_one_counts() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let mut old = bed.follow(&token, of_pod(&pod)).await.unwrap();
    old.epochs().await;
    let mut new = bed.follow(&token, of_pod(&pod)).await.unwrap();
    let ended = soon("the old one to end", old.updates.message()).await;
    assert_eq!(ended.unwrap_err().code(), Code::Aborted);
    let update = new.update().await;
    new.applies(&update.policies[0], 1).await;
    until("its verdict", || bed.receipt(&pod).is_some_and(|one| one.connected)).await;
    drop(new);
    until("it to be gone", || bed.receipt(&pod).is_some_and(|one| !one.connected)).await;
}

#[tokio::test]
async fn the_leader_learns_what_proxies_told_another_replica() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    let manager = token::pod(&bed.client, &bed.namespace, "manager-1", "manager", "node-a").await;
    let token = bed.path("manager-token");
    fs::write(&token, manager.token(&bed.client, AUDIENCE).await).unwrap();
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let (store, _leader) = bed.other_replica(&token).await;
    store.publish(notices_of(&[(&pod, "node-a", policy(1, "a=1"))]));
    let name = PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
    for (epoch, refused) in [(7, None), (8, Some("because".to_owned()))] {
        let receipt = Receipt {
            by: "proxy".into(),
            uid: pod.uid.clone(),
            node: None,
            epoch,
            digest: epoch,
            refused: refused.clone(),
            connected: true,
            lost: false,
            last_contact: SystemTime::now(),
            guards: Arc::default(),
            webhook: None,
        };
        store.receive(None, &name, receipt);
        until("the leader to know", || {
            bed.receipt(&pod).is_some_and(|one| one.epoch == epoch && one.refused == refused)
        })
        .await;
    }
}

#[tokio::test]
async fn the_leader_learns_what_requests_have_come_to() {
    let bed = Bed::new().await;
    let pods = [bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-b").await];
    let manager = token::pod(&bed.client, &bed.namespace, "manager-1", "manager", "node-a").await;
    let token = bed.path("manager-token");
    fs::write(&token, manager.token(&bed.client, AUDIENCE).await).unwrap();
    let asking = || Policy { report_traffic: true, ..policy(1, "a=1") };
    let all = [(&pods[0], "node-a", asking()), (&pods[1], "node-b", asking())];
    bed.publish(&all);
    let (store, _leader) = bed.other_replica(&token).await;
    store.publish(notices_of(&all));

    // One proxy follows the leader.
    let mut stream = bed.follow(&pods[0].token(&bed.client, AUDIENCE).await, of_pod(&pods[0])).await.unwrap();
    let entry = stream.update().await.policies.remove(0);
    let traffic = |requests| Traffic { since: 1, requests, ..Traffic::default() };
    let report = TrafficReport { pod: entry.pod.clone(), traffic: Some(traffic(3)) };
    stream.reports.send(Report { content: Some(Content::Traffic(report)) }).await.unwrap();
    let name = |pod: &TestPod| PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
    let known = |pod: &TestPod| bed.traffic(pod).map(|traffic| traffic.requests);
    until("the leader to know", || known(&pods[0]) == Some(3)).await;

    // The other's counts are relayed.
    for requests in [5, 8] {
        store.receive_traffic(None, (&name(&pods[1]), &pods[1].uid), &"proxy".into(), Some(traffic(requests)));
        until("the leader to know", || known(&pods[1]) == Some(requests)).await;
    }
    store.receive_traffic(None, (&name(&pods[1]), &pods[1].uid), &"proxy".into(), None);
    until("the leader to forget", || known(&pods[1]).is_none()).await;
    assert_eq!(known(&pods[0]), Some(3));
}

/// What a proxy says of a policy, and what it is told of the pod, may cross.
#[tokio::test]
async fn a_verdict_on_a_former_pod_is_dropped_or_refused() {
    let bed = Bed::new().await;
    let (pod, stays) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-a").await);
    let node = bed.node_pod("node-a").await;
    let of_stays = |epoch| (&stays, "node-a", policy(epoch, "a=2"));
    bed.publish(&[(&pod, "node-a", policy(1, "a=1")), of_stays(1)]);
    let token = node.token(&bed.client, AUDIENCE).await;
    let mut stream = bed.follow(&token, of_node("node-a")).await.unwrap();
    let update = stream.update().await;
    let entry = update.policies.iter().find(|entry| name_of(entry) == "op-0").unwrap();
    let verdict = Verdict { pod: entry.pod.clone(), digest: entry.digest, epoch: 1, refused: String::new() };
    bed.publish(&[of_stays(1)]);
    let update = soon("that it is gone", stream.updates.message()).await.unwrap().unwrap();
    assert_eq!(update.gone.len(), 1);
    let say = |verdict: &Verdict| Report { content: Some(Content::Verdict(verdict.clone())) };
    stream.reports.send(say(&verdict)).await.unwrap();
    // What comes behind it in the same stream was heard.
    let behind = {
        bed.publish(&[of_stays(2)]);
        let update = soon("what is new", stream.updates.message()).await.unwrap().unwrap();
        let entry = update.policies[0].clone();
        Verdict { pod: entry.pod, digest: entry.digest, epoch: 2, refused: String::new() }
    };
    stream.reports.send(say(&behind)).await.unwrap();
    until("its verdict", || bed.receipt(&stays).is_some_and(|one| one.epoch == 2)).await;
    assert_eq!(bed.refused("foreign"), 0);
    let mut other = behind;
    other.pod.as_mut().unwrap().uid = "another".to_owned();
    stream.reports.send(say(&other)).await.unwrap();
    let ended = soon("the end", stream.updates.message()).await;
    assert_eq!(ended.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(bed.refused("foreign"), 1);
}

fn name_of(entry: &ctrlmesh_common::wire::PodEntry) -> &str {
    entry.pod.as_ref().map(|pod| pod.name.as_str()).unwrap_or_default()
}
