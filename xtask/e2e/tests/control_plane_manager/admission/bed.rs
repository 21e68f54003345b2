//! One manager for all tests, with its webhooks registered.

use std::sync::LazyLock;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{label, root_ca};
use ctrlmesh_testbed::{ControlPlane, Options, retry};

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::core::v1::{ConfigMap, Secret, ServiceAccount};
use kube::api::{Api, DynamicObject, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::harness;
use crate::harness::running::Manager;
pub(crate) use crate::harness::{NAMESPACE, create, has_labels, wanted_labels};

/// What is listed from the start.
pub(crate) const LISTED: &str = "groupVersionKinds:\n  v1: [ConfigMap]\n  rbac.authorization.k8s.io/v1: [ClusterRole]\n  widgets.example.com/v1: ['*']\n  away.example.com/v1: ['*']\n  stubborn.example.com/v1: ['*']\n";

/// The API server that asks this manager about every pod. No other test may use it.
pub(crate) static PLANE: LazyLock<ControlPlane> =
    LazyLock::new(|| ControlPlane::start(&Options::default()).unwrap_or_else(|error| panic!("{error:?}")));

pub(crate) static STARTED: OnceCell<Result<Manager, String>> = OnceCell::const_new();

/// One manager for all tests of this binary, with its webhooks registered; started once, also where that failed.
pub(crate) async fn managed() -> Result<Client> {
    let client = PLANE.client().await?;
    let started = || async { start(&client).await.map_err(|error| format!("{error:#}")) };
    match STARTED.get_or_init(started).await {
        Ok(_) => Ok(client.clone()),
        Err(error) => anyhow::bail!("start the manager: {error}"),
    }
}

pub(crate) async fn start(client: &Client) -> Result<Manager> {
    harness::prepare(client, LISTED).await?;
    let cluster =
        json!({"metadata": {"name": root_ca::CLUSTER}, "data": {root_ca::KEY: std::fs::read_to_string(PLANE.ca())?}});
    create::<ConfigMap>(&Api::namespaced(client.clone(), NAMESPACE), cluster).await?;
    let early = json!({"metadata": {"name": "early"}});
    create::<ConfigMap>(&Api::namespaced(client.clone(), "default"), early).await?;
    // A group whose server is down from the start: all others are labelled all the same.
    let away = json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "v1.away.example.com"},
        "spec": {"group": "away.example.com", "version": "v1", "groupPriorityMinimum": 1000, "versionPriority": 10,
            "insecureSkipTLSVerify": true, "service": {"namespace": NAMESPACE, "name": "nobody"}},
    });
    let gvk = GroupVersionKind::gvk("apiregistration.k8s.io", "v1", "APIService");
    create_dynamic(&Api::all_with(client.clone(), &ApiResource::from_gvk(&gvk)), away).await?;
    let more = ["--label-rate", "1000", "--identity", "manager-0", "--webhook-host", "127.0.0.1"];
    let manager = Manager::start(&PLANE, NAMESPACE, &more)?;
    let webhooks = manager.address("webhooks").await?;
    // Before, it would be asked about a Secret of its own, and the API server would wait ten seconds for the answer.
    manager.said("message", "ready").await?;
    let hook = |path: &str, rule: Value, policy: &str| {
        json!({
            "name": format!("{path}.ctrlmesh.kusionstack.io"), "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "failurePolicy": policy, "clientConfig": {"url": format!("https://{webhooks}/{path}")}, "rules": [rule],
        })
    };
    let metadata = json!({"name": "ctrlmesh", "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}});
    let ours = json!({"apiGroups": ["ctrlmesh.kusionstack.io"], "apiVersions": ["*"], "resources": ["*"], "operations": ["CREATE", "UPDATE"]});
    let added = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/ephemeralcontainers"], "operations": ["UPDATE"]});
    let mut ephemeral = hook("validate", added, "Fail");
    ephemeral["name"] = json!("ephemeral.ctrlmesh.kusionstack.io");
    let validating = json!({"metadata": metadata, "webhooks": [hook("validate", ours, "Fail"), ephemeral]});
    create::<ValidatingWebhookConfiguration>(&Api::all(client.clone()), validating).await?;
    let pods = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
    // Secrets are not listed: only the webhook labels them, as it would all where the API server cannot.
    let secrets =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["secrets"], "operations": ["CREATE", "UPDATE"]});
    let hooks = [hook("inject", pods, "Fail"), hook("label", secrets, "Ignore")];
    let mutating = json!({"metadata": metadata, "webhooks": hooks});
    create::<MutatingWebhookConfiguration>(&Api::all(client.clone()), mutating).await?;
    // The webhooks are asked once the API server knows the CA, and answer once everything was seen.
    let probe: ShardingConfig = serde_json::from_value(shard("probe", "probe", "probe"))?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), "default");
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    retry(|| async { configs.create(&dry_run, &probe).await.map_err(anyhow::Error::from) })
        .await
        .with_context(|| manager.log())?;
    until_mutated(client).await.with_context(|| manager.log())?;
    Ok(manager)
}

/// Waits until the API server believes those who change objects, too.
async fn until_mutated(client: &Client) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "default");
    let secret: Secret = serde_json::from_value(json!({"metadata": {"name": "probe"}}))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    retry(|| async {
        let made = secrets.create(&dry_run, &secret).await?;
        ensure!(made.labels().contains_key(label::SHARDING_HASH), "{:?}", made.labels());
        Ok(())
    })
    .await
}

pub(crate) async fn create_dynamic(api: &Api<DynamicObject>, object: Value) -> Result<()> {
    api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    Ok(())
}

pub(crate) fn shard(name: &str, app: &str, team: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"controller": {"leaderElectionName": "op"}, "selector": {"matchLabels": {"app": app}},
            "limits": [{"selector": {"matchLabels": {"team": team}}}]},
    })
}

/// A pod as the controller of the StatefulSet `op` makes it.
pub(crate) fn pod(name: &str, annotations: Value) -> Value {
    json!({
        "metadata": {"name": name, "annotations": annotations, "labels": {label::ENABLE_PROXY: "true"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op", "uid": "6d7a1f0e-0000-4000-8000-000000000000", "controller": true}]},
        "spec": {"containers": [{"name": "operator", "image": "none"}]},
    })
}

/// A namespace with a service account and a root that divides the StatefulSet `op` in two.
pub(crate) async fn operator(client: &Client, prefix: &str) -> Result<String> {
    let namespace = PLANE.namespace(prefix).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let root = json!({"metadata": {"name": "root"}, "spec": {"root": {"prefix": "op", "targetStatefulSet": "op", "auto": {"shardingSize": 2, "everyShardReplicas": 1},
        "resourceSelector": config_maps()}}});
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    create(&configs, root).await?;
    retry(|| async { configs.get("op-2-normal").await }).await?;
    Ok(namespace)
}

/// What roots divide here: a kind that is listed anyway.
pub(crate) fn config_maps() -> Value {
    json!([{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}])
}

pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T>) -> Result<String> {
    match result {
        Err(error) => Ok(format!("{error:#}")),
        Ok(made) => anyhow::bail!("not refused: {made:?}"),
    }
}
