//! The objects of the benchmark: nodes with their proxies, and operators, each with an elastic root and a StatefulSet.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::{self, Instant};
use xtask::tools;

use crate::harness;
use crate::harness::running::Manager;
use crate::operators::{self, Operators};
use crate::pods::{Kubelets, ROUND};
use crate::proxies::Node;
use crate::simulated::SYSTEM;
use crate::simulated::token::Signer;
use crate::{LOOK_EVERY, send};

/// Pods of one operator.
pub(crate) const REPLICAS: usize = 5;

/// Operators' pods on one node.
const ON_ONE_NODE: usize = 10;

/// How many writes are under way at once.
const AT_ONCE: usize = 16;

/// The account of the nodes' proxies.
const NODE_ACCOUNT: &str = "ctrlmesh-node";

/// What kwok does.
const STAGES: &str = include_str!("stages.yaml");

/// Within which all pods are to be ready, for each thousand of them and for the first ones.
const READY_WITHIN: Duration = Duration::from_mins(5);

/// A running cluster.
pub(crate) struct Cluster {
    // Dropped in this order.
    _kubelets: Kubelets,
    pub(crate) manager: Manager,
    _kwok: Manager,
    pub(crate) plane: ControlPlane,
    pub(crate) client: Client,
    pub(crate) operators: Arc<Operators>,
    pub(crate) nodes: Vec<Node>,
    /// Where the manager listens for proxies.
    pub(crate) address: SocketAddr,
}

impl Cluster {
    /// Starts one with about so many pods of operators, and waits until they are ready.
    pub(crate) async fn start(pods: usize) -> Self {
        let plane = control_plane();
        let client = plane.client().await.unwrap();
        harness::install(&client).await.unwrap();
        let operators = Arc::new(Operators::new(pods.div_ceil(REPLICAS), REPLICAS));
        make_namespaces(&client, operators.count()).await;
        let nodes = make_nodes(&plane, &client, pods.div_ceil(ON_ONE_NODE).max(REPLICAS)).await;
        let kwok = simulate(&plane);
        let address = crate::simulated::free_address();
        let more = [&*format!("--listen-grpc={address}"), "--webhook-host=127.0.0.1"];
        let manager = Manager::start(&plane, SYSTEM, &more).unwrap();
        admit_by(&manager, &client).await;
        let names = nodes.iter().map(|node| node.name.clone()).collect();
        let kubelets = Kubelets::start(client.clone(), operators.clone(), names);
        let this = Self { _kubelets: kubelets, manager, _kwok: kwok, plane, client, operators, nodes, address };
        this.make_operators().await;
        this.until_ready().await;
        this
    }

    /// How many pods its operators have.
    pub(crate) fn pods(&self) -> usize {
        self.operators.count() * REPLICAS
    }

    async fn make_operators(&self) {
        let make = async |number: usize| {
            let namespace = operators::namespace(number);
            apply(&self.client, &root_path(&namespace), &root(number)).await;
            apply(&self.client, &sets_path(&namespace), &stateful_set(number, 0)).await;
        };
        stream::iter(0..self.operators.count()).map(make).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    }

    /// Restarts the pods of all operators, each operator's one after the other.
    pub(crate) async fn restart_all(&self, round: u32) {
        let change = json!({"spec": {"template": {"metadata": {"annotations": {ROUND: round.to_string()}}}}});
        let change = &change;
        let restart = async |number: usize| {
            let path = format!("{}/{}", sets_path(&operators::namespace(number)), operators::name(number));
            retry(|| send(&self.client, "PATCH", &path, change)).await.unwrap();
        };
        stream::iter(0..self.operators.count()).map(restart).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    }

    async fn until_ready(&self) {
        let begun = Instant::now();
        let within = READY_WITHIN * u32::try_from(self.pods().div_ceil(1000)).unwrap();
        loop {
            let ready = self.operators.ready(0);
            if ready == self.pods() {
                break;
            }
            assert!(begun.elapsed() < within, "{ready} of {} pods are ready\n{}", self.pods(), self.manager.log());
            time::sleep(LOOK_EVERY).await;
        }
        eprintln!("{} pods on {} nodes ready after {:.1?}", self.pods(), self.nodes.len(), begun.elapsed());
    }
}

/// Of controllers only those run that are needed: nodes are simulated, and nothing looks after them.
fn control_plane() -> ControlPlane {
    let arguments = [
        "--controllers=serviceaccount-controller,root-ca-certificate-publisher-controller,statefulset-controller",
        "--concurrent-statefulset-syncs=16",
        "--kube-api-qps=5000",
        "--kube-api-burst=5000",
    ];
    let arguments = arguments.map(str::to_owned).to_vec();
    let options = Options { controller_manager: true, controller_manager_arguments: arguments, ..Options::default() };
    ControlPlane::start(&options).unwrap()
}

async fn make_namespaces(client: &Client, operators: usize) {
    let mut names: Vec<String> = (0..operators).map(operators::namespace).collect();
    names.dedup();
    for name in names.iter().map(String::as_str).chain([SYSTEM]) {
        apply(client, "/api/v1/namespaces", &object("v1", "Namespace", name)).await;
    }
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), names.last().unwrap());
    // Pods are refused before it is there.
    retry(|| accounts.get("default")).await.unwrap();
}

/// Nodes, and on each the pod of its proxy.
async fn make_nodes(plane: &ControlPlane, client: &Client, count: usize) -> Vec<Node> {
    let accounts = format!("/api/v1/namespaces/{SYSTEM}/serviceaccounts");
    apply(client, &accounts, &object("v1", "ServiceAccount", NODE_ACCOUNT)).await;
    let signer = Signer::of(plane, client, SYSTEM, NODE_ACCOUNT).await;
    let signer = &signer;
    let make = async |number: usize| {
        let name = format!("node-{number}");
        let node = apply(client, "/api/v1/nodes", &object("v1", "Node", &name)).await;
        let mut pod = object("v1", "Pod", &format!("proxy-{number}"));
        pod["spec"] = json!({"serviceAccountName": NODE_ACCOUNT, "nodeName": name,
            "containers": [{"name": "proxy", "image": "none"}]});
        let pod = apply(client, &format!("/api/v1/namespaces/{SYSTEM}/pods"), &pod).await;
        let token = signer.token(named(&pod), Some(named(&node)));
        Node { name, token }
    };
    stream::iter(0..count).map(make).buffered(AT_ONCE).collect().await
}

/// Starts kwok.
fn simulate(plane: &ControlPlane) -> Manager {
    let config = plane.folder().join("kwok.yaml");
    std::fs::write(&config, STAGES).unwrap();
    let of = |name: &str, file: &Path| format!("--{name}={}", file.display());
    let arguments = [
        of("kubeconfig", &plane.kubeconfig()),
        of("config", &config),
        "--manage-all-nodes=true".to_owned(),
        // Nobody looks at the leases.
        "--node-lease-duration-seconds=0".to_owned(),
    ];
    let program = tools::kwok();
    assert!(program.is_file(), "kwok is not there: run `cargo xtask bench scale`");
    Manager::start_program(&program, &arguments).unwrap()
}

/// Has the manager admit enrolled pods, as in a cluster.
async fn admit_by(manager: &Manager, client: &Client) {
    let address = manager.address("webhooks").await.unwrap();
    manager.said("message", "ready").await.unwrap();
    let mut hooks = object("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "ctrlmesh");
    hooks["metadata"]["labels"] = json!({"app.kubernetes.io/part-of": "ctrlmesh"});
    hooks["webhooks"] = json!([{
        "name": "inject.ctrlmesh.kusionstack.io", "sideEffects": "NoneOnDryRun", "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail", "clientConfig": {"url": format!("https://{address}/inject")},
        "objectSelector": {"matchLabels": {label::ENABLE_PROXY: "true"}},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
    }]);
    let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
    apply(client, path, &hooks).await;
    // The manager says whom the API server is to believe.
    retry(|| async {
        let hooks = send(client, "GET", &format!("{path}/ctrlmesh"), &Value::Null).await?;
        anyhow::ensure!(hooks["webhooks"][0]["clientConfig"]["caBundle"].is_string(), "no CA yet");
        Ok(())
    })
    .await
    .unwrap();
}

fn root(number: usize) -> Value {
    let name = operators::name(number);
    let mut root = object("ctrlmesh.kusionstack.io/v1alpha1", "ShardingConfig", &name);
    root["spec"] = json!({
        "controller": {"leaderElectionName": name},
        "root": {
            "prefix": name, "targetStatefulSet": name, "fence": "Proxy",
            // A pod that comes back gets its slots at once.
            "auto": {"shardingSize": REPLICAS, "elastic": {"settle": "0s"}},
            "resourceSelector": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}],
        },
    });
    root
}

fn stateful_set(number: usize, round: u32) -> Value {
    let name = operators::name(number);
    let mut set = object("apps/v1", "StatefulSet", &name);
    set["spec"] = json!({
        "serviceName": name, "replicas": REPLICAS, "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": name}},
        "template": {
            "metadata": {
                "labels": {"app": name, label::ENABLE_PROXY: "true"}, "annotations": {ROUND: round.to_string()},
            },
            "spec": {"containers": [{"name": "operator", "image": "none"}]},
        },
    });
    set
}

fn root_path(namespace: &str) -> String {
    format!("/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/{namespace}/shardingconfigs")
}

fn sets_path(namespace: &str) -> String {
    format!("/apis/apps/v1/namespaces/{namespace}/statefulsets")
}

fn object(version: &str, kind: &str, name: &str) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}})
}

fn named(object: &Value) -> (&str, &str) {
    let text = |field: &str| object["metadata"][field].as_str().unwrap();
    (text("name"), text("uid"))
}

/// Makes an object of a collection.
async fn apply(client: &Client, collection: &str, object: &Value) -> Value {
    retry(|| send(client, "POST", collection, object)).await.unwrap()
}
