//! The manager while the API server loses its history, and while kinds vanish during labelling.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, ResourceExt as _};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::bed::eventually;
use crate::full::{OPERATOR, ROOT, SYSTEM, divide, world};
use crate::process::Replica;

/// How many objects of the kind that vanishes there are.
const THINGS: usize = 60;

/// Waits until the root has these shards, and no others.
async fn until_divided(client: &Client, shards: &[&str]) {
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let wanted: BTreeSet<String> = shards.iter().map(|name| (*name).to_owned()).collect();
    eventually("the shards", async || {
        let list = configs.list(&ListParams::default()).await.ok()?;
        let names = list.iter().map(kube::ResourceExt::name_any).filter(|name| name != ROOT);
        (names.collect::<BTreeSet<_>>() == wanted).then_some(())
    })
    .await;
}

async fn until_labelled(maps: &Api<ConfigMap>) {
    eventually("the object to be labelled", async || {
        let object = maps.get("object").await.ok()?;
        object.labels().contains_key(label::SHARDING_HASH).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_manager_survives_an_api_server_that_lost_its_history() {
    let mut cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let mut replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    divide(&client, 2, None).await;
    until_divided(&client, &["op-1-normal", "op-2-normal"]).await;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team-0");
    until_labelled(&maps).await;

    cluster.restart_apiserver().unwrap();
    divide(&client, 1, Some(json!({"replicas": 1, "inNamespaces": ["team-3"]}))).await;
    until_divided(&client, &["op-0-canary", "op-1-normal"]).await;

    // The manager sleeps while everything changes: the versions that it knows are gone when it wakes.
    replica.program().send(Signal::SIGSTOP);
    cluster.restart_apiserver().unwrap();
    divide(&client, 2, None).await;
    let take = Patch::Merge(json!({"metadata": {"labels": {label::SHARDING_HASH: null}}}));
    // The API server itself would put the label back.
    take_away_policy(&client).await;
    eventually("the label to be taken away", async || {
        let taken = maps.patch("object", &PatchParams::default(), &take).await.ok()?;
        (!taken.labels().contains_key(label::SHARDING_HASH)).then_some(())
    })
    .await;
    cluster.compact().unwrap();
    replica.program().send(Signal::SIGCONT);
    until_divided(&client, &["op-1-normal", "op-2-normal"]).await;
    until_labelled(&maps).await;
    let log = replica.program().log();
    assert!(log.contains("too old resource version"), "it never met 410:\n{log}");
    for api in policies(&client) {
        eventually("the API server to label again", async || api.get("ctrlmesh-labels").await.ok()).await;
    }
}

/// The kinds of what the API server labels by itself, both of one name.
fn policies(client: &Client) -> [Api<DynamicObject>; 2] {
    let kinds = [
        ("MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings"),
        ("MutatingAdmissionPolicy", "mutatingadmissionpolicies"),
    ];
    kinds.map(|(kind, plural)| {
        let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind);
        Api::all_with(client.clone(), &ApiResource::from_gvk_with_plural(&kind, plural))
    })
}

async fn take_away_policy(client: &Client) {
    for api in policies(client) {
        eventually("it to be gone", async || match api.delete("ctrlmesh-labels", &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Some(()),
            deleted => deleted.ok().map(drop),
        })
        .await;
    }
}

fn definition() -> CustomResourceDefinition {
    let definition = json!({
        "metadata": {"name": "things.gone.example.com"},
        "spec": {"group": "gone.example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]},
    });
    serde_json::from_value(definition).unwrap()
}

/// Makes the kind, and objects of it that lack labels.
async fn with_things(client: &Client, things: &Api<DynamicObject>) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    definitions.create(&PostParams::default(), &definition()).await.unwrap();
    for number in 0..THINGS {
        let thing: Value =
            json!({"apiVersion": "gone.example.com/v1", "kind": "Thing", "metadata": {"name": format!("t-{number}")}});
        let thing = serde_json::from_value(thing).unwrap();
        eventually("the kind to be served", async || things.create(&PostParams::default(), &thing).await.ok()).await;
    }
}

/// How many of them are labelled.
async fn labelled(things: &Api<DynamicObject>) -> Option<usize> {
    let with = ListParams::default().labels(label::SHARDING_HASH);
    Some(things.list_metadata(&with).await.ok()?.items.len())
}

#[tokio::test]
async fn a_kind_may_vanish_while_it_is_labelled_and_come_back() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("gone.example.com", "v1", "Thing"));
    let things: Api<DynamicObject> = Api::namespaced_with(client.clone(), "team-1", &resource);
    // Made before it is listed, so that the watches have to label all.
    with_things(&client, &things).await;
    let _replica = Replica::start(&cluster, SYSTEM, &["--label-rate", "5"]).await;
    let own: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
    let list = "groupVersionKinds: {v1: [ConfigMap], gone.example.com/v1: ['*']}";
    let list = Patch::Merge(json!({"data": {"resource-config": list}}));
    own.patch("ctrlmesh-sharding-resource", &PatchParams::default(), &list).await.unwrap();
    let some = async || labelled(&things).await.filter(|count| *count > 0);
    let some = eventually("some to be labelled", some).await;
    assert!(some < THINGS, "all were labelled already");
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = definition().name_any();
    definitions.delete(&name, &DeleteParams::default()).await.unwrap();
    eventually("the kind to be gone", async || definitions.get_opt(&name).await.ok()?.is_none().then_some(())).await;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team-0");
    until_labelled(&maps).await;
    with_things(&client, &things).await;
    eventually("all to be labelled", async || labelled(&things).await.filter(|count| *count == THINGS)).await;
}
