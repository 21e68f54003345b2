//! Alerts of what a manager cannot do, and of versions that it tries, fire in a real Prometheus until that is over.

use ctrlmesh_common::api::TrialPhase;
use ctrlmesh_common::names::{CA_SECRET, resource_list};
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bed::eventually;
use crate::commands::printed;
use crate::full::{ROOT, SYSTEM, divide_with, world};
use crate::observability::{job, until_fires, with_short_windows};
use crate::process::Replica;
use crate::prometheus::Prometheus;
use crate::rollout_commands::{NEW, begin_trial, is_in, until};
use crate::unwritten::{let_again, refuse, restricted, until_refused};

/// A list of kinds that has a typing error.
const BROKEN_LIST: &str = "groupVersionKinds: [";

const LIST: &str = "groupVersionKinds: {v1: [ConfigMap]}";

/// Somebody breaks the list of kinds, and mends it. A kind that may not be labelled is another alert: a ShardingConfig
/// is degraded then.
async fn list_that_cannot_be_read(prometheus: &Prometheus, client: &Client) {
    let lists: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
    for (list, fires) in [(LIST, false), (BROKEN_LIST, true), (LIST, false)] {
        let list = Patch::Merge(json!({"data": {resource_list::KEY: list}}));
        lists.patch(resource_list::NAME, &PatchParams::default(), &list).await.unwrap();
        until_fires(prometheus, "CtrlmeshLabelsUnfinished", fires).await;
    }
}

/// Somebody deletes the Secret of the authorities, and admission refuses it from the manager.
async fn authorities_that_are_refused(prometheus: &Prometheus, client: &Client, kubeconfig: &str) {
    until_fires(prometheus, "CtrlmeshCaNotWritten", false).await;
    refuse(client).await;
    until_refused(kubeconfig).await;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    secrets.delete(CA_SECRET, &DeleteParams::default()).await.unwrap();
    until_fires(prometheus, "CtrlmeshCaNotWritten", true).await;
    let_again(client).await;
    eventually("the Secret to be there again", async || secrets.get_opt(CA_SECRET).await.unwrap()).await;
    until_fires(prometheus, "CtrlmeshCaNotWritten", false).await;
}

/// Applies a root whose versions are checked by how many targets the Prometheus server reaches.
async fn try_versions(client: &Client, prometheus: &Prometheus, range: Value) {
    let provider = json!({"address": format!("http://{}", prometheus.address), "query": "sum(up)"});
    let metric = json!({"name": "up", "provider": {"prometheus": provider}, "thresholdRange": range});
    let steps = json!([{"slots": 1, "pause": "Manual", "shadow": true}]);
    let analysis = json!({"interval": "10s", "failureLimit": 0, "metrics": [metric]});
    let rule = json!({"steps": steps, "analysis": analysis, "onFailure": "Hold"});
    divide_with(client, "Proxy", 2, Some(("rollout", rule))).await;
}

/// A version fails its check, is held, and is tried again.
async fn version_that_fails(prometheus: &Prometheus, client: &Client, cluster: &ControlPlane) {
    try_versions(client, prometheus, json!({"max": "0.5"})).await;
    begin_trial(client).await;
    for alert in ["CtrlmeshRolloutFailed", "CtrlmeshRolloutWaits"] {
        until_fires(prometheus, alert, true).await;
    }
    until(client, "the version to be held", |status| is_in(status, TrialPhase::Held)).await;
    try_versions(client, prometheus, json!({"min": "1"})).await;
    printed(cluster, &["rollout", "promote", ROOT, "--revision", NEW]);
    for alert in ["CtrlmeshRolloutFailed", "CtrlmeshRolloutWaits"] {
        until_fires(prometheus, alert, false).await;
    }
    until(client, "the version to be tried again", |status| is_in(status, TrialPhase::Analysing)).await;
}

#[tokio::test]
async fn alerts_of_managers_fire_and_end() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let kubeconfig = restricted(&cluster, &client, &folder).await;
    let replica = Replica::start(&cluster, SYSTEM, &["--kubeconfig", &kubeconfig]).await;
    replica.until_ready().await;
    let prometheus = Prometheus::start(&[job("manager", &[replica.metrics.to_string()])], &with_short_windows()).await;
    list_that_cannot_be_read(&prometheus, &client).await;
    authorities_that_are_refused(&prometheus, &client, &kubeconfig).await;
    version_that_fails(&prometheus, &client, &cluster).await;
}
