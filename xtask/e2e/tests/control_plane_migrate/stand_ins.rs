//! What the bed does not have: a kubelet that says that pods are ready, and the predecessor's manager.
#![allow(clippy::disallowed_methods, reason = "a stand-in ends when its test drops it, and not by a drain")]

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::FINALIZER;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time;

use crate::bed::{collection, merge};
use crate::harness::NAMESPACE as SYSTEM;
use crate::harness::running::Manager;
use crate::predecessor::{NAMESPACE, OPERATOR};
use ctrlmesh_testbed::ControlPlane;

const PERIOD: Duration = Duration::from_millis(100);

/// Ends with the test.
pub(crate) struct StandIn(JoinHandle<()>);

impl Drop for StandIn {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Says of each pod that it is ready.
pub(crate) fn kubelet(client: Client) -> StandIn {
    StandIn(tokio::spawn(async move {
        let pods: Api<Pod> = Api::all(client.clone());
        let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        loop {
            for pod in pods.list(&ListParams::default()).await.into_iter().flatten() {
                let is_running = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
                if !is_running {
                    let of: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
                    // The pod may be gone.
                    drop(of.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&ready)).await);
                }
            }
            time::sleep(PERIOD).await;
        }
    }))
}

/// Gives roots and breakers their finalizer again and again, for as long as its Deployment has replicas.
pub(crate) fn predecessors_manager(client: Client) -> StandIn {
    StandIn(tokio::spawn(async move {
        loop {
            if replicas(&client, NAMESPACE, "ctrlmesh").await > 0 {
                for plural in ["shardingconfigs", "circuitbreakers"] {
                    hold(&client, plural).await;
                }
            }
            time::sleep(PERIOD).await;
        }
    }))
}

async fn hold(client: &Client, plural: &str) {
    let path = collection("ctrlmesh.kusionstack.io", plural);
    for object in crate::bed::items(client, &path).await.unwrap_or_default() {
        let is_child = plural == "shardingconfigs" && object.pointer("/spec/root").is_none();
        let finalizers = object.pointer("/metadata/finalizers").and_then(Value::as_array).cloned().unwrap_or_default();
        if is_child || finalizers.contains(&json!(FINALIZER)) || object.pointer("/metadata/deletionTimestamp").is_some()
        {
            continue;
        }
        let all: Vec<Value> = finalizers.into_iter().chain([json!(FINALIZER)]).collect();
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let version = &object["metadata"]["resourceVersion"];
        let change = json!({"metadata": {"finalizers": all, "resourceVersion": version}});
        // Somebody else may have changed it.
        drop(merge(client, &format!("{path}/{name}"), &change).await);
    }
}

/// Runs our real manager while its Deployment has replicas, as a kubelet would.
pub(crate) fn our_manager(plane: Arc<ControlPlane>, client: Client, flags: Vec<String>) -> StandIn {
    StandIn(tokio::spawn(async move {
        let mut manager: Option<Manager> = None;
        loop {
            let wanted = replicas(&client, SYSTEM, "ctrlmesh-manager").await > 0;
            if wanted && manager.is_none() {
                let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
                manager = Manager::start(&plane, SYSTEM, &flags).ok();
            }
            if !wanted {
                manager = None;
            }
            time::sleep(PERIOD).await;
        }
    }))
}

async fn replicas(client: &Client, namespace: &str, name: &str) -> i32 {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let deployment = deployments.get_opt(name).await.ok().flatten();
    deployment.and_then(|deployment| deployment.spec?.replicas).unwrap_or_default()
}

/// How many of the operator's pods our webhook has let in, and how many there are.
pub(crate) async fn injected(client: &Client) -> kube::Result<(usize, usize)> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), OPERATOR);
    let pods = pods.list(&ListParams::default()).await?.items;
    let is_injected = |pod: &&Pod| pod.annotations().contains_key("ctrlmesh.kusionstack.io/injected");
    Ok((pods.iter().filter(is_injected).count(), pods.len()))
}
