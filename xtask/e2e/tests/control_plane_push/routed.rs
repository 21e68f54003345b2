//! What a node proxy says of a webhook becomes a condition of the ShardingConfig.

use std::fs;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::{Content, Hello, PodEntry, PolicySummary, Report, WebhookReport, WebhookState};
use ctrlmesh_proxy::manager_client::Endpoint;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::bed::{AUDIENCE, eventually, of_node, soon};
use crate::full::{OPERATOR, SYSTEM, believed, world};
use crate::process::{ProxySettings, Replica};
use crate::stream::Stream;
use crate::token;

/// A shard by hand.
const SHARD: &str = "by-hand";

async fn apply(client: &Client) {
    let shards: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let limit = json!({
        "relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}],
        "selector": {"matchLabels": {"team": "a"}},
    });
    let shard = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "ShardingConfig",
        "metadata": {"name": SHARD},
        "spec": {
            "selector": {"matchLabels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}},
            "limits": [limit],
            "webhook": {"certDir": "/certs", "port": 9443},
        },
    });
    shards.create(&PostParams::default(), &serde_json::from_value(shard).unwrap()).await.unwrap();
}

/// Waits until the condition has this status and reason; its message.
async fn until_condition(client: &Client, status: &str, reason: &str) -> String {
    let shards: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    eventually(reason, async || {
        let conditions = shards.get(SHARD).await.ok()?.status?.conditions;
        let is_it = |one: &Condition| one.type_ == "WebhookRouted" && one.status == status && one.reason == reason;
        conditions.into_iter().find(is_it).map(|one| one.message)
    })
    .await
}

/// A simulated proxy, which applies each policy that it is told. It is gone when this is dropped.
struct Proxy {
    reports: mpsc::Sender<Report>,
    applied: mpsc::Receiver<(PodEntry, Policy)>,
    _following: JoinSet<()>,
}

impl Proxy {
    fn follow(stream: Stream) -> Self {
        let reports = stream.reports.clone();
        let (sender, applied) = mpsc::channel(64);
        let mut following = JoinSet::new();
        following.spawn(apply_each(stream, sender));
        Self { reports, applied, _following: following }
    }

    /// The policy of the pod, once it names the webhook and is granted: before that, it may be told to own nothing.
    async fn with_webhook(&mut self) -> (PodEntry, u64) {
        loop {
            let (entry, policy) = soon("a policy", self.applied.recv()).await.unwrap();
            if policy.webhook.is_some() && policy.epoch > 0 {
                return (entry, policy.epoch);
            }
        }
    }

    async fn says(&self, entry: &PodEntry, state: WebhookState) {
        let report = WebhookReport { pod: entry.pod.clone(), state: Some(state) };
        self.reports.send(Report { content: Some(Content::Webhook(report)) }).await.unwrap();
    }
}

async fn apply_each(mut stream: Stream, applied: mpsc::Sender<(PodEntry, Policy)>) {
    while let Ok(Some(update)) = stream.updates.message().await {
        for entry in update.policies {
            let policy: Policy = serde_json::from_slice(&entry.policy).unwrap();
            stream.applies(&entry, policy.epoch).await;
            applied.send((entry, policy)).await.unwrap();
        }
    }
}

/// A manager with an enrolled pod, and the pod's ShardingConfig.
struct Bed {
    client: Client,
    endpoint: Endpoint,
    // Dropped in this order.
    _replica: Replica,
    _folder: TempDir,
    _cluster: ControlPlane,
}

impl Bed {
    async fn connect(&self, hello: Hello) -> Proxy {
        let link = self.endpoint.connect(&Drain::default()).await.unwrap();
        Proxy::follow(Stream::begin(link, hello, &[]).await.unwrap())
    }
}

async fn bed() -> Bed {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    token::pod(&client, OPERATOR, "op-0", "operator", "node-a").await;
    let node = token::pod(&client, SYSTEM, "proxy-a", "ctrlmesh-node", "node-a").await;
    apply(&client).await;
    let settings = ProxySettings {
        url: cluster.url().to_owned(),
        ca: cluster.ca().to_owned(),
        manager: replica.grpc,
        folder: folder.path().to_owned(),
    };
    believed(&client, &settings).await;
    fs::write(folder.path().join("token"), node.token(&client, AUDIENCE).await).unwrap();
    let endpoint = Endpoint {
        address: replica.grpc.to_string().parse().unwrap(),
        service_ip: None,
        ca: folder.path().join("manager.crt"),
        token: folder.path().join("token"),
        state: folder.path().join("state"),
    };
    Bed { client, endpoint, _replica: replica, _folder: folder, _cluster: cluster }
}

#[tokio::test]
async fn a_condition_says_whether_reviews_are_routed() {
    let bed = bed().await;
    let client = &bed.client;
    // An older proxy, which says nothing of it.
    let mut proxy = bed.connect(of_node("node-a")).await;
    let (entry, epoch) = proxy.with_webhook().await;
    let message = until_condition(client, "False", "Pending").await;
    assert!(message.contains("no proxy") || message.contains("no node proxy has said"), "{message}");

    let error = "the key is no PEM".to_owned();
    proxy.says(&entry, WebhookState { port_taken: true, certificate_read: false, error }).await;
    let message = until_condition(client, "False", "NoCertificate").await;
    assert!(message.contains("op-0") && message.contains("the key is no PEM"), "{message}");
    let routed = WebhookState { port_taken: true, certificate_read: true, error: String::new() };
    proxy.says(&entry, routed.clone()).await;
    until_condition(client, "True", "Routed").await;

    // It comes back, and says it first.
    drop(proxy);
    let error = "find its addresses".to_owned();
    let known = PolicySummary {
        pod: entry.pod.clone(),
        digest: entry.digest,
        epoch,
        operator: entry.operator.clone(),
        version: entry.version,
        webhook: Some(WebhookState { port_taken: false, certificate_read: false, error }),
    };
    let proxy = bed.connect(Hello { known: vec![known], ..of_node("node-a") }).await;
    let message = until_condition(client, "False", "PortNotTaken").await;
    assert!(message.contains("9443") && message.contains("find its addresses"), "{message}");
    proxy.says(&entry, routed).await;
    until_condition(client, "True", "Routed").await;
}
