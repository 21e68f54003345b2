//! Kinds are labelled because roots name them, whatever other teams list.

use crate::harness;
use crate::harness::running::Manager;
use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{label, resource_list};
use ctrlmesh_manager::install::rbac::{BACKGROUND, NAMESPACE, yaml};
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

/// The operators' namespace, and that of their objects.
const OPS: &str = "ops";
const SHOP: &str = "shop";

async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + serde::de::DeserializeOwned + serde::Serialize + Clone + std::fmt::Debug,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}

/// What is there before the manager: its account may label nothing but namespaces.
async fn world(client: &Client) -> Result<()> {
    harness::install(client).await?;
    for namespace in [NAMESPACE, OPS, SHOP] {
        create::<Namespace>(&Api::all(client.clone()), json!({"metadata": {"name": namespace}})).await?;
    }
    for document in yaml().split("\n---\n") {
        let object: DynamicObject = serde_saphyr::from_str(document)?;
        let types = object.types.clone().context("no type")?;
        let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types)?);
        let api: Api<DynamicObject> = match object.namespace() {
            Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        };
        api.patch(&object.name_any(), &PatchParams::apply("test").force(), &Patch::Apply(&object)).await?;
    }
    create::<ConfigMap>(&Api::namespaced(client.clone(), SHOP), json!({"metadata": {"name": "early"}})).await?;
    create::<Secret>(&Api::namespaced(client.clone(), SHOP), json!({"metadata": {"name": "early"}})).await?;
    Ok(())
}

async fn started() -> Result<(ControlPlane, Client, Manager)> {
    let plane = ControlPlane::start(&Options { controller_manager: true, ..Options::default() })?;
    let client = plane.client().await?;
    world(&client).await?;
    let manager = Manager::start(&plane, NAMESPACE, &["--background-account", BACKGROUND])?;
    Ok((plane, client, manager))
}

/// Lets the manager label these resources of the core group.
async fn allow(client: &Client, resource: &str) -> Result<()> {
    let role = json!({"metadata": {"name": resource, "labels": {label::AGGREGATE_TO_LABELS: "true"}}, "rules": [
        {"apiGroups": [""], "resources": [resource], "verbs": ["list", "watch", "patch"]}]});
    create::<ClusterRole>(&Api::all(client.clone()), role).await?;
    Ok(())
}

/// Applies a root that divides these resources of the core group.
async fn root(client: &Client, resources: &[&str]) -> Result<()> {
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), OPS);
    let root = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "root"},
        "spec": {"root": {"prefix": "op", "targetStatefulSet": "op", "auto": {"shardingSize": 2, "everyShardReplicas": 1},
            "resourceSelector": [{"relateResources": [{"apiGroups": [""], "resources": resources}]}]}},
    });
    configs.patch("root", &PatchParams::apply("test").force(), &Patch::Apply(root)).await?;
    Ok(())
}

/// Waits until the root's condition `Labelled` has this status, and a message with this text.
async fn until_labelled(client: &Client, status: &str, text: &str) -> Result<()> {
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), OPS);
    retry(|| async {
        let root = configs.get("root").await?;
        let conditions = root.status.unwrap_or_default().conditions;
        let labelled = conditions.iter().find(|one| one.type_ == "Labelled").context("no condition")?;
        let is_current = labelled.observed_generation == root.metadata.generation;
        ensure!(is_current && labelled.status == status && labelled.message.contains(text), "{labelled:?}");
        Ok(())
    })
    .await
}

/// Waits until the API server itself labels new objects, or does not.
async fn until_new_ones_are_labelled<K>(client: &Client, are: bool) -> Result<()>
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + serde::de::DeserializeOwned
        + serde::Serialize
        + Clone
        + std::fmt::Debug,
{
    let api: Api<K> = Api::namespaced(client.clone(), SHOP);
    let object: K = serde_json::from_value(json!({"metadata": {"name": "new"}}))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    retry(|| async {
        let made = api.create(&dry_run, &object).await?;
        ensure!(made.labels().contains_key(label::SHARDING_HASH) == are, "{:?}", made.labels());
        Ok(())
    })
    .await
}

async fn list(client: &Client, text: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let list = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": resource_list::NAME},
        "data": {resource_list::KEY: text}});
    maps.patch(resource_list::NAME, &PatchParams::apply("test").force(), &Patch::Apply(list)).await?;
    Ok(())
}

#[tokio::test]
async fn another_teams_list_takes_nothing_from_a_root() -> Result<()> {
    let (_plane, client, manager) = started().await?;
    let scenario = async {
        allow(&client, "configmaps").await?;
        allow(&client, "secrets").await?;
        root(&client, &["configmaps"]).await?;
        until_labelled(&client, "True", "").await?;
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), SHOP);
        ensure!(maps.get("early").await?.labels().contains_key(label::SHARDING_HASH), "not all was labelled");
        until_new_ones_are_labelled::<ConfigMap>(&client, true).await?;
        until_new_ones_are_labelled::<Secret>(&client, false).await?;

        // The second team lists its own kinds, and later another.
        for kinds in ["groupVersionKinds: {v1: [Secret]}", "groupVersionKinds: ["] {
            list(&client, kinds).await?;
            until_new_ones_are_labelled::<Secret>(&client, true).await?;
            until_new_ones_are_labelled::<ConfigMap>(&client, true).await?;
            until_labelled(&client, "True", "").await?;
        }
        list(&client, "").await?;
        until_new_ones_are_labelled::<Secret>(&client, false).await?;
        until_new_ones_are_labelled::<ConfigMap>(&client, true).await?;

        // The root goes: nobody names its kinds any more, and what is labelled stays so.
        let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), OPS);
        configs.delete("root", &DeleteParams::default()).await?;
        until_new_ones_are_labelled::<ConfigMap>(&client, false).await?;
        ensure!(maps.get("early").await?.labels().contains_key(label::SHARDING_HASH), "its labels are gone");
        Ok(())
    };
    scenario.await.with_context(|| manager.log())
}

#[tokio::test]
async fn an_event_has_the_role_that_lets_a_root_be_labelled() -> Result<()> {
    let (_plane, client, manager) = started().await?;
    let scenario = async {
        allow(&client, "configmaps").await?;
        root(&client, &["configmaps"]).await?;
        until_labelled(&client, "True", "").await?;
        root(&client, &["configmaps", "secrets"]).await?;
        until_labelled(&client, "False", "may not list, watch, patch \"secrets\" of the core group").await?;

        // A person applies what the event says, and Kubernetes aggregates it.
        let events: Api<Event> = Api::namespaced(client.clone(), OPS);
        let note = retry(|| async {
            let events = events.list(&ListParams::default()).await?.items;
            let event = events.into_iter().find(|event| event.reason.as_deref() == Some("ApplyClusterRole"));
            let event = event.context("no event")?;
            ensure!(event.regarding.as_ref().and_then(|of| of.name.as_deref()) == Some("root"), "{event:?}");
            event.note.context("no note")
        })
        .await?;
        let role: ClusterRole = serde_saphyr::from_str(&note)?;
        create::<ClusterRole>(&Api::all(client.clone()), serde_json::to_value(role)?).await?;
        until_labelled(&client, "True", "").await?;
        let secrets: Api<Secret> = Api::namespaced(client.clone(), SHOP);
        ensure!(secrets.get("early").await?.labels().contains_key(label::SHARDING_HASH), "not all was labelled");
        Ok(())
    };
    scenario.await.with_context(|| manager.log())
}
