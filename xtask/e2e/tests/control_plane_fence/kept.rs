//! Policies follow their roots.

use std::fmt::Debug;

use anyhow::{Result, ensure};
use ctrlmesh_manager::ownership::fence_names::object_name;
use ctrlmesh_manager::ownership::informer_policy;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::bed::{self, Bed, Operator, create, refusal};

fn policies(bed: &Bed) -> Api<ValidatingAdmissionPolicy> {
    Api::all(bed.client.clone())
}

fn name(operator: &Operator) -> String {
    object_name(&operator.namespace, "op")
}

/// Waits until there is neither policy nor binding.
async fn gone(bed: &Bed, operator: &Operator) -> Result<()> {
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(bed.client.clone());
    retry(|| async {
        ensure!(policies(bed).get_opt(&name(operator)).await?.is_none(), "the policy is there");
        ensure!(bindings.get_opt(&name(operator)).await?.is_none(), "the binding is there");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_fence_that_is_switched_off_is_removed() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let off = Patch::Merge(json!({"spec": {"root": {"fence": "Off"}}}));
    bed.roots(&operator).patch("op", &PatchParams::default(), &off).await?;
    gone(&bed, &operator).await?;
    bed.state(&operator, |state| state.is_none()).await?;
    let pod = bed.pod(&operator, "op-0").await?;
    let other: Api<ConfigMap> = Api::namespaced(pod, &operator.place("eight"));
    // An API server takes a moment to hear of it.
    retry(|| async { create(&other, json!({"metadata": {"generateName": "a"}})).await.map(drop) }).await
}

#[tokio::test]
async fn a_fence_goes_with_its_root_and_shuts_nobody_out() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    bed.roots(&operator).delete("op", &DeleteParams::default()).await?;
    gone(&bed, &operator).await?;
    let maps: Api<ConfigMap> = Api::namespaced(bed.client.clone(), &operator.place("eight"));
    retry(|| async { create(&maps, json!({"metadata": {"generateName": "a"}})).await.map(drop) }).await
}

#[tokio::test]
async fn a_policy_that_somebody_changes_is_restored() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let before = policies(&bed).get(&name(&operator)).await?.spec;
    let weak = Patch::Merge(json!({"spec": {"failurePolicy": "Ignore", "matchConditions": null}}));
    let changed = policies(&bed).patch(&name(&operator), &PatchParams::default(), &weak).await?;
    assert_ne!(changed.spec, before);
    retry(|| async {
        ensure!(policies(&bed).get(&name(&operator)).await?.spec == before, "it is not restored");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn another_service_account_changes_the_policy() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let before = bed.revision(&operator).await?;
    let sets: Api<StatefulSet> = Api::namespaced(bed.client.clone(), &operator.namespace);
    let other = Patch::Merge(json!({"spec": {"template": {"spec": {"serviceAccountName": "other"}}}}));
    sets.patch("op", &PatchParams::default(), &other).await?;
    // What the policy before enforced does not count any more.
    bed.another_revision(&operator, &before).await?;
    let spec = policies(&bed).get(&name(&operator)).await?.spec;
    let text = serde_json::to_string(&spec)?;
    ensure!(text.contains(&format!("system:serviceaccount:{}:other", operator.namespace)), "{text}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_starts_anew_fences_at_once_and_nobody_else() -> Result<()> {
    let mut plane = ControlPlane::start(&Options::default())?;
    let bed = bed::own(&plane).await?;
    let operator = bed.operator().await?;
    let pod = bed.pod(&operator, "op-0").await?;
    plane.restart_apiserver()?;
    let theirs = operator.place("eight");
    let map = serde_json::from_value(json!({"metadata": {"generateName": "a"}}))?;
    let write = async |client: &Client| {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &theirs);
        maps.create(&PostParams::default(), &map).await
    };
    // The first connections may still be those to the former one.
    let said = retry(|| async { refusal(write(&pod).await) }).await?;
    assert!(said.contains("in slot 8 belongs to op-2-normal"), "{said}");
    write(&bed.client).await?;
    Ok(())
}

/// Deletes what has an owner, as Kubernetes does when the manager's namespace goes.
async fn delete_owned<K>(all: &Api<K>) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    for one in all.list(&ListParams::default()).await?.items {
        if !one.owner_references().is_empty() {
            all.delete(&one.name_any(), &DeleteParams::default()).await?;
        }
    }
    ensure!(all.get_opt(informer_policy::NAME).await?.is_some(), "what keeps the informer running is gone");
    Ok(())
}

#[tokio::test]
async fn a_fence_made_after_the_last_one_went_is_enforced() -> Result<()> {
    let plane = ControlPlane::start(&Options::default())?;
    let bed = bed::own(&plane).await?;
    let first = bed.operator().await?;
    let pod = bed.pod(&first, "op-0").await?;
    bed.roots(&first).delete("op", &DeleteParams::default()).await?;
    gone(&bed, &first).await?;
    delete_owned(&policies(&bed)).await?;
    delete_owned(&Api::<ValidatingAdmissionPolicyBinding>::all(bed.client.clone())).await?;
    let theirs: Api<ConfigMap> = Api::namespaced(pod, &first.place("eight"));
    // Now the API server knows no fence any more.
    retry(|| async { create(&theirs, json!({"metadata": {"generateName": "a"}})).await.map(drop) }).await?;
    // It waits until the API server enforces the fence.
    let second = bed.operator().await?;
    let pod = bed.pod(&second, "op-0").await?;
    let theirs: Api<ConfigMap> = Api::namespaced(pod, &second.place("eight"));
    let map = serde_json::from_value(json!({"metadata": {"generateName": "a"}}))?;
    let said = refusal(theirs.create(&PostParams::default(), &map).await)?;
    ensure!(said.contains("in slot 8 belongs to op-2-normal"), "{said}");
    Ok(())
}
