//! Shared parts of the tests against a real API server.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::time::Duration;

use anyhow::{Context as _, Result};
use ctrlmesh_common::api::{self, ShardingConfig};
use ctrlmesh_testbed::retry;
use futures::StreamExt as _;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time;

pub(crate) mod running;

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
