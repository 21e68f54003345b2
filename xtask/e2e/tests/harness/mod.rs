//! Shared parts of the tests against a real API server.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{self, ShardingConfig};
use ctrlmesh_common::names::{label, resource_list};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::retry;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time;

pub(crate) mod running;

/// The manager's own namespace.
pub(crate) const NAMESPACE: &str = "ctrlmesh-system";

pub(crate) async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + DeserializeOwned + Serialize + Clone + std::fmt::Debug,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}

/// Installs our definitions, and makes the manager's namespace with the list of kinds to label.
pub(crate) async fn prepare(client: &Client, kinds: &str) -> Result<()> {
    install(client).await?;
    create::<Namespace>(&Api::all(client.clone()), json!({"metadata": {"name": NAMESPACE}})).await?;
    let list = json!({"metadata": {"name": resource_list::NAME}, "data": {resource_list::KEY: kinds}});
    create::<ConfigMap>(&Api::namespaced(client.clone(), NAMESPACE), list).await?;
    Ok(())
}

/// The labels that an object of a namespace gets.
pub(crate) fn wanted_labels(namespace: &str) -> BTreeMap<String, String> {
    let slot = NamespaceHash::default().slot(namespace).to_string();
    [(label::SHARDING_HASH, slot), (label::NAMESPACE, namespace.to_owned()), (label::CONTROL, "true".to_owned())]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
}

/// Whether an object has these labels.
pub(crate) fn has_labels(object: &impl ResourceExt, wanted: &BTreeMap<String, String>) -> Result<()> {
    let there = object.labels();
    ensure!(wanted.iter().all(|(key, value)| there.get(key) == Some(value)), "{there:?}");
    Ok(())
}

/// Installs our definitions and waits until they are served, rules and all.
pub(crate) async fn install(client: &Client) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in api::definitions() {
        let force = PatchParams::apply("test").force();
        definitions.patch(&definition.name_any(), &force, &Patch::Apply(&definition)).await?;
    }
    for definition in api::definitions() {
        let spec = definition.spec;
        let (version, plural) = (&spec.versions[0].name, &spec.names.plural);
        let path = format!("/apis/{}/{version}/{plural}?limit=1", spec.group);
        retry(|| async {
            let list = http::Request::get(&path).body(Vec::new())?;
            anyhow::Ok(client.request_text(list).await?)
        })
        .await?;
    }
    let served: Api<ShardingConfig> = Api::namespaced(client.clone(), "default");
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    // A definition is served some time before its rules are enforced: wait for the last effect.
    retry(|| async {
        let nothing: ShardingConfig = serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": {}}))?;
        match served.create(&dry_run, &nothing).await {
            Err(kube::Error::Api(status)) if status.code == 422 => Ok(()),
            other => Err(anyhow::anyhow!("{other:?}")),
        }
    })
    .await
}

/// Waits until the status of one of the ShardingConfigs in `namespace` says that it is degraded, or not, by this
/// reason, in a message with this text.
pub(crate) async fn until_degraded(client: &Client, namespace: &str, reason: &str, text: &str) -> Result<()> {
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), namespace);
    let config = watcher::Config::default();
    let mut states = std::pin::pin!(watcher(configs, config).default_backoff().applied_objects());
    let found = async {
        while let Some(state) = states.next().await {
            // One that fails begins again.
            let Ok(state) = state else { continue };
            let said = state.status.unwrap_or_default();
            let degraded = said.conditions.iter().find(|one| one.type_ == "Degraded");
            if degraded.is_some_and(|one| one.reason == reason && one.message.contains(text)) {
                return Ok(());
            }
        }
        anyhow::bail!("the watch ended")
    };
    time::timeout(Duration::from_mins(5), found).await.with_context(|| format!("{reason} {text}"))?
}
