//! Our accounts, with every right there is, may do no more than our programs do.

use std::fmt::Debug;

use ctrlmesh_common::names::{NOT_READY_TAINT, label};
use ctrlmesh_manager::install::rbac::{ACCOUNT, BACKGROUND, NAMESPACE};
use ctrlmesh_testbed::{ControlPlane, Options};
use http::HeaderName;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::bed::eventually;
use crate::full::{OPERATOR, world};
use crate::rights::installed::{ACCOUNT_POLICIES, NODE_POLICY, apply};
use crate::token;

const IMAGE: &str = "example.com/operator:1";

/// Where a token is bound to a pod, its node's name is in the user's extra fields, by this key.
const OF_NODE: &str = "impersonate-extra-authentication.kubernetes.io%2fnode-name";

/// The account of node proxies.
const NODE: &str = "ctrlmesh-node";

/// The API server as `account` of the managers sees it.
async fn as_account(cluster: &ControlPlane, account: &str) -> Client {
    as_account_with(cluster, account, None).await
}

/// The same, where the account's token is bound to a pod on `node`.
async fn as_account_with(cluster: &ControlPlane, account: &str, node: Option<&str>) -> Client {
    let file = Kubeconfig::read_from(cluster.kubeconfig()).unwrap();
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    let user = format!("system:serviceaccount:{NAMESPACE}:{account}");
    config.headers.push((HeaderName::from_static("impersonate-user"), user.parse().unwrap()));
    if let Some(node) = node {
        config.headers.push((HeaderName::from_static(OF_NODE), node.parse().unwrap()));
    }
    Client::try_from(config).unwrap()
}

/// All accounts may do everything, by RBAC.
async fn grant_everything(client: &Client) {
    let subject = |name| json!({"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE});
    let binding = json!({
        "metadata": {"name": "everything"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [subject(ACCOUNT), subject(BACKGROUND), subject(NODE)],
    });
    let binding: ClusterRoleBinding = serde_json::from_value(binding).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &binding).await.unwrap();
}

/// Demands that a policy of ours refuses it.
#[track_caller]
fn refused<T: Debug>(what: &str, answer: kube::Result<T>) {
    match answer {
        Err(kube::Error::Api(status)) if status.message.contains("denied request: ctrlmesh-") => {}
        other => panic!("{what}: {other:?}"),
    }
}

async fn patch<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str, patch: Value) -> kube::Result<K> {
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await
}

async fn create<K>(api: &Api<K>, object: Value) -> kube::Result<K>
where
    K: Clone + DeserializeOwned + Serialize + Debug,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await
}

fn labels(labels: Value) -> Value {
    json!({"metadata": {"labels": labels}})
}

/// A policy works a moment after it is written.
async fn working(manager: &Client) {
    let maps: Api<ConfigMap> = Api::namespaced(manager.clone(), OPERATOR);
    let map = serde_json::from_value(json!({"metadata": {"name": "any"}})).unwrap();
    let trial = PostParams { dry_run: true, ..PostParams::default() };
    eventually("the policies to work", async || maps.create(&trial, &map).await.err()).await;
}

async fn started() -> (ControlPlane, Client) {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    grant_everything(&client).await;
    apply(&client, ACCOUNT_POLICIES).await;
    apply(&client, NODE_POLICY).await;
    (cluster, client)
}

#[tokio::test]
async fn whoever_has_the_managers_account_runs_no_other_pods() {
    let (cluster, client) = started().await;
    let manager = as_account(&cluster, ACCOUNT).await;
    for name in ["enrolled", "other"] {
        token::pod(&client, OPERATOR, name, "operator", "node-a").await;
    }
    let everyone: Api<Pod> = Api::namespaced(client.clone(), OPERATOR);
    patch(&everyone, "other", labels(json!({label::ENABLE_PROXY: null}))).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(manager.clone(), OPERATOR);
    let container = json!({"spec": {"containers": [{"name": "operator", "image": "example.com/evil:1"}]}});
    let image = Patch::Strategic(container);
    working(&manager).await;
    refused("another image", pods.patch("other", &PatchParams::default(), &image).await);
    refused("another label", patch(&pods, "enrolled", labels(json!({"app": "other"}))).await);
    refused("enrolled no more", patch(&pods, "enrolled", labels(json!({label::ENABLE_PROXY: null}))).await);
    let note = json!({"metadata": {"annotations": {"example.com/a": "b"}}});
    refused("another annotation", patch(&pods, "enrolled", note).await);
    let shard = labels(json!({label::SHARDING_CONFIG_INJECTED: "op-1-normal"}));
    patch(&pods, "enrolled", shard).await.unwrap();

    let condition = |kind: &str| json!({"conditions": [{"type": kind, "status": "True"}]});
    let status = async |status: Value| {
        let status = Patch::Strategic(json!({ "status": status }));
        pods.patch_status("enrolled", &PatchParams::default(), &status).await
    };
    refused("another address", status(json!({"podIP": "192.0.2.1"})).await);
    refused("ready", status(condition("Ready")).await);
    status(condition("ctrlmesh.kusionstack.io/promoted")).await.unwrap();
    refused("another pod's end", pods.delete("other", &DeleteParams::default()).await);
    pods.delete("enrolled", &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn whoever_has_the_managers_account_writes_no_other_objects() {
    let (cluster, client) = started().await;
    let manager = as_account(&cluster, ACCOUNT).await;
    let map = |name: &str, key: &str| json!({"metadata": {"name": name}, "data": {key: "x"}});
    let maps: Api<ConfigMap> = Api::namespaced(manager.clone(), OPERATOR);
    working(&manager).await;
    refused("any ConfigMap", create(&maps, map("any", "a")).await);
    refused("another key", create(&maps, map("ctrlmesh-root-ca", "evil")).await);
    create(&maps, map("ctrlmesh-root-ca", "ca.crt")).await.unwrap();
    // What others added stays theirs.
    let everyones: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    patch(&everyones, "ctrlmesh-root-ca", json!({"data": {"theirs.crt": "a"}, "binaryData": {"b": "YQ=="}}))
        .await
        .unwrap();
    patch(&maps, "ctrlmesh-root-ca", json!({"data": {"ca.crt": "y"}})).await.unwrap();
    refused("another's key", patch(&maps, "ctrlmesh-root-ca", json!({"data": {"theirs.crt": "b"}})).await);
    refused("a fence elsewhere", create(&maps, map("ctrlmesh-fence.a.b", "epoch")).await);
    let own: Api<ConfigMap> = Api::namespaced(manager.clone(), NAMESPACE);
    create(&own, map("ctrlmesh-fence.a.b", "epoch")).await.unwrap();
    own.delete("ctrlmesh-fence.a.b", &DeleteParams::default()).await.unwrap();
    refused("the list of kinds", patch(&own, "ctrlmesh-sharding-resource", json!({"data": {"a": "b"}})).await);
    let secrets: Api<Secret> = Api::namespaced(manager.clone(), NAMESPACE);
    refused("any Secret", create(&secrets, json!({"metadata": {"name": "any"}})).await);
    create(&secrets, json!({"metadata": {"name": "ctrlmesh-ca"}})).await.unwrap();
    let leases: Api<Lease> = Api::namespaced(manager.clone(), NAMESPACE);
    refused("any Lease", create(&leases, json!({"metadata": {"name": "any"}})).await);

    let everyones: Api<Deployment> = Api::namespaced(client, OPERATOR);
    let deployments: Api<Deployment> = Api::namespaced(manager, OPERATOR);
    for (name, enrolled) in [("plain", "false"), ("enrolled", "true")] {
        let labels = json!({"app": name, label::ENABLE_PROXY: enrolled});
        let template = json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": IMAGE}]}});
        let spec = json!({"selector": {"matchLabels": {"app": name}}, "template": template});
        create(&everyones, json!({"metadata": {"name": name}, "spec": spec})).await.unwrap();
    }
    let template = json!({"spec": {"template": {"spec": {"serviceAccountName": "other"}}}});
    refused("a workload that is not enrolled", patch(&deployments, "plain", template.clone()).await);
    let note = json!({"metadata": {"annotations": {"a": "b"}}});
    refused("an annotation", patch(&deployments, "enrolled", note).await);
    refused("more than a template", patch(&deployments, "enrolled", json!({"spec": {"replicas": 7}})).await);
    patch(&deployments, "enrolled", template).await.unwrap();
}

#[tokio::test]
async fn whoever_has_the_background_account_only_labels() {
    let (cluster, _client) = started().await;
    let background = as_account(&cluster, BACKGROUND).await;
    let namespaces: Api<Namespace> = Api::all(background.clone());
    let privileged = labels(json!({"pod-security.kubernetes.io/enforce": "privileged"}));
    working(&as_account(&cluster, ACCOUNT).await).await;
    let trial = PatchParams { dry_run: true, ..PatchParams::default() };
    let label = Patch::Merge(privileged.clone());
    eventually("its policy", async || namespaces.patch("team-1", &trial, &label).await.err()).await;
    refused("pod security", patch(&namespaces, "team-2", privileged).await);
    patch(&namespaces, "team-2", labels(json!({label::SHARDING_HASH: "7", "ctrlmesh.kusionstack.io/next-a": "1"})))
        .await
        .unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(background, "team-2");
    refused("its content", patch(&maps, "object", json!({"data": {"a": "b"}})).await);
    let orphan = json!({"metadata": {"finalizers": ["example.com/a"], "labels": {label::CONTROL: "true"}}});
    refused("finalizers", patch(&maps, "object", orphan).await);
    patch(&maps, "object", labels(json!({label::CONTROL: "true", label::NAMESPACE: "team-2"}))).await.unwrap();
    patch(&maps, "object", labels(json!({label::CONTROL: null}))).await.unwrap();
}

#[tokio::test]
async fn whoever_has_a_node_proxys_account_writes_one_label_of_its_node() {
    let (cluster, client) = started().await;
    let everyones: Api<Node> = Api::all(client);
    let ours = json!({"key": NOT_READY_TAINT, "effect": "NoSchedule"});
    let other = json!({"key": "example.com/other", "effect": "NoExecute"});
    for name in ["node-a", "node-b"] {
        let spec = json!({"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24"], "taints": [ours, other]});
        let node = json!({"metadata": {"name": name, "labels": {"example.com/pool": "a"}}, "spec": spec});
        create(&everyones, node).await.unwrap();
    }
    let nodes: Api<Node> = Api::all(as_account_with(&cluster, NODE, Some("node-a")).await);
    let trial = PatchParams { dry_run: true, ..PatchParams::default() };
    let cordon = Patch::Merge(json!({"spec": {"unschedulable": true}}));
    eventually("its policy", async || nodes.patch("node-a", &trial, &cordon).await.err()).await;
    let announced = labels(json!({label::EBPF: "true"}));
    refused("another node", patch(&nodes, "node-b", announced.clone()).await);
    let unbound: Api<Node> = Api::all(as_account(&cluster, NODE).await);
    refused("a token of no pod", patch(&unbound, "node-a", announced.clone()).await);
    refused("another label", patch(&nodes, "node-a", labels(json!({"example.com/pool": "b"}))).await);
    refused("a label gone", patch(&nodes, "node-a", labels(json!({"example.com/pool": null}))).await);
    let note = json!({"metadata": {"annotations": {"example.com/a": "b"}}});
    refused("an annotation", patch(&nodes, "node-a", note).await);
    refused("cordoned", patch(&nodes, "node-a", json!({"spec": {"unschedulable": true}})).await);
    // The API server has given it one more.
    let all = everyones.get("node-a").await.unwrap().spec.unwrap().taints.unwrap();
    let without = |key: &str| all.iter().filter(|taint| taint.key != key).cloned().collect::<Vec<_>>();
    let left = without(NOT_READY_TAINT);
    assert_eq!(left.len(), all.len() - 1);
    refused(
        "another's taint gone",
        patch(&nodes, "node-a", json!({"spec": {"taints": without("example.com/other")}})).await,
    );
    let more = json!({"key": "example.com/more", "effect": "NoExecute"});
    let added: Vec<Value> = all.iter().map(|taint| json!(taint)).chain([more]).collect();
    refused("a new taint", patch(&nodes, "node-a", json!({"spec": {"taints": added}})).await);
    patch(&nodes, "node-a", announced).await.unwrap();
    patch(&nodes, "node-a", json!({"spec": {"taints": left}})).await.unwrap();
    let labelled = everyones.get("node-a").await.unwrap();
    assert_eq!(labelled.metadata.labels.unwrap()[label::EBPF], "true");
    assert_eq!(labelled.spec.unwrap().taints.unwrap(), left);
}
