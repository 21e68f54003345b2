//! Replaces the pods of each root's workload by a rolling update, in which our webhook enrols them.
//!
//! Pure.

use ctrlmesh_common::names::label;
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};

use super::Planned;
use crate::migrate::change::{Action, Change, Reversible};
use crate::migrate::leftovers::{DROPPED_ANNOTATIONS, DROPPED_LABELS};
use crate::migrate::members;
use crate::migrate::object::{DEPLOYMENT, ObjectRef};
use crate::migrate::snapshot::{
    KRIDGE_ENABLE_PROXY, MIGRATED, Snapshot, UNDONE, in_both_groups, is_disabled, is_to_be_enrolled, kept_by_partition,
};

pub(super) fn plan(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    for root in snapshot.roots() {
        let name = format!("{}/{}", root.namespace().unwrap_or_default(), root.name_any());
        if is_disabled(root) {
            planned.notes.push(format!("root {name} is disabled: restart the pods of its shards yourself"));
            continue;
        }
        let Some((kind, workload)) = snapshot.target(root) else {
            planned.notes.push(format!("the workload of root {name} does not exist: there is nothing to enrol"));
            continue;
        };
        let metadata = workload.data.pointer("/spec/template/metadata").unwrap_or(&Value::Null);
        let target = kind.of_object(workload);
        if metadata.pointer("/annotations").and_then(|all| all.get(MIGRATED)) == Some(&json!("true")) {
            continue;
        }
        if !is_to_be_enrolled(metadata) {
            planned
                .notes
                .push(format!("{target} has no label {} in its pod template: it stays as it is", label::ENABLE_PROXY));
            continue;
        }
        let variable = members::variable(snapshot, workload);
        if let Some(problem) = variable.and_then(|variable| members::problem(root, &target, &variable)) {
            planned.problems.push(problem);
            continue;
        }
        let strategy = if kind == DEPLOYMENT { "/spec/strategy/type" } else { "/spec/updateStrategy/type" };
        if workload.data.pointer(strategy) == Some(&json!("OnDelete")) {
            planned
                .notes
                .push(format!("{target} has the strategy OnDelete: delete its pods yourself, one after the other"));
        }
        let kept = kept_by_partition(workload);
        if kept > 0 {
            planned.notes.push(format!(
                "{target} has a partition, which keeps {kept} of its pods: they stay the predecessor's until you lower it"
            ));
        }
        enrol(target, metadata, &mut planned);
    }
    planned
}

/// The inverse takes the trigger away, so that pods come without a proxy, and marks the template: a later run enrols it
/// again. The predecessor's webhook injects them again when all is undone, and only then do they get the trigger.
fn enrol(target: ObjectRef, metadata: &Value, planned: &mut Planned) {
    let mut labels = Map::from_iter([(label::ENABLE_PROXY.to_owned(), json!("true"))]);
    let mut annotations = Map::from_iter([(MIGRATED.to_owned(), json!("true"))]);
    if metadata.pointer("/labels").and_then(|labels| labels.get(KRIDGE_ENABLE_PROXY)).is_some() {
        labels.insert(KRIDGE_ENABLE_PROXY.to_owned(), Value::Null);
    }
    for (map, field, dropped) in
        [(&mut labels, "labels", &DROPPED_LABELS[..]), (&mut annotations, "annotations", &DROPPED_ANNOTATIONS[..])]
    {
        let keys = dropped.iter().flat_map(|key| in_both_groups(key));
        let there = keys.filter(|key| metadata.get(field).and_then(|all| all.get(key)).is_some());
        map.extend(there.map(|key| (key, Value::Null)));
    }
    let before = |field: &str, changed: &Map<String, Value>| -> Value {
        let value = |key: &String| metadata.get(field).and_then(|all| all.get(key)).cloned().unwrap_or(Value::Null);
        changed.keys().map(|key| (key.clone(), value(key))).collect()
    };
    let template = |labels: Value, annotations: Value| json!({"spec": {"template": {"metadata": {"labels": labels, "annotations": annotations}}}});
    let restored = template(before("labels", &labels), before("annotations", &annotations));
    let leave = template(json!({label::ENABLE_PROXY: null}), json!({MIGRATED: UNDONE}));
    let patch = template(Value::Object(labels), Value::Object(annotations));
    planned.undone_last.push(Change::new(target.clone(), Action::Merge(restored)));
    planned.changes.push(Reversible::merge(target, patch, leave));
}
