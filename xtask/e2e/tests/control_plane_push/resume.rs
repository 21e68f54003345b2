//! A manager is killed while it labels existing objects, and another one continues.

use std::collections::BTreeMap;

use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::json;

use crate::audit::requests;
use crate::bed::eventually;
use crate::full::{SYSTEM, TEAMS, world};
use crate::process::Replica;

/// How many objects there are: the first manager takes five seconds for them.
const OBJECTS: usize = 200;

/// How many of them are labelled before the first manager is killed.
const BEFORE: usize = 50;

/// How many may be on their way at that moment.
const UNDER_WAY: usize = 16;

/// How many of the objects are labelled.
async fn labelled(maps: &Api<ConfigMap>) -> Option<usize> {
    let with = ListParams::default().labels(&format!("made,{}", label::SHARDING_HASH));
    Some(maps.list_metadata(&with).await.ok()?.items.len())
}

/// How often each of the objects was patched with success.
fn patched(cluster: &ControlPlane) -> BTreeMap<String, usize> {
    let mut patches = BTreeMap::new();
    for request in requests(cluster) {
        let is_patch = request.resource == "configmaps" && request.verb == "patch";
        if is_patch && request.name.starts_with("made-") {
            *patches.entry(request.name).or_default() += 1;
        }
    }
    patches
}

#[tokio::test]
async fn a_manager_goes_on_labelling_where_the_one_before_was_killed() {
    let cluster = ControlPlane::start(&Options { audit: true, ..Options::default() }).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), TEAMS[1]);
    for number in 0..OBJECTS {
        let map = json!({"metadata": {"name": format!("made-{number}"), "labels": {"made": "true"}}});
        maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    }
    let mut first = Replica::start(&cluster, SYSTEM, &["--label-rate", "40"]).await;
    eventually("some to be labelled", async || labelled(&maps).await.filter(|it| *it >= BEFORE)).await;
    first.program().kill();
    let before = labelled(&maps).await.unwrap();
    assert!(before < OBJECTS, "all were labelled already");
    let _second = Replica::start(&cluster, SYSTEM, &["--label-rate", "1000"]).await;
    eventually("all to be labelled", async || labelled(&maps).await.filter(|it| *it == OBJECTS)).await;
    // What was on its way at the kill may have been done without an answer; and a line comes after the answer.
    let patches = eventually("the log to say who labelled them", async || {
        let patches = patched(&cluster);
        (patches.len() >= OBJECTS - UNDER_WAY).then_some(patches)
    })
    .await;
    let count: usize = patches.values().sum();
    assert!(count <= OBJECTS + UNDER_WAY, "{count} patches of {OBJECTS} objects");
}
