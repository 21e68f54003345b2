//! Takes over by which labels and hash objects are divided, and which kinds have them.
//!
//! Pure.

use ctrlmesh_common::names::{MANAGER_STATE, resource_list};
use serde_json::{Value, json};

use super::Planned;
use crate::migrate::change::{Action, Change, Reversible};
use crate::migrate::labels::Labels;
use crate::migrate::object::{CONFIG_MAP, MANAGER_STATE as STATES};
use crate::migrate::snapshot::Snapshot;

pub(super) fn plan(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    if let Some(kinds) = snapshot.kinds.as_ref().filter(|_| !snapshot.has_own_kinds) {
        let target = CONFIG_MAP.named(Some(&snapshot.system), resource_list::NAME);
        let content = json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": resource_list::NAME, "namespace": snapshot.system}, "data": kinds.data.get("data")});
        planned.changes.push(Reversible::create(target, content));
    }
    let found = Labels::of(&snapshot.namespaces, snapshot.manager.as_ref());
    if !found.different.is_empty() {
        let (count, key) = (found.different.len(), &found.labelling.hash_key);
        planned.notes.push(format!(
            "{count} of {} namespaces have another value in {key} than the predecessor's hash says, such as {}; our managers repair them",
            found.labelled, found.different[0]
        ));
    }
    planned.notes.extend(found.unheeded.iter().map(|flag| {
        format!(
            "flag {} of the predecessor's manager names {}, which no namespace carries as a hash, as its name or as a mark: our managers do not write that label",
            flag.name, flag.value
        )
    }));
    let wanted = json!({"shardingHash": found.labelling.hash_key, "namespace": found.labelling.namespace_key,
        "control": found.labelling.control_key, "hash": found.labelling.hash.to_string()});
    let in_force = snapshot.manager_state.as_ref().and_then(|state| state.data.pointer("/status/labels/inForce"));
    match in_force {
        Some(in_force) if *in_force == wanted => {}
        Some(in_force) if in_force.get("shardingHash") == wanted.get("shardingHash") => planned.problems.push(format!(
            "our managers run already and write another hash into {}, by which the predecessor's pods still go: start them with {}",
            found.labelling.hash_key,
            found.flags().join(" ")
        )),
        Some(in_force) => planned.notes.push(format!(
            "our managers run already, and have labels of their own in force, {in_force}; those of the predecessor stay on the objects"
        )),
        None => take_over(snapshot, &wanted, &mut planned),
    }
    planned
}

/// Writes down which labels are in force, before our managers start.
fn take_over(snapshot: &Snapshot, wanted: &Value, planned: &mut Planned) {
    let state = STATES.named(None, MANAGER_STATE);
    if snapshot.manager_state.is_none() {
        // By its label one sees who has made it.
        let metadata = json!({"name": MANAGER_STATE, "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}});
        let content = json!({"apiVersion": STATES.api_version(), "kind": STATES.kind, "metadata": metadata});
        planned.changes.push(Reversible::create(state.clone(), content));
    }
    let status = |labels: Value| Action::MergeStatus(json!({"status": {"labels": labels}}));
    planned.changes.push(Reversible {
        change: Change::new(state.clone(), status(json!({ "inForce": wanted }))),
        inverse: Some(Change::new(state, status(Value::Null))),
    });
}
