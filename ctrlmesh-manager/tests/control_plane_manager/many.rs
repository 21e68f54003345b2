//! Many objects: how long it takes, and what it costs.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::retry;
use futures::{StreamExt as _, TryStreamExt as _, stream};

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;

use crate::bed::*;

/// Makes objects of a kind of its own, which is not listed yet: everything is left to the watches.
async fn make_many(client: &Client, spaces: u32, each: u32) -> Result<Api<DynamicObject>> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("many.example.com", "v1", "Thing"));
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let schema = json!({"openAPIV3Schema": {"type": "object"}});
    let definition = json!({
        "metadata": {"name": "things.many.example.com"},
        "spec": {"group": "many.example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema}]},
    });
    create(&definitions, definition).await?;
    let things: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    retry(|| async { things.list(&ListParams::default().limit(1)).await }).await?;
    let made = stream::iter(0..spaces).map(|number| {
        let (client, resource, namespaces) = (client.clone(), resource.clone(), namespaces.clone());
        async move {
            let name = format!("many-{number}");
            create(&namespaces, json!({"metadata": {"name": name}})).await?;
            let things: Api<DynamicObject> = Api::namespaced_with(client, &name, &resource);
            for thing in 0..each {
                let thing = json!({"apiVersion": "many.example.com/v1", "kind": "Thing", "metadata": {"name": format!("t-{thing}")}});
                create_dynamic(&things, thing).await?;
            }
            anyhow::Ok(())
        }
    });
    made.buffer_unordered(16).try_collect::<Vec<()>>().await?;
    Ok(things)
}

/// 100 namespaces and 1,000 objects; with `--full`, 5,000 and 50,000.
#[tokio::test]
async fn many_objects_are_labelled_and_the_memory_stays() -> Result<()> {
    let client = managed().await?;
    let full = std::env::var_os("CTRLMESH_TEST_FULL").is_some();
    let (spaces, each) = if full { (5000, 10) } else { (100, 10) };
    let manager = STARTED.get().and_then(|started| started.as_ref().ok()).context("no manager")?;
    let things = make_many(&client, spaces, each).await?;
    let before = manager.resident_kilobytes()?;
    let start = Instant::now();
    let listed = format!("{LISTED}  many.example.com/v1: [Thing]\n");
    let list = json!({"data": {"resource-config": listed}});
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    maps.patch("ctrlmesh-sharding-resource", &PatchParams::default(), &Patch::Merge(list)).await?;
    let mut most = before;
    let unlabelled = ListParams::default().labels(&format!("!{}", label::SHARDING_HASH)).limit(1);
    loop {
        most = most.max(manager.resident_kilobytes()?);
        if things.list_metadata(&unlabelled).await?.items.is_empty() {
            break;
        }
        ensure!(start.elapsed() < Duration::from_mins(20), "not done");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // One request each, and none for what has its labels already.
    let begin = "ctrlmesh_manager_label_repairs_total{kind=\"things.many.example.com/v1\"";
    let requests = manager.counted(begin).await?;
    ensure!(requests == u64::from(spaces * each), "{requests} requests");
    eprintln!(
        "{} objects in {spaces} namespaces labelled in {:?} by {requests} requests; resident {before} kB before, {most} kB at most",
        spaces * each,
        start.elapsed()
    );
    // A page of metadata is what may be held, not the objects.
    ensure!(most < before + 64 * 1024, "{before} kB, then {most} kB");
    Ok(())
}
