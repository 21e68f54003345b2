//! Finds the pod templates of a workload's revisions, and makes the patch that puts one back.
//!
//! Pure. Objects are as the API server gives them, since a template must come back whole.

use ctrlmesh_common::names::label;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;
use serde_json::{Value, json};

/// In a strategic merge patch, says what becomes of the object that it stands in.
const DIRECTIVE: &str = "$patch";

/// The present pod template of a workload.
pub(super) fn of_workload(workload: &DynamicObject) -> Option<&Value> {
    workload.data.pointer("/spec/template")
}

/// The template from which `owner`, a Deployment, made this `ReplicaSet`. `None` if it is of another revision, or of
/// another Deployment.
pub(super) fn of_replica_set(set: &DynamicObject, revision: &str, owner: &ObjectMeta) -> Option<Value> {
    let labels = set.metadata.labels.as_ref();
    let hash = labels.and_then(|labels| labels.get(label::POD_TEMPLATE_HASH));
    if hash.map(String::as_str) != Some(revision) || !is_controlled(set, owner) {
        return None;
    }
    let mut template = set.data.pointer("/spec/template")?.clone();
    let labels = template.pointer_mut("/metadata/labels").and_then(Value::as_object_mut);
    labels.and_then(|labels| labels.remove(label::POD_TEMPLATE_HASH));
    Some(template)
}

/// The template in this `ControllerRevision` of `owner`, a StatefulSet. `None` if it is of another.
pub(super) fn of_controller_revision(revision: &DynamicObject, owner: &ObjectMeta) -> Option<Value> {
    let mut template = revision.data.pointer("/data/spec/template").filter(|_| is_controlled(revision, owner))?.clone();
    template.as_object_mut()?.remove(DIRECTIVE);
    Some(template)
}

/// The revision of the present template of a StatefulSet. `None` until its controller has seen the template.
pub(super) fn update_revision(set: &DynamicObject) -> Option<&str> {
    let observed = set.data.pointer("/status/observedGeneration").and_then(Value::as_i64);
    let revision = set.data.pointer("/status/updateRevision").and_then(Value::as_str);
    revision.filter(|_| observed.is_some() && observed == set.metadata.generation)
}

/// The strategic merge patch that gives the workload `there` exactly this template, unless it changed in between.
pub(super) fn patch(there: &ObjectMeta, mut template: Value) -> Value {
    if let Some(fields) = template.as_object_mut() {
        fields.insert(DIRECTIVE.to_owned(), json!("replace"));
    }
    json!({
        "metadata": {"uid": there.uid, "resourceVersion": there.resource_version},
        "spec": {"template": template},
    })
}

fn is_controlled(object: &DynamicObject, owner: &ObjectMeta) -> bool {
    let mut owners = object.metadata.owner_references.iter().flatten();
    owners.any(|one| one.controller == Some(true) && Some(&one.uid) == owner.uid.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    fn template(image: &str) -> Value {
        json!({
            "metadata": {"creationTimestamp": null, "labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "image": image, "fieldOfTomorrow": 1}]},
        })
    }

    fn owned(uid: &str, more: Value) -> DynamicObject {
        let owner = json!({"apiVersion": "apps/v1", "kind": "X", "name": "web", "uid": uid, "controller": true});
        let mut value = json!({"metadata": {"name": "web-1", "ownerReferences": [owner]}});
        for (key, field) in more.as_object().unwrap() {
            value[key] = field.clone();
        }
        value["metadata"]["labels"] = json!({"app": "web", "pod-template-hash": "1"});
        object(value)
    }

    fn workload() -> DynamicObject {
        let metadata = json!({"name": "web", "uid": "u", "resourceVersion": "7", "generation": 3});
        let status = json!({"observedGeneration": 3, "updateRevision": "web-2"});
        object(json!({"metadata": metadata, "spec": {"template": template("a")}, "status": status}))
    }

    #[test]
    fn a_replica_set_has_the_deployments_template_but_for_the_hash() {
        let mut hashed = template("a");
        hashed["metadata"]["labels"]["pod-template-hash"] = json!("1");
        let set = |uid: &str| owned(uid, json!({"spec": {"template": hashed}}));
        let there = workload();
        let found = of_replica_set(&set("u"), "1", &there.metadata);
        assert_eq!((found.as_ref(), found.is_some()), (of_workload(&there), true));
        assert_eq!(of_replica_set(&set("u"), "2", &there.metadata), None, "another revision");
        assert_eq!(of_replica_set(&set("v"), "1", &there.metadata), None, "of another Deployment");
    }

    #[test]
    fn a_controller_revision_is_a_patch_with_the_template() {
        let mut replaced = template("b");
        replaced[DIRECTIVE] = json!("replace");
        let revision = |uid: &str| owned(uid, json!({"data": {"spec": {"template": replaced}}}));
        let there = workload();
        assert_eq!(of_controller_revision(&revision("u"), &there.metadata), Some(template("b")));
        assert_eq!(of_controller_revision(&revision("v"), &there.metadata), None, "of another StatefulSet");
        assert_eq!(of_controller_revision(&owned("u", json!({"data": {}})), &there.metadata), None);
        // It comes back as it was kept.
        assert_eq!(patch(&there.metadata, template("b"))["spec"]["template"], replaced);
    }

    #[test]
    fn the_revision_is_unknown_until_the_controller_saw_the_template() {
        assert_eq!(update_revision(&workload()), Some("web-2"));
        let mut changed = workload();
        changed.metadata.generation = Some(4);
        assert_eq!(update_revision(&changed), None);
        let mut fresh = workload();
        (fresh.metadata.generation, fresh.data["status"]) = (None, json!({}));
        assert_eq!(update_revision(&fresh), None);
    }

    #[test]
    fn the_patch_replaces_the_template_of_the_version_that_was_read() {
        let expected = json!({
            "metadata": {"uid": "u", "resourceVersion": "7"},
            "spec": {"template": {
                "$patch": "replace",
                "metadata": {"creationTimestamp": null, "labels": {"app": "web"}},
                "spec": {"containers": [{"name": "web", "image": "b", "fieldOfTomorrow": 1}]},
            }},
        });
        assert_eq!(patch(&workload().metadata, template("b")), expected);
    }
}
