//! Admission of many objects: time and cost.

use std::collections::BTreeMap;
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

use super::bed::*;

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

/// How often the API server was asked how, as it counts itself: of our kind, and of anything.
async fn asked(client: &Client) -> Result<[BTreeMap<String, u64>; 2]> {
    let metrics = http::Request::get("/metrics").body(Vec::new())?;
    let metrics = client.request_text(metrics).await?;
    let (mut ours, mut all) = (BTreeMap::new(), BTreeMap::new());
    for line in metrics.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let count: f64 = line.rsplit(' ').next().context("no count")?.parse()?;
        let verb = line.split("verb=\"").nth(1).and_then(|rest| rest.split('"').next());
        let verb = verb.context("no verb")?.to_lowercase();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let count = count as u64;
        if line.contains("group=\"many.example.com\"") && line.contains("resource=\"things\"") {
            *ours.entry(verb.clone()).or_default() += count;
        }
        *all.entry(verb).or_default() += count;
    }
    Ok([ours, all])
}

/// What has come to `before`.
fn since(before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let more = |(verb, count): (&String, &u64)| {
        let more = count - before.get(verb).copied().unwrap_or_default();
        (more > 0).then(|| (verb.clone(), more))
    };
    now.iter().filter_map(more).collect()
}

/// Waits until everything of the kind is labelled; returns how often the API server was asked for that.
async fn until_labelled(things: &Api<DynamicObject>) -> Result<u64> {
    let (start, mut lists) = (Instant::now(), 0);
    let unlabelled = ListParams::default().labels(&format!("!{}", label::SHARDING_HASH)).limit(1);
    loop {
        lists += 1;
        if things.list_metadata(&unlabelled).await?.items.is_empty() {
            return Ok(lists);
        }
        ensure!(start.elapsed() < Duration::from_mins(20), "not done");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How often the API server compacts etcd (`--etcd-compaction-interval`).
const COMPACTED: Duration = Duration::from_mins(5);

/// By how many labels other tests select objects of every kind: each of them may come first while this one runs.
const OTHER_LABELS: u64 = 2;

/// 500 namespaces and 5,000 objects; with `--full`, 5,000 and 50,000.
#[tokio::test]
async fn many_objects_are_labelled_and_the_memory_stays() -> Result<()> {
    let client = managed().await?;
    let full = ctrlmesh_testbed::is_full();
    let (spaces, each) = if full { (5000, 10) } else { (500, 10) };
    let manager = STARTED.get().and_then(|started| started.as_ref().ok()).context("no manager")?;
    let things = make_many(&client, spaces, each).await?;
    let (resident, most_before) = (manager.resident_kilobytes()?, manager.most_kilobytes()?);
    let before = asked(&client).await?;
    let start = Instant::now();
    let listed = format!("{LISTED}  many.example.com/v1: [Thing]\n");
    let list = json!({"data": {"resource-config": listed}});
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    maps.patch("ctrlmesh-sharding-resource", &PatchParams::default(), &Patch::Merge(list)).await?;
    let lists = until_labelled(&things).await?;
    let took = start.elapsed();
    let objects = u64::from(spaces * each);
    // The API server counts a request when it has answered it.
    let (mut ours, all) = retry(|| async {
        let after = asked(&client).await?;
        let ours = since(&before[0], &after[0]);
        ensure!(ours.get("patch").is_some_and(|count| *count >= objects), "{ours:?}");
        Ok((ours, since(&before[1], &after[1])))
    })
    .await?;
    // Those are the test's own.
    *ours.get_mut("list").context("never listed")? -= lists;
    // Where the next page begins is forgotten when the API server compacts etcd, and the list begins again: what is
    // labelled costs nothing then. It does so, too, where a ShardingConfig is the first that selects by some label.
    let passes = 1 + took.as_secs() / COMPACTED.as_secs() + OTHER_LABELS;
    let most = manager.most_kilobytes()?;
    eprintln!(
        "{objects} objects in {spaces} namespaces labelled in {took:?}; requests for them {ours:?}, of everybody for anything {all:?}; resident {resident} kB before, {most} kB at most"
    );
    // One each, and none for what has its labels already, but for the few to which the API server was too slow to
    // answer; pages of 500, of which the first may be asked for again.
    ensure!(ours["patch"] <= objects + objects / 100, "{ours:?}");
    ensure!(ours["list"] <= (objects / 500 + 4) * passes, "{ours:?}");
    // A page of metadata is what may be held, not the objects.
    ensure!(most < most_before.max(resident) + 64 * 1024, "{resident} kB, then {most} kB");
    Ok(())
}
