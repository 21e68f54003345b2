//! What a pod of the operator may write.

use anyhow::Result;
use ctrlmesh_manager::ownership::fence_policy::Evaluation;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Secret};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::bed::{self, Bed, Operator, create, refusal, slot};

fn maps(client: &Client, namespace: &str) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), namespace)
}

async fn make(client: &Client, namespace: &str) -> kube::Result<ConfigMap> {
    make_with(client, namespace, &PostParams::default()).await
}

async fn make_with(client: &Client, namespace: &str, params: &PostParams) -> kube::Result<ConfigMap> {
    let mut map = ConfigMap::default();
    map.metadata.generate_name = Some("new-".to_owned());
    maps(client, namespace).create(params, &map).await
}

fn touch() -> Patch<Value> {
    Patch::Merge(json!({"metadata": {"annotations": {"touched": "yes"}}}))
}

/// Who says what is refused in slot 8, of which `op-1` is the owner.
fn said(place: &str) -> String {
    format!("namespace {place} in slot 8 belongs to op-2-normal, and pod op-0 writes for op-1-normal, by epoch 1")
}

#[tokio::test]
async fn a_pod_writes_in_its_own_slots_and_in_no_other() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let pod = bed.pod(&operator, "op-0").await?;
    let (own, other) = (operator.place("seven"), operator.place("eight"));
    let params = PatchParams::default();
    for namespace in [&own, &other] {
        for name in ["a", "b"] {
            create(&maps(&bed.client, namespace), json!({"metadata": {"name": name}})).await?;
        }
    }
    let everything = (DeleteParams::default(), ListParams::default().fields("metadata.name!=kube-root-ca.crt"));
    let theirs = maps(&pod, &other);
    assert_eq!(refusal(make(&pod, &other).await)?, said(&other));
    assert_eq!(bed.evaluated(&operator, "op-0", &other).await?, Evaluation::Refused(said(&other)));
    assert_eq!(bed.evaluated(&operator, "op-0", &own).await?, Evaluation::Allowed);
    assert_eq!(refusal(theirs.patch("a", &params, &touch()).await)?, said(&other));
    let replaced = theirs.replace("a", &PostParams::default(), &theirs.get("a").await?).await;
    assert_eq!(refusal(replaced)?, said(&other));
    assert_eq!(refusal(theirs.delete("a", &DeleteParams::default()).await)?, said(&other));
    assert_eq!(refusal(theirs.delete_collection(&everything.0, &everything.1).await)?, said(&other));
    // A dry run passes, as a version needs that is a shadow, and stores nothing.
    make_with(&pod, &other, &PostParams { dry_run: true, ..PostParams::default() }).await?;
    theirs.delete("a", &DeleteParams { dry_run: true, ..DeleteParams::default() }).await?;
    assert_eq!(theirs.list(&everything.1).await?.items.len(), 2, "none was deleted or made");
    let ours = maps(&pod, &own);
    make(&pod, &own).await?;
    ours.patch("a", &params, &touch()).await?;
    ours.replace("a", &PostParams::default(), &ours.get("a").await?).await?;
    ours.delete("a", &DeleteParams::default()).await?;
    ours.delete_collection(&everything.0, &everything.1).await?;
    assert!(ours.list(&everything.1).await?.items.is_empty());
    Ok(())
}

#[tokio::test]
async fn subresources_belong_to_the_owner_of_their_object() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let pod = bed.pod(&operator, "op-0").await?;
    let params = PatchParams::default();
    let scale = Patch::Merge(json!({"spec": {"replicas": 2}}));
    let status = Patch::Merge(json!({"status": {"observedGeneration": 1}}));
    for (short, is_own) in [("seven", true), ("eight", false)] {
        let place = operator.place(short);
        let template = json!({"metadata": {"labels": {"app": "a"}},
            "spec": {"containers": [{"name": "a", "image": "none"}]}});
        let deployment = json!({"metadata": {"name": "a"},
            "spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template}});
        create::<Deployment>(&Api::namespaced(bed.client.clone(), &place), deployment).await?;
        let deployments: Api<Deployment> = Api::namespaced(pod.clone(), &place);
        let scaled = deployments.patch_scale("a", &params, &scale).await;
        let reported = deployments.patch_status("a", &params, &status).await;
        if is_own {
            scaled?;
            reported?;
        } else {
            assert_eq!(refusal(scaled)?, said(&place));
            assert_eq!(refusal(reported)?, said(&place));
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_pinned_namespace_belongs_to_its_owner_only() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let place = operator.place("eight");
    let pods = [bed.pod(&operator, "op-0").await?, bed.pod(&operator, "op-1").await?];
    let pinned = json!({"namespaces": {place.as_str(): "op-1-normal"}});
    bed.write_table(&operator, 2, pinned).await?;
    bed.enforced(&operator, 2).await?;
    make(&pods[0], &place).await?;
    let said = refusal(make(&pods[1], &place).await)?;
    assert!(said.contains("belongs to op-1-normal, and pod op-1 writes for op-2-normal, by epoch 2"), "{said}");
    assert_eq!(bed.evaluated(&operator, "op-1", &place).await?, Evaluation::Refused(said));
    // Taken away, it is not its slot's either.
    let revoked = json!({"namespaces": null, "revoked": {"epoch": 3, "namespaces": {place.as_str(): "op-1-normal"}}});
    bed.write_table(&operator, 3, revoked).await?;
    bed.enforced(&operator, 3).await?;
    for (name, pod) in ["op-0", "op-1"].into_iter().zip(&pods) {
        let said = refusal(make(pod, &place).await)?;
        assert_eq!(bed.evaluated(&operator, name, &place).await?, Evaluation::Refused(said.clone()));
        assert!(said.contains(&format!("namespace {place} in slot 8 belongs to nobody, and pod op-")), "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn what_has_no_slot_or_a_revoked_one_is_nobodys() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let pods = [bed.pod(&operator, "op-0").await?, bed.pod(&operator, "op-1").await?];
    let unlabelled = operator.place("unlabelled");
    for (name, pod) in ["op-0", "op-1"].into_iter().zip(&pods) {
        let said = refusal(make(pod, &unlabelled).await)?;
        assert_eq!(bed.evaluated(&operator, name, &unlabelled).await?, Evaluation::Refused(said.clone()));
        assert!(said.starts_with(&format!("namespace {unlabelled} in slot none belongs to nobody")), "{said}");
    }
    let revoked = json!({"slots": {"8": null}, "revoked": {"epoch": 2, "slots": {"8": "op-2-normal"}}});
    bed.write_table(&operator, 2, revoked).await?;
    bed.enforced(&operator, 2).await?;
    let place = operator.place("eight");
    for pod in &pods {
        assert!(refusal(make(pod, &place).await)?.contains("in slot 8 belongs to nobody"));
    }
    make(&pods[0], &operator.place("seven")).await?;
    Ok(())
}

#[tokio::test]
async fn objects_of_cluster_scope_go_by_their_own_label() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let classes: Api<PriorityClass> = Api::all(bed.pod(&operator, "op-0").await?);
    let class =
        |short: &str, labels: Value| json!({"metadata": {"name": operator.place(short), "labels": labels}, "value": 1});
    create(&classes, class("own", slot("7"))).await?;
    let make =
        async |object: Value| classes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await;
    let said = refusal(make(class("other", slot("8"))).await)?;
    assert_eq!(said, "slot 8 belongs to op-2-normal, and pod op-0 writes for op-1-normal, by epoch 1");
    refusal(make(class("none", json!({}))).await)?;
    create(&Api::<PriorityClass>::all(bed.client.clone()), class("other", slot("8"))).await?;
    // A new label does not make it another's.
    let stolen = Patch::Merge(json!({"metadata": {"labels": slot("7")}}));
    refusal(classes.patch(&operator.place("other"), &PatchParams::default(), &stolen).await)?;
    refusal(classes.delete(&operator.place("other"), &DeleteParams::default()).await)?;
    classes.delete(&operator.place("own"), &DeleteParams::default()).await?;
    Ok(())
}

/// What every pod writes, whatever it owns.
async fn written_by_all(bed: &Bed, operator: &Operator, pod: &Client) -> Result<()> {
    let other = operator.place("eight");
    create(&Api::<Secret>::namespaced(pod.clone(), &other), json!({"metadata": {"name": "s"}})).await?;
    let event = json!({"metadata": {"name": "e"}, "involvedObject": {"namespace": other}, "reason": "Because"});
    create(&Api::<Event>::namespaced(pod.clone(), &other), event).await?;
    for name in ["lock", "lock---op-1-normal"] {
        create(&maps(pod, &operator.namespace), json!({"metadata": {"name": name}})).await?;
        let said = create(&maps(pod, &other), json!({"metadata": {"name": name}})).await;
        assert!(said.is_err(), "only in its own namespace");
    }
    let root = bed.roots(operator).get("op").await?;
    let touched = Api::<ctrlmesh_common::api::ShardingConfig>::namespaced(pod.clone(), &operator.namespace)
        .patch("op", &PatchParams::default(), &touch())
        .await?;
    assert_ne!(root.resource_version(), touched.resource_version());
    Ok(())
}

#[tokio::test]
async fn other_kinds_events_and_the_lock_are_not_fenced() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    let pod = bed.pod(&operator, "op-0").await?;
    written_by_all(&bed, &operator, &pod).await
}
