//! A cluster of Kridge's, whose objects are of another group.

use anyhow::{Result, ensure};
use ctrlmesh_common::api;
use ctrlmesh_common::names::KRIDGE_GROUP;
use ctrlmesh_testbed::retry;
use serde_json::{Value, json};

use crate::bed::{Bed, collection, items, post};
use crate::whole::try_pod;

const GROUP: &str = "ctrlmesh.kusionstack.io";

/// Serves Kridge's kinds. It takes whatever they hold.
async fn define(bed: &Bed) -> Result<()> {
    for definition in api::definitions() {
        let names = serde_json::to_value(&definition.spec.names)?;
        let plural = definition.spec.names.plural.clone();
        let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let version =
            json!({"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}});
        let mut names = names;
        names["categories"] = json!([]);
        names["shortNames"] = json!([]);
        let crd = json!({"metadata": {"name": format!("{plural}.{KRIDGE_GROUP}")},
            "spec": {"group": KRIDGE_GROUP, "names": names, "scope": definition.spec.scope, "versions": [version]}});
        post(&bed.client, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd).await?;
    }
    for plural in ["shardingconfigs", "circuitbreakers"] {
        let path = format!("/apis/{KRIDGE_GROUP}/v1alpha1/{plural}");
        retry(|| async {
            let list = http::Request::get(&path).body(Vec::new())?;
            anyhow::Ok(bed.client.request_text(list).await?)
        })
        .await?;
    }
    Ok(())
}

async fn names(bed: &Bed, group: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for plural in ["shardingconfigs", "circuitbreakers"] {
        let of_kind = items(&bed.client, &collection(group, plural)).await?;
        all.extend(of_kind.iter().filter_map(|one| Some(one["metadata"]["name"].as_str()?.to_owned())));
    }
    Ok(all)
}

#[tokio::test]
async fn kridges_objects_come_over_and_their_own_go() -> Result<()> {
    let Some(mut bed) = Bed::start("kridges_objects_come_over_and_their_own_go").await? else { return Ok(()) };
    define(&bed).await?;
    bed.with_rules(KRIDGE_GROUP).await?;
    let (all, first) = (names(&bed, KRIDGE_GROUP).await?, bed.state().await?);
    bed.migrated(&["run", "--until", "convert"]).await?;
    ensure!(names(&bed, GROUP).await? == ["op-root", "slow"], "children are the root's to make");
    bed.migrated(&["undo"]).await?;
    ensure!(bed.state().await? == first, "nothing of the copies is left");
    bed.migrated(&["run", "--until", "labels"]).await?;
    ensure!(names(&bed, GROUP).await? == ["op-0-canary", "op-1-normal", "op-root", "slow"]);
    ensure!(names(&bed, KRIDGE_GROUP).await? == all, "the originals stay until the end");
    bed.install_ours(1).await?;
    bed.migrated(&["run"]).await?;
    let set: Vec<Value> = items(&bed.client, "/apis/apps/v1/namespaces/ops/statefulsets/op").await?;
    let labels = &set[0]["spec"]["template"]["metadata"]["labels"];
    ensure!(labels[format!("{GROUP}/enable-proxy")] == "true", "{labels}");
    ensure!(labels.get(format!("{KRIDGE_GROUP}/enable-proxy")).is_none(), "{labels}");
    let trigger = format!("{KRIDGE_GROUP}/enable-proxy");
    let refused = try_pod(&bed, &trigger).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("nobody injects a pod for label"), "to the end: {refused}");
    bed.migrated(&["run", "--until", "finish"]).await?;
    retry(|| try_pod(&bed, &trigger)).await?;
    ensure!(names(&bed, KRIDGE_GROUP).await?.is_empty(), "the originals are gone, finalizers and all");
    Ok(())
}
