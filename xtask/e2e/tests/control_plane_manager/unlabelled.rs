//! Listed kinds that cannot be labelled are reported, with the reason.

use crate::harness::running::Manager;
use crate::harness::{self, NAMESPACE, create};
use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{label, resource_list};
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;

/// As whom the manager labels here.
const ACCOUNT: &str = "system:serviceaccount:ctrlmesh-system:limited";

/// Lets who labels do so with these resources of the core group.
async fn allow(client: &Client, name: &str, resources: &[&str]) -> Result<()> {
    let role = json!({"metadata": {"name": name}, "rules": [
        {"apiGroups": [""], "resources": resources, "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]},
        {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["list", "watch"]},
    ]});
    create::<ClusterRole>(&Api::all(client.clone()), role).await?;
    let binding = json!({"metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": ACCOUNT}]});
    create::<ClusterRoleBinding>(&Api::all(client.clone()), binding).await?;
    Ok(())
}

async fn world(client: &Client) -> Result<()> {
    harness::prepare(client, "").await?;
    allow(client, "limited", &["namespaces", "configmaps"]).await?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "default");
    create(&secrets, json!({"metadata": {"name": "s"}})).await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), "default");
    let shard = json!({"metadata": {"name": "shard"}, "spec": {"selector": {"matchLabels": {"app": "op"}},
        "limits": [{"selector": {"matchLabels": {"team": "a"}}}]}});
    create(&configs, shard).await?;
    Ok(())
}

async fn list(client: &Client, text: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let change = Patch::Merge(json!({"data": {resource_list::KEY: text}}));
    maps.patch(resource_list::NAME, &PatchParams::default(), &change).await?;
    Ok(())
}

/// Waits for an event of the list of kinds.
async fn told(client: &Client, reason: &str, text: &str) -> Result<()> {
    let events: Api<Event> = Api::namespaced(client.clone(), NAMESPACE);
    retry(|| async {
        let events = events.list(&ListParams::default()).await?;
        let told = events.items.iter().any(|event| {
            event.reason.as_deref() == Some(reason) && event.note.as_ref().is_some_and(|note| note.contains(text))
        });
        ensure!(told, "no event {reason} that says {text}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn what_is_listed_and_cannot_be_labelled_is_said_until_it_can() -> Result<()> {
    let plane = &ControlPlane::start(&Options::default())?;
    let client = plane.client().await?;
    world(&client).await?;
    let manager = Manager::start(plane, NAMESPACE, &["--background-account", "limited"])?;
    let until = async |reason: &str, text: &str| {
        harness::until_degraded(&client, "default", reason, text).await.with_context(|| manager.log())
    };
    until("AsExpected", "").await?;
    let unfinished = "ctrlmesh_manager_label_kinds_unfinished ";
    let is = async |count: u64| {
        retry(|| async {
            let now = manager.counted(unfinished).await?;
            ensure!(now == count, "{now} unfinished");
            Ok(())
        })
        .await
    };

    // Nobody lets us see them.
    list(&client, "groupVersionKinds: {v1: [ConfigMap, Secret, Confgmap]}").await?;
    until("Unlabelled", "the manager may not list, watch, patch \"secrets\" of the core group").await?;
    told(&client, "LabelsForbidden", "resources: [configmaps, secrets]\n  verbs: [list, watch, patch]").await?;
    told(&client, "NotServed", "v1 Confgmap").await?;
    allow(&client, "more", &["secrets"]).await?;
    until("AsExpected", "").await?;
    is(0).await?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "default");
    retry(|| async {
        ensure!(secrets.get("s").await?.labels().contains_key(label::SHARDING_HASH), "not yet");
        Ok(())
    })
    .await?;

    // One key is none; the others are labelled.
    list(&client, "groupVersionKinds: {v1: [ConfigMap], a/b/c: [Pod]}").await?;
    until("Unlabelled", "a/b/c").await?;
    told(&client, "NotLabelled", "a/b/c").await?;
    retry(|| async {
        ensure!(manager.counted("ctrlmesh_manager_label_kinds ").await? == 1, "not yet");
        Ok(())
    })
    .await?;

    // Nothing of it can be read.
    list(&client, "groupVersionKinds: [").await?;
    until("Unlabelled", "parse").await?;
    is(1).await?;
    list(&client, "groupVersionKinds: {v1: [ConfigMap]}").await?;
    until("AsExpected", "").await?;
    is(0).await
}
