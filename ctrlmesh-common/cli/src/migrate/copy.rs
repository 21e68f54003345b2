//! Changes a copy of what is there, so that a plan knows what earlier steps leave to later ones.
//!
//! Pure.

use ctrlmesh_common::names::{GROUP, KRIDGE_GROUP, fake_kubeconfig, resource_list};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::change::{Action, Change};
use super::object::{
    BINDING, CONFIG_MAP, DEPLOYMENT, MANAGER_STATE, MUTATING, ObjectRef, POLICY, STATEFUL_SET, VALIDATING,
};
use super::snapshot::{MIGRATED, Snapshot};

/// Carries out a change on the copy, as the API server would.
pub(super) fn apply(snapshot: &mut Snapshot, change: &Change) {
    let object = &change.object;
    let is_kind = |kind: &str| object.kind == kind;
    if is_kind(POLICY.kind) || is_kind(BINDING.kind) {
        match change.action {
            Action::Delete => drop(snapshot.guard.remove(object)),
            _ => drop(snapshot.guard.insert(object.clone())),
        }
    } else if is_kind(MANAGER_STATE.kind) {
        snapshot.manager_state = changed(snapshot.manager_state.take(), change);
    } else if is_kind(CONFIG_MAP.kind) && object.name == resource_list::NAME {
        snapshot.has_own_kinds = true;
    } else if snapshot.manager.as_ref().is_some_and(|manager| object.is(manager)) {
        snapshot.manager = changed(snapshot.manager.take(), change);
    } else if let Some(list) = list_of(snapshot, object) {
        let at = list.iter().position(|one| object.is(one));
        let before = at.map(|at| list.remove(at));
        list.extend(changed(before, change));
        replace_pods(snapshot, change);
    }
}

/// The objects among which this one is.
fn list_of<'a>(snapshot: &'a mut Snapshot, object: &ObjectRef) -> Option<&'a mut Vec<DynamicObject>> {
    let kinds = |kinds: [&str; 2]| kinds.contains(&object.kind.as_str());
    match object.group.as_str() {
        GROUP => Some(&mut snapshot.rules),
        KRIDGE_GROUP => Some(&mut snapshot.kridge),
        _ if kinds([MUTATING.kind, VALIDATING.kind]) => Some(&mut snapshot.webhooks),
        _ if kinds([DEPLOYMENT.kind, STATEFUL_SET.kind]) => Some(&mut snapshot.workloads),
        _ if object.kind == CONFIG_MAP.kind && object.name == fake_kubeconfig::NAME => {
            Some(&mut snapshot.fake_kubeconfigs)
        }
        _ => None,
    }
}

/// The object behind the change. `None`: there is none any more.
fn changed(object: Option<DynamicObject>, change: &Change) -> Option<DynamicObject> {
    match &change.action {
        Action::Create(content) => serde_json::from_value(content.clone()).ok().or(object),
        Action::Delete => None,
        Action::Merge(patch) | Action::MergeStatus(patch) => {
            let mut value = serde_json::to_value(object?).ok()?;
            json_patch::merge(&mut value, patch);
            serde_json::from_value(value).ok()
        }
        Action::AddFinalizer(finalizer) => {
            let mut object = object?;
            object.finalizers_mut().push(finalizer.clone());
            Some(object)
        }
        Action::RemoveFinalizer(finalizer) => {
            let mut object = object?;
            object.finalizers_mut().retain(|one| one != finalizer);
            let is_gone = object.metadata.deletion_timestamp.is_some() && object.finalizers().is_empty();
            (!is_gone).then_some(object)
        }
    }
}

/// The pods of a workload that is enrolled are not the predecessor's any more.
fn replace_pods(snapshot: &mut Snapshot, change: &Change) {
    let Action::Merge(patch) = &change.action else { return };
    let marker = patch.pointer("/spec/template/metadata/annotations").and_then(|all| all.get(MIGRATED));
    let workload = snapshot.workloads.iter().find(|one| change.object.is(one));
    let Some(workload) = workload.filter(|_| marker == Some(&json!("true"))) else { return };
    let selector = workload.data.pointer("/spec/selector/matchLabels").and_then(Value::as_object);
    let Some(selector) = selector.filter(|selector| !selector.is_empty()).cloned() else { return };
    let is_of = |pod: &DynamicObject| {
        let has = |(key, value): (&String, &Value)| pod.labels().get(key).map(String::as_str) == value.as_str();
        pod.metadata.namespace == change.object.namespace && selector.iter().all(has)
    };
    snapshot.pods.retain(|pod| !is_of(pod));
}
