//! Pods, and tokens that are bound to them.

use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_testbed::ControlPlane;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::simulated::token::Signer;

/// How many are made at once.
const AT_ONCE: usize = 16;

/// A pod and its token.
#[derive(Clone, Debug)]
pub(crate) struct OnePod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) token: String,
}

/// Makes a pod for each of `apps`, labelled so, all of one account.
pub(crate) async fn create(plane: &ControlPlane, namespace: &str, apps: Vec<String>) -> Vec<OnePod> {
    let client = plane.client().await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let account = serde_json::from_value(json!({"metadata": {"name": "operator"}})).unwrap();
    accounts.create(&PostParams::default(), &account).await.unwrap();
    let signer = Signer::of(plane, &client, namespace, "operator").await;
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    let made = stream::iter(apps.into_iter().enumerate()).map(|(number, app)| {
        let pods = pods.clone();
        async move {
            let pod = json!({
                "metadata": {
                    "name": format!("operator-{number}"),
                    "labels": {"app": app, label::ENABLE_PROXY: "true"},
                    "annotations": {annotation::INJECTED: "true"},
                },
                "spec": {
                    "serviceAccountName": "operator",
                    // With the cluster's CA in it, it would count as one that was admitted past the manager.
                    "automountServiceAccountToken": false,
                    "containers": [{"name": "operator", "image": "none"}],
                },
            });
            let pod = serde_json::from_value(pod).unwrap();
            pods.create(&PostParams::default(), &pod).await.unwrap()
        }
    });
    let made: Vec<Pod> = made.buffer_unordered(AT_ONCE).collect().await;
    made.iter()
        .map(|pod| {
            let (name, uid) = (pod.name_any(), pod.uid().unwrap());
            let token = signer.token((&name, &uid), None);
            OnePod { namespace: namespace.to_owned(), name, uid, token }
        })
        .collect()
}
