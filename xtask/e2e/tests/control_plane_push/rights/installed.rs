//! Installs what the managers find in a cluster: their rights, what holds them, and webhook configurations.

use ctrlmesh_manager::install::rbac::{BACKGROUND, NAMESPACE, yaml};
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

/// What holds the accounts to what the managers do.
pub(crate) const ACCOUNT_POLICIES: &str = include_str!("../../../../../deploy/manager/account-policies.yaml");

/// What node proxies may write to their Nodes, and what holds them to it.
pub(crate) const NODE_POLICY: &str = include_str!("../../../../../deploy/node/announce.yaml");

/// Gives the accounts their rights, and holds them to what the managers do.
pub(super) async fn grant(client: &Client) {
    apply(client, &yaml()).await;
    apply(client, ACCOUNT_POLICIES).await;
    aggregate(client).await;
}

pub(crate) async fn apply(client: &Client, text: &str) {
    for document in documents(text) {
        let object: DynamicObject = serde_json::from_value(document).unwrap();
        let types = object.types.clone().unwrap();
        let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types).unwrap());
        let api: Api<DynamicObject> = match object.namespace() {
            Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        };
        let force = PatchParams::apply("test").force();
        api.patch(&object.name_any(), &force, &Patch::Apply(&object)).await.unwrap();
    }
}

async fn aggregate(client: &Client) {
    // As whoever lists a kind does; nobody aggregates here.
    let role = json!({"metadata": {"name": "kinds"}, "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch", "patch"]}]});
    let role: ClusterRole = serde_json::from_value(role).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &role).await.unwrap();
    let binding = json!({
        "metadata": {"name": "kinds"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kinds"},
        "subjects": [{"kind": "ServiceAccount", "name": BACKGROUND, "namespace": NAMESPACE}],
    });
    let binding: ClusterRoleBinding = serde_json::from_value(binding).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &binding).await.unwrap();
}

fn documents(text: &str) -> Vec<Value> {
    text.split("\n---\n").map(|one| serde_saphyr::from_str(one).unwrap()).collect()
}

/// Configurations as those in deploy/, of whom the managers are asked about nothing.
pub(super) async fn registered(client: &Client) {
    let rule = json!({"apiGroups": ["nothing.example.com"], "apiVersions": ["*"], "resources": ["*"], "operations": ["CREATE"]});
    let hook = json!({
        "name": "nothing.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "failurePolicy": "Ignore", "clientConfig": {"url": "https://127.0.0.1:1/"}, "rules": [rule],
    });
    let config = json!({"metadata": {"name": "ctrlmesh", "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}}, "webhooks": [hook]});
    let one: ValidatingWebhookConfiguration = serde_json::from_value(config.clone()).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &one).await.unwrap();
    let other: MutatingWebhookConfiguration = serde_json::from_value(config).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &other).await.unwrap();
}
