//! What the tests against a real API server share.
#![allow(dead_code, reason = "each test binary uses a part")]

use anyhow::Result;
use ctrlmesh_common::api::{self, ShardingConfig};
use ctrlmesh_testbed::retry;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;

pub(crate) mod manager;

/// Installs our definitions and waits until they are served, rules and all.
pub(crate) async fn install(client: &Client) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in api::definitions() {
        let force = PatchParams::apply("test").force();
        definitions.patch(&definition.name_any(), &force, &Patch::Apply(&definition)).await?;
    }
    let served: Api<ShardingConfig> = Api::namespaced(client.clone(), "default");
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    // A definition is served some time before its rules are enforced: wait for the last effect.
    retry(|| async {
        let nothing: ShardingConfig =
            serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": {}}))?;
        match served.create(&dry_run, &nothing).await {
            Err(kube::Error::Api(status)) if status.code == 422 => Ok(()),
            other => Err(anyhow::anyhow!("{other:?}")),
        }
    })
    .await
}
