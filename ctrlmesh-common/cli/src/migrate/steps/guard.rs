//! Refuses new pods with the trigger while neither the predecessor's webhook nor ours would inject them.
//!
//! Pure. A pod that is made then, and not injected, would work on every object beside the shards.

use ctrlmesh_common::names::label;
use serde_json::{Value, json};

use super::Planned;
use crate::migrate::change::Reversible;
use crate::migrate::object::{BINDING, ObjectRef, POLICY, Resource};
use crate::migrate::snapshot::{KRIDGE_ENABLE_PROXY, Snapshot};

/// Name of the policy and of its binding.
pub(in crate::migrate) const GUARD: &str = "ctrlmesh-migration";

fn objects() -> [(ObjectRef, Value); 2] {
    let keys = [label::ENABLE_PROXY, KRIDGE_ENABLE_PROXY];
    let expression = format!(
        "!has(object.metadata.labels) || !['{}', '{}'].exists(key, key in object.metadata.labels && object.metadata.labels[key] == 'true')",
        keys[0], keys[1]
    );
    let message = "a migration to ctrlmesh is under way, and nobody injects this pod now: go on with `ctrlmesh migrate run`, or take it back with `ctrlmesh migrate undo`";
    let object = |kind: Resource, spec: Value| {
        let metadata = json!({"name": GUARD, "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}});
        let content = json!({"apiVersion": kind.api_version(), "kind": kind.kind, "metadata": metadata, "spec": spec});
        (kind.named(None, GUARD), content)
    };
    let pods = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]});
    let policy = json!({"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [pods]},
        "validations": [{"expression": expression, "message": message}]});
    let binding = json!({"policyName": GUARD, "validationActions": ["Deny"]});
    [object(POLICY, policy), object(BINDING, binding)]
}

pub(super) fn create() -> Planned {
    let changes = objects().into_iter().map(|(object, content)| Reversible::create(object, content));
    Planned { changes: changes.collect(), ..Planned::default() }
}

pub(super) fn delete(snapshot: &Snapshot) -> Planned {
    let there = objects().into_iter().rev().filter(|(object, _)| snapshot.guard.contains(object));
    let changes = there.map(|(object, content)| Reversible::delete(object, Some(content)));
    Planned { changes: changes.collect(), ..Planned::default() }
}
