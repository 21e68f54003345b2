//! Objects get their labels at once, and keep them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::retry;
use futures::TryFutureExt as _;

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::json;

use super::bed::*;

#[tokio::test]
async fn existing_objects_are_labelled_and_removed_labels_restored() -> Result<()> {
    let client = managed().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    retry(|| async { has_labels(&maps.get("early").await?, &wanted_labels("default")) }).await?;
    let take =
        json!({"metadata": {"labels": {label::SHARDING_HASH: null, label::NAMESPACE: "elsewhere", "mine": "stays"}}});
    maps.patch("early", &PatchParams::default(), &Patch::Merge(take)).await?;
    retry(|| async {
        let map = maps.get("early").await?;
        has_labels(&map, &wanted_labels("default"))?;
        ensure!(map.labels()["mine"] == "stays");
        Ok(())
    })
    .await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    retry(|| async { has_labels(&namespaces.get("kube-system").await?, &wanted_labels("kube-system")) }).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null}}});
    namespaces.patch("kube-system", &PatchParams::default(), &Patch::Merge(take)).await?;
    retry(|| async { has_labels(&namespaces.get("kube-system").await?, &wanted_labels("kube-system")) }).await?;
    // Of cluster scope: by its own name.
    let slot = NamespaceHash::default().slot("view").to_string();
    let roles: Api<ClusterRole> = Api::all(client);
    let cluster = format!("cluster.{slot}");
    let of_cluster = [(label::SHARDING_HASH.to_owned(), slot), (label::NAMESPACE.to_owned(), cluster)].into();
    retry(|| async { has_labels(&roles.get("view").await?, &of_cluster) }).await
}

#[tokio::test]
async fn the_api_server_itself_labels_what_is_created() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("labelled").await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    retry(|| async { has_labels(&namespaces.get(&namespace).await?, &wanted_labels(&namespace)) }).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    // The answer to a dry run was never seen by a watch: it is the API server's own work.
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let map = serde_json::from_value(json!({"metadata": {"name": "a"}}))?;
    retry(|| async { has_labels(&maps.create(&dry_run, &map).await?, &wanted_labels(&namespace)) }).await?;
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let asked = webhooks.get("ctrlmesh-labels").await?.webhooks.unwrap_or_default();
    let rules = asked.iter().flat_map(|hook| hook.rules.iter().flatten());
    let scopes: BTreeSet<_> = rules.filter_map(|rule| rule.scope.as_deref()).collect();
    ensure!(scopes == ["Cluster"].into(), "it is asked of what is in namespaces: {scopes:?}");
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let not_listed = json!({"metadata": {"name": "a"}, "spec": {"automountServiceAccountToken": false, "containers": [{"name": "a", "image": "none"}]}});
    let accounts: Api<ServiceAccount> = Api::namespaced(pods.clone().into_client(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let pod = create(&pods, not_listed).await?;
    ensure!(pod.labels().is_empty(), "{:?}", pod.labels());
    Ok(())
}

#[tokio::test]
async fn namespaces_and_cluster_objects_are_labelled_at_admission() -> Result<()> {
    let client = managed().await?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let fresh = serde_json::from_value(json!({"metadata": {"name": "fresh"}}))?;
    let labelled = async || has_labels(&namespaces.create(&dry_run, &fresh).await?, &wanted_labels("fresh"));
    retry(labelled).await?;
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let role = serde_json::from_value(json!({"metadata": {"name": "reader"}}))?;
    let slot = NamespaceHash::default().slot("reader").to_string();
    let cluster = (label::NAMESPACE.to_owned(), format!("cluster.{slot}"));
    let of_cluster = [(label::SHARDING_HASH.to_owned(), slot), cluster].into();
    // A webhook that is slow is not waited for.
    retry(|| async { has_labels(&roles.create(&dry_run, &role).await?, &of_cluster) }).await?;
    // So that what comes into it first has something to copy, as soon as the policy is in force.
    let map = serde_json::from_value(json!({"metadata": {"name": "first"}}))?;
    let before = PLANE.namespace("before").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &before);
    retry(|| async { has_labels(&maps.create(&dry_run, &map).await?, &wanted_labels(&before)) }).await?;
    let (tries, names) = (AtomicUsize::new(0), &namespaces);
    let name = retry(|| async {
        let name = format!("labelled-at-once-{}", tries.fetch_add(1, Ordering::Relaxed));
        let made = create(names, json!({"metadata": {"name": name}})).await?;
        has_labels(&made, &wanted_labels(&name)).map(|()| name)
    })
    .await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &name);
    retry(|| async { has_labels(&maps.create(&dry_run, &map).await?, &wanted_labels(&name)) }).await
}

#[tokio::test]
async fn the_webhook_labels_where_the_api_server_does_not() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("secrets").await?;
    let secrets: Api<Secret> = Api::namespaced(client, &namespace);
    create(&secrets, json!({"metadata": {"name": "a"}})).await?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let other = serde_json::from_value(json!({"metadata": {"name": "b"}}))?;
    // A webhook that is slow is not waited for.
    retry(|| async { has_labels(&secrets.create(&dry_run, &other).await?, &wanted_labels(&namespace)) }).await?;
    retry(|| async {
        let mut made = secrets.get("a").await?;
        made.labels_mut().clear();
        has_labels(&secrets.replace("a", &PostParams::default(), &made).await?, &wanted_labels(&namespace))
    })
    .await
}

#[tokio::test]
async fn a_terminating_object_is_not_touched() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("terminating").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    create(&maps, json!({"metadata": {"name": "a", "finalizers": ["example.com/wait"]}})).await?;
    retry(|| async { has_labels(&maps.get("a").await?, &wanted_labels(&namespace)) }).await?;
    maps.delete("a", &DeleteParams::default()).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null}}});
    maps.patch("a", &PatchParams::default(), &Patch::Merge(take)).await?;
    // One that comes after it in the same watch has been labelled: so it was passed over.
    create(&maps, json!({"metadata": {"name": "b"}})).await?;
    retry(|| async { has_labels(&maps.get("b").await?, &wanted_labels(&namespace)) }).await?;
    let left = maps.get("a").await?;
    ensure!(!left.labels().contains_key(label::SHARDING_HASH), "{:?}", left.labels());
    let let_go = json!({"metadata": {"finalizers": null}});
    maps.patch("a", &PatchParams::default(), &Patch::Merge(let_go)).await?;
    Ok(())
}

#[tokio::test]
async fn kinds_that_appear_and_vanish_are_followed() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("kinds").await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = json!({
        "metadata": {"name": "widgets.widgets.example.com"},
        "spec": {"group": "widgets.example.com", "scope": "Namespaced", "names": {"plural": "widgets", "kind": "Widget"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]},
    });
    let widget = ApiResource::from_gvk(&GroupVersionKind::gvk("widgets.example.com", "v1", "Widget"));
    let widgets: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &widget);
    for round in 0..2 {
        create(&definitions, definition.clone()).await?;
        let object: DynamicObject = serde_json::from_value(
            json!({"apiVersion": "widgets.example.com/v1", "kind": "Widget", "metadata": {"name": "a"}}),
        )?;
        retry(|| async { widgets.create(&PostParams::default(), &object).await }).await?;
        retry(|| async { has_labels(&widgets.get("a").await?, &wanted_labels(&namespace)) })
            .await
            .with_context(|| format!("round {round}"))?;
        definitions.delete("widgets.widgets.example.com", &DeleteParams::default()).await?;
        retry(|| async {
            ensure!(definitions.get_opt("widgets.widgets.example.com").await?.is_none(), "still there");
            Ok(())
        })
        .await?;
    }
    // The others go on.
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    create(&maps, json!({"metadata": {"name": "a"}})).await?;
    retry(|| async { has_labels(&maps.get("a").await?, &wanted_labels(&namespace)) }).await
}

/// How often the API server listed all of a resource, as it counts itself.
async fn lists(client: &Client, resource: &str) -> Result<f64> {
    let metrics = http::Request::get("/metrics").body(Vec::new())?;
    let metrics = client.request_text(metrics).await?;
    let of_it = metrics.lines().filter(|line| {
        line.starts_with("apiserver_request_total{")
            && line.contains(&format!("resource=\"{resource}\""))
            && line.contains("verb=\"LIST\"")
    });
    Ok(of_it.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

/// Has the API server refuse every change of the object `never` of a kind of its own, of cluster scope: nothing but the
/// watches labels that.
async fn stubborn(client: &Client) -> Result<Api<DynamicObject>> {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let refuse = json!({
        "metadata": {"name": "stubborn"},
        "spec": {
            "matchConstraints": {"resourceRules": [
                {"apiGroups": ["stubborn.example.com"], "apiVersions": ["v1"], "resources": ["stubborns"], "operations": ["UPDATE"]},
                {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["UPDATE"]},
            ]},
            "validations": [{"expression": "object.metadata.name != 'never'", "message": "not this one"}],
        },
    });
    create(&policies, refuse).await?;
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    let binding =
        json!({"metadata": {"name": "stubborn"}, "spec": {"policyName": "stubborn", "validationActions": ["Deny"]}});
    create(&bindings, binding).await?;
    // It is in force some time after it is there.
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    create(&maps, json!({"metadata": {"name": "never"}})).await?;
    retry(|| async {
        let change = Patch::Merge(json!({"data": {"a": "b"}}));
        let changed = maps.patch("never", &PatchParams::default(), &change).await;
        ensure!(changed.is_err(), "it is not refused");
        Ok(())
    })
    .await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = json!({
        "metadata": {"name": "stubborns.stubborn.example.com"},
        "spec": {"group": "stubborn.example.com", "scope": "Cluster", "names": {"plural": "stubborns", "kind": "Stubborn"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]},
    });
    create(&definitions, definition).await?;
    let kind = GroupVersionKind::gvk("stubborn.example.com", "v1", "Stubborn");
    Ok(Api::all_with(client.clone(), &ApiResource::from_gvk(&kind)))
}

/// Lets `never` be changed.
async fn relent(client: &Client) -> Result<()> {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    policies.delete("stubborn", &DeleteParams::default()).await?;
    bindings.delete("stubborn", &DeleteParams::default()).await?;
    Ok(())
}

#[tokio::test]
async fn an_object_that_cannot_be_labelled_is_reported_once() -> Result<()> {
    let client = managed().await?;
    let objects = stubborn(&client).await?;
    let object = |name: &str| {
        serde_json::from_value::<DynamicObject>(
            json!({"apiVersion": "stubborn.example.com/v1", "kind": "Stubborn", "metadata": {"name": name}}),
        )
    };
    let never = object("never")?;
    retry(|| async { objects.create(&PostParams::default(), &never).await }).await?;
    let manager = STARTED.get().and_then(|started| started.as_ref().ok()).context("no manager")?;
    let failed = "ctrlmesh_manager_label_repairs_total{kind=\"stubborns.stubborn.example.com/v1\",outcome=\"failed\"";
    let fails = async |times: u64| {
        retry(|| async {
            let count = manager.counted(failed).await?;
            ensure!(count >= times, "{count} failures");
            Ok(())
        })
        .await
    };
    // It is told when the kind has been listed: before that, the watch of new objects may show this one.
    let events: Api<Event> = Api::namespaced(client.clone(), NAMESPACE);
    retry(|| async {
        let events = events.list(&ListParams::default()).await?;
        let told = events.items.iter().any(|event| {
            event.reason.as_deref() == Some("NotLabelled")
                && event.note.as_ref().is_some_and(|note| note.contains("not this one"))
        });
        ensure!(told, "not told");
        Ok(())
    })
    .await?;
    let again = async || {
        let (before, failures) = (lists(&client, "stubborns").await?, manager.counted(failed).await?);
        fails(failures + 1).await?;
        Ok::<_, anyhow::Error>(lists(&client, "stubborns").await? - before)
    };
    // The API server may expire the first watch of a new kind; then it is listed once more, whatever fails.
    let mut count = again().await?;
    if count > 0.0 {
        count = again().await?;
    }
    ensure!(count < 1.0, "listed {count} times again");
    ensure!(manager.counted("ctrlmesh_manager_label_kinds_unfinished").await? >= 1);
    // The others of its kind are labelled.
    objects.create(&PostParams::default(), &object("other")?).await?;
    let slot = |name: &str| NamespaceHash::default().slot(name).to_string();
    let of_cluster = |name: &str| [(label::SHARDING_HASH.to_owned(), slot(name))].into();
    retry(|| async { has_labels(&objects.get("other").await?, &of_cluster("other")) }).await?;
    relent(&client).await?;
    // It is tried again after a minute at the latest, so few times has it failed.
    retry(|| async { has_labels(&objects.get("never").await?, &of_cluster("never")) })
        .or_else(|_| retry(|| async { has_labels(&objects.get("never").await?, &of_cluster("never")) }))
        .or_else(|_| retry(|| async { has_labels(&objects.get("never").await?, &of_cluster("never")) }))
        .await
}
