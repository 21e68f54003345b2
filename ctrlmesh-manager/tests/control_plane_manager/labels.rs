//! Objects carry their labels, at once and for ever.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::{ControlPlane, retry};

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;

use crate::bed::*;

fn wanted(namespace: &str) -> BTreeMap<String, String> {
    let slot = NamespaceHash::default().slot(namespace).to_string();
    [
        (label::SHARDING_HASH, slot),
        (label::NAMESPACE, namespace.to_owned()),
        (label::CONTROL, "true".to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn has(object: &impl kube::ResourceExt, wanted: &BTreeMap<String, String>) -> Result<()> {
    let there = object.labels();
    ensure!(wanted.iter().all(|(key, value)| there.get(key) == Some(value)), "{there:?}");
    Ok(())
}

#[tokio::test]
async fn what_was_there_before_is_labelled_and_labels_that_are_taken_away_are_put_back()
-> Result<()> {
    let client = managed().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    retry(|| async { has(&maps.get("early").await?, &wanted("default")) }).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null, label::NAMESPACE: "elsewhere", "mine": "stays"}}});
    maps.patch("early", &PatchParams::default(), &Patch::Merge(take)).await?;
    retry(|| async {
        let map = maps.get("early").await?;
        has(&map, &wanted("default"))?;
        ensure!(map.labels()["mine"] == "stays");
        Ok(())
    })
    .await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    retry(|| async { has(&namespaces.get("kube-system").await?, &wanted("kube-system")) }).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null}}});
    namespaces.patch("kube-system", &PatchParams::default(), &Patch::Merge(take)).await?;
    retry(|| async { has(&namespaces.get("kube-system").await?, &wanted("kube-system")) }).await?;
    // Of cluster scope: by its own name.
    let slot = NamespaceHash::default().slot("view").to_string();
    let roles: Api<ClusterRole> = Api::all(client);
    let cluster = format!("cluster.{slot}");
    let of_cluster =
        [(label::SHARDING_HASH.to_owned(), slot), (label::NAMESPACE.to_owned(), cluster)].into();
    retry(|| async { has(&roles.get("view").await?, &of_cluster) }).await
}

#[tokio::test]
async fn the_api_server_itself_labels_what_is_created() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("labelled").await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    retry(|| async { has(&namespaces.get(&namespace).await?, &wanted(&namespace)) }).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    // The answer to a dry run was never seen by a watch: it is the API server's own work.
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let map = serde_json::from_value(json!({"metadata": {"name": "a"}}))?;
    retry(|| async { has(&maps.create(&dry_run, &map).await?, &wanted(&namespace)) }).await?;
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    ensure!(webhooks.get_opt("ctrlmesh-labels").await?.is_none(), "it is asked all the same");
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let not_listed = json!({"metadata": {"name": "a"}, "spec": {"automountServiceAccountToken": false, "containers": [{"name": "a", "image": "none"}]}});
    let accounts: Api<ServiceAccount> = Api::namespaced(pods.clone().into_client(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let pod = create(&pods, not_listed).await?;
    ensure!(pod.labels().is_empty(), "{:?}", pod.labels());
    Ok(())
}

#[tokio::test]
async fn the_webhook_labels_where_the_api_server_does_not() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("secrets").await?;
    let secrets: Api<Secret> = Api::namespaced(client, &namespace);
    let mut made = create(&secrets, json!({"metadata": {"name": "a"}})).await?;
    has(&made, &wanted(&namespace))?;
    made.labels_mut().clear();
    let after = secrets.replace("a", &PostParams::default(), &made).await?;
    has(&after, &wanted(&namespace))
}

#[tokio::test]
async fn a_terminating_object_is_not_touched() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("terminating").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    create(&maps, json!({"metadata": {"name": "a", "finalizers": ["example.com/wait"]}})).await?;
    retry(|| async { has(&maps.get("a").await?, &wanted(&namespace)) }).await?;
    maps.delete("a", &DeleteParams::default()).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null}}});
    maps.patch("a", &PatchParams::default(), &Patch::Merge(take)).await?;
    // One that comes after it in the same watch has been labelled: so it was passed over.
    create(&maps, json!({"metadata": {"name": "b"}})).await?;
    retry(|| async { has(&maps.get("b").await?, &wanted(&namespace)) }).await?;
    let left = maps.get("a").await?;
    ensure!(!left.labels().contains_key(label::SHARDING_HASH), "{:?}", left.labels());
    let let_go = json!({"metadata": {"finalizers": null}});
    maps.patch("a", &PatchParams::default(), &Patch::Merge(let_go)).await?;
    Ok(())
}

#[tokio::test]
async fn kinds_that_appear_and_vanish_are_followed() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("kinds").await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = json!({
        "metadata": {"name": "widgets.widgets.example.com"},
        "spec": {"group": "widgets.example.com", "scope": "Namespaced", "names": {"plural": "widgets", "kind": "Widget"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]},
    });
    let widget =
        ApiResource::from_gvk(&GroupVersionKind::gvk("widgets.example.com", "v1", "Widget"));
    let widgets: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &widget);
    for round in 0..2 {
        create(&definitions, definition.clone()).await?;
        let object: DynamicObject = serde_json::from_value(
            json!({"apiVersion": "widgets.example.com/v1", "kind": "Widget", "metadata": {"name": "a"}}),
        )?;
        retry(|| async { widgets.create(&PostParams::default(), &object).await }).await?;
        retry(|| async { has(&widgets.get("a").await?, &wanted(&namespace)) })
            .await
            .with_context(|| format!("round {round}"))?;
        definitions.delete("widgets.widgets.example.com", &DeleteParams::default()).await?;
        retry(|| async {
            ensure!(
                definitions.get_opt("widgets.widgets.example.com").await?.is_none(),
                "still there"
            );
            Ok(())
        })
        .await?;
    }
    // The others go on.
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    create(&maps, json!({"metadata": {"name": "a"}})).await?;
    retry(|| async { has(&maps.get("a").await?, &wanted(&namespace)) }).await
}
