//! What canary upgrades ask for, by the functions that ask for it.

use ctrlmesh_common::names::{self, label};
use ctrlmesh_manager::rollout::gate::{self, GateState};
use ctrlmesh_manager::rollout::workload::{RollBack, Workload, replace_stuck, roll_back};
use ctrlmesh_manager::rules::pod::PodName;
use http::HeaderValue;
use http::header::USER_AGENT;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::audit::PROGRAM;
use crate::full::TEAMS;
use crate::token;

const NAMESPACE: &str = TEAMS[0];

/// Says of two pods that they are not promoted, rolls two workloads of each kind back, and deletes the pods. `folder`
/// has the managers' kubeconfig.
pub(super) async fn rollouts(client: &Client, folder: &TempDir) {
    let manager = manager(folder).await;
    for name in ["web-a", "web-b"] {
        deployment(client, &manager, name).await;
        stateful_set(client, &manager, name).await;
        pod(client, &manager, name).await;
    }
}

/// The managers' own client, to the API server.
async fn manager(folder: &TempDir) -> Client {
    let file = Kubeconfig::read_from(folder.path().join("kubeconfig")).unwrap();
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    config.headers.push((USER_AGENT, HeaderValue::from_static(PROGRAM)));
    Client::try_from(config).unwrap()
}

async fn deployment(client: &Client, manager: &Client, name: &str) {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let labels = json!({"app": name, label::ENABLE_PROXY: "true"});
    let spec = json!({"selector": {"matchLabels": labels}, "template": template(&labels, "b")});
    let there = create(&deployments, json!({"metadata": {"name": name}, "spec": spec})).await;
    let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), NAMESPACE);
    for (hash, image) in [("1", "a"), ("2", "b")] {
        let labels = json!({"app": name, label::ENABLE_PROXY: "true", "pod-template-hash": hash});
        let metadata = owned(&format!("{name}-{hash}"), "Deployment", &there, &labels);
        let spec = json!({"selector": {"matchLabels": labels}, "template": template(&labels, image)});
        create(&sets, json!({"metadata": metadata, "spec": spec})).await;
    }
    let workload = Workload::Deployment(name.to_owned());
    let done = roll_back(manager, NAMESPACE, &workload, "2", "1").await.unwrap();
    assert_eq!(done, RollBack::RolledBack);
    let spec = deployments.get(name).await.unwrap().spec.unwrap();
    let template = serde_json::to_value(&spec.template).unwrap();
    assert_eq!(template["metadata"]["labels"], labels);
    assert_eq!(template["spec"]["containers"][0]["image"], "a");
    let again = roll_back(manager, NAMESPACE, &workload, "2", "1").await.unwrap();
    assert_eq!(again, RollBack::NotCurrent);
}

async fn stateful_set(client: &Client, manager: &Client, name: &str) {
    let sets: Api<StatefulSet> = Api::namespaced(client.clone(), NAMESPACE);
    let labels = json!({"app": name, label::ENABLE_PROXY: "true"});
    let spec = json!({"serviceName": name, "selector": {"matchLabels": labels}, "template": template(&labels, "b")});
    let there = create(&sets, json!({"metadata": {"name": name}, "spec": spec})).await;
    let revisions: Api<ControllerRevision> = Api::namespaced(client.clone(), NAMESPACE);
    let earlier = format!("{name}-1");
    let mut kept = template(&labels, "a");
    kept["$patch"] = json!("replace");
    let metadata = owned(&earlier, "StatefulSet", &there, &labels);
    let revision = json!({"metadata": metadata, "data": {"spec": {"template": kept}}, "revision": 1});
    create(&revisions, revision).await;
    // As its controller does.
    let current = format!("{name}-2");
    let status = json!({"replicas": 0, "observedGeneration": there.metadata.generation, "updateRevision": current});
    let status = Patch::Merge(json!({ "status": status }));
    sets.patch_status(name, &PatchParams::default(), &status).await.unwrap();
    let workload = Workload::StatefulSet(name.to_owned());
    let done = roll_back(manager, NAMESPACE, &workload, &current, &earlier).await.unwrap();
    assert_eq!(done, RollBack::RolledBack);
    let spec = sets.get(name).await.unwrap().spec.unwrap();
    let template = serde_json::to_value(&spec.template).unwrap();
    assert_eq!(template["spec"]["containers"][0]["image"], "a");
}

async fn pod(client: &Client, manager: &Client, name: &str) {
    let uid = token::pod(client, NAMESPACE, name, "operator", "node-a").await.uid;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let pod = PodName { namespace: NAMESPACE.to_owned(), name: name.to_owned() };
    let other = Patch::Merge(json!({"status": {"conditions": [{"type": "Other", "status": "True"}]}}));
    pods.patch_status(name, &PatchParams::default(), &other).await.unwrap();
    let state = GateState { holds: false, reason: "Trial".to_owned(), message: "not yet".to_owned() };
    gate::set(manager, &pod, "another", &state).await.unwrap_err();
    gate::set(manager, &pod, &uid, &state).await.unwrap();
    let state = GateState { holds: true, ..state };
    gate::set(manager, &pod, &uid, &state).await.unwrap();
    gate::set_deletion_cost(manager, &pod, &uid, Some(-1)).await.unwrap();
    let there = pods.get(name).await.unwrap();
    assert_eq!(there.annotations()["controller.kubernetes.io/pod-deletion-cost"], "-1");
    let conditions = there.status.unwrap().conditions.unwrap();
    let of = |kind: &str| conditions.iter().filter(|one| one.type_ == kind).map(|one| &*one.status).collect::<Vec<_>>();
    assert_eq!((of(names::PROMOTED), of("Other")), (vec!["True"], vec!["True"]));
    gate::set_deletion_cost(manager, &pod, &uid, None).await.unwrap();
    replace_stuck(manager, &pod, "another").await.unwrap();
    let there = pods.get(name).await.unwrap();
    assert!(there.annotations().keys().all(|key| !key.contains("cost")) && there.metadata.deletion_timestamp.is_none());
    replace_stuck(manager, &pod, &uid).await.unwrap();
    let left = pods.get_opt(name).await.unwrap();
    assert!(left.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()));
}

fn template(labels: &Value, image: &str) -> Value {
    json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "web", "image": image}]}})
}

fn owned<K: Resource>(name: &str, kind: &str, owner: &K, labels: &Value) -> Value {
    let (owner_name, uid) = (owner.name_any(), owner.uid());
    let owner = json!({"apiVersion": "apps/v1", "kind": kind, "name": owner_name, "uid": uid, "controller": true});
    json!({"name": name, "labels": labels, "ownerReferences": [owner]})
}

async fn create<K: Clone + std::fmt::Debug + DeserializeOwned + Serialize>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}
