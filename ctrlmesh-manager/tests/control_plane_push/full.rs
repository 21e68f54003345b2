//! All of it: a root is applied, and each proxy shows its own part; without the manager, too.

use std::collections::BTreeSet;
use std::fs;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bed::{AUDIENCE, eventually};
use crate::follow::operator;
use crate::process::{Place, Replica, Sidecar};
use crate::token;

/// Where the manager is.
const SYSTEM: &str = "ctrlmesh-system";

/// Where the operator is.
const OPERATOR: &str = "ops";

/// Namespaces with an object each.
const TEAMS: [&str; 8] =
    ["team-0", "team-1", "team-2", "team-3", "team-4", "team-5", "team-6", "team-7"];

/// What the root divides.
const ROOT: &str = "op-root";

type Teams = BTreeSet<String>;

async fn world(client: &Client) {
    let names = [SYSTEM, OPERATOR].into_iter().chain(TEAMS);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for name in names {
        let one = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        namespaces.create(&PostParams::default(), &one).await.unwrap();
    }
    let list = json!({
        "metadata": {"name": "ctrlmesh-sharding-resource"},
        "data": {"resource-config": "groupVersionKinds: {v1: [ConfigMap]}"},
    });
    create(client, SYSTEM, list).await;
    for team in TEAMS {
        create(client, team, json!({"metadata": {"name": "object"}})).await;
    }
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let binding = json!({
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": OPERATOR}],
    });
    let binding = serde_json::from_value(binding).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
}

async fn create(client: &Client, namespace: &str, map: Value) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
}

async fn divide(client: &Client, root: Value) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let config = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "ShardingConfig",
        "metadata": {"name": ROOT},
        "spec": {"controller": {"leaderElectionName": "op"}, "root": root},
    });
    let force = PatchParams::apply("test").force();
    roots.patch(ROOT, &force, &Patch::Apply(&config)).await.unwrap();
}

/// The namespaces whose object it sees.
async fn seen(client: &Client) -> Option<Teams> {
    let maps: Api<ConfigMap> = Api::all(client.clone());
    let objects = ListParams::default().fields("metadata.name=object");
    let list = maps.list(&objects).await.ok()?;
    Some(list.items.into_iter().filter_map(|map| map.metadata.namespace).collect())
}

/// What both see, as soon as each object is seen by exactly one of them, and each sees some, as `is` says.
async fn parted(clients: &[Client; 2], is: impl Fn(&Teams, &Teams) -> bool) -> [Teams; 2] {
    eventually("each object to be seen by one", async || {
        let [one, two] = [seen(&clients[0]).await?, seen(&clients[1]).await?];
        let whole = one.union(&two).count() == TEAMS.len() && one.is_disjoint(&two);
        (whole && !one.is_empty() && !two.is_empty() && is(&one, &two)).then_some([one, two])
    })
    .await
}

/// Whether status says of every pod that it has the newest epoch.
async fn programmed(client: &Client) -> Option<()> {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let list = roots.list(&ListParams::default()).await.ok()?;
    let root = list.items.iter().find(|config| config.name_any() == ROOT)?;
    let epoch = root.status.as_ref()?.epoch?;
    let pods: Vec<_> = list
        .items
        .iter()
        .filter(|config| config.name_any() != ROOT)
        .flat_map(|config| config.status.iter().flat_map(|status| &status.pods))
        .collect();
    let all = pods.len() == 2 && pods.iter().all(|pod| pod.epoch.is_some_and(|own| own <= epoch));
    all.then_some(())
}

async fn believed(client: &Client, place: &Place) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    let data = eventually("the authorities", async || {
        maps.get_opt("ctrlmesh-root-ca").await.unwrap()?.data
    })
    .await;
    fs::write(place.folder.join("manager.crt"), &data["manager-ca.crt"]).unwrap();
    fs::write(place.folder.join("mesh.crt"), &data["ca.crt"]).unwrap();
}

#[tokio::test]
async fn a_root_is_applied_changed_and_holds_without_the_manager() {
    let plane = ControlPlane::start(&Options::default()).unwrap();
    let client = plane.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let mut replica = Replica::start(&plane, SYSTEM, &[]).await;
    replica.until_ready().await;
    divide(&client, json!({
        "prefix": "op", "targetStatefulSet": "op", "auto": {"shardingSize": 2, "everyShardReplicas": 1},
        "resourceSelector": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}],
    }))
    .await;
    let mut pods = Vec::new();
    for name in ["op-0", "op-1"] {
        pods.push(token::pod(&client, OPERATOR, name, "operator", "node-a").await);
    }
    let place = Place {
        url: plane.url().to_owned(),
        ca: plane.ca().to_owned(),
        manager: replica.grpc,
        folder: folder.path().to_owned(),
    };
    believed(&client, &place).await;
    let (mut sidecars, mut clients) = (Vec::new(), Vec::new());
    for pod in &pods {
        let token = pod.token(&client, AUDIENCE).await;
        let sidecar = Sidecar::start(&place, pod, &token).await;
        clients.push(operator(&client, &place, pod, &sidecar).await);
        sidecars.push(sidecar);
    }
    let mut clients: [Client; 2] = clients.try_into().unwrap_or_else(|_| unreachable!());
    parted(&clients, |_, _| true).await;

    divide(&client, json!({
        "prefix": "op", "targetStatefulSet": "op", "auto": {"shardingSize": 1, "everyShardReplicas": 1},
        "canary": {"replicas": 1, "inNamespaces": ["team-3"]},
        "resourceSelector": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}],
    }))
    .await;
    let canary: Teams = ["team-3".to_owned()].into();
    parted(&clients, |one, _| *one == canary).await;
    eventually("status to say so", async || programmed(&client).await).await;

    replica.program().kill();
    parted(&clients, |one, _| *one == canary).await;
    for (at, pod) in pods.iter().enumerate() {
        sidecars[at].kill();
        sidecars[at] = Sidecar::start_again(&place, pod).await;
        clients[at] = operator(&client, &place, pod, &sidecars[at]).await;
    }
    parted(&clients, |one, _| *one == canary).await;

    let address = replica.grpc.to_string();
    let again = Replica::start(&plane, SYSTEM, &["--listen-grpc", &address]).await;
    again.until_ready().await;
    for sidecar in &sidecars {
        eventually("the proxy to be back", async || {
            (sidecar.metric("ctrlmesh_proxy_manager_connected").await > 0.0).then_some(())
        })
        .await;
    }
    parted(&clients, |one, _| *one == canary).await;
}
