//! Refuses new pods with the trigger while neither the predecessor's webhook nor ours would inject them.
//!
//! Pure. A pod that is made then, and not injected, would work on every object beside the shards. There are two
//! policies. The one for our trigger goes when our webhook answers. Ours never answers to Kridge's trigger, so that
//! policy stays until the end.

use ctrlmesh_common::names::label;
use serde_json::{Value, json};

use super::Planned;
use crate::migrate::change::Reversible;
use crate::migrate::object::{BINDING, ObjectRef, POLICY, Resource};
use crate::migrate::snapshot::{KRIDGE_ENABLE_PROXY, Snapshot};

/// Name of a policy and of its binding.
pub(in crate::migrate) const GUARD: &str = "ctrlmesh-migration";
pub(in crate::migrate) const KRIDGES_GUARD: &str = "ctrlmesh-migration-kridge";

/// On a pod in a dry run: each policy refuses it, so that one sees whether the API server enforces them. Its value is
/// the name of a policy.
pub(in crate::migrate) const PROBE: &str = "ctrlmesh.kusionstack.io/migration-probe";

/// The objects of all policies.
pub(in crate::migrate) fn all() -> impl Iterator<Item = (ObjectRef, Value)> {
    ours().into_iter().chain(kridges())
}

fn ours() -> [(ObjectRef, Value); 2] {
    let message = "a migration to ctrlmesh is under way, and nobody injects this pod now: go on with `ctrlmesh migrate run`, or take it back with `ctrlmesh migrate undo`";
    policy(GUARD, &has(label::ENABLE_PROXY), message)
}

/// A pod with both triggers is left to the other policy.
fn kridges() -> [(ObjectRef, Value); 2] {
    let message = format!(
        "nobody injects a pod for label {KRIDGE_ENABLE_PROXY} any more: replace it by {}, or take the migration back with `ctrlmesh migrate undo`",
        label::ENABLE_PROXY
    );
    policy(KRIDGES_GUARD, &format!("{} && !({})", has(KRIDGE_ENABLE_PROXY), has(label::ENABLE_PROXY)), &message)
}

/// An expression: whether a pod has this trigger.
fn has(key: &str) -> String {
    format!(
        "has(object.metadata.labels) && '{key}' in object.metadata.labels && object.metadata.labels['{key}'] == 'true'"
    )
}

/// A policy that refuses the pods of an expression, and its binding.
fn policy(name: &str, refused: &str, message: &str) -> [(ObjectRef, Value); 2] {
    let is_probe = format!(
        "has(object.metadata.annotations) && '{PROBE}' in object.metadata.annotations && object.metadata.annotations['{PROBE}'] == '{name}'"
    );
    let object = |kind: Resource, spec: Value| {
        let metadata = json!({"name": name, "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}});
        let content = json!({"apiVersion": kind.api_version(), "kind": kind.kind, "metadata": metadata, "spec": spec});
        (kind.named(None, name), content)
    };
    let pods = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]});
    let expression = format!("!(({refused}) || ({is_probe}))");
    let policy = json!({"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [pods]},
        "validations": [{"expression": expression, "message": message}]});
    [object(POLICY, policy), object(BINDING, json!({"policyName": name, "validationActions": ["Deny"]}))]
}

pub(super) fn create() -> Planned {
    let changes = all().map(|(object, content)| Reversible::create(object, content));
    Planned { changes: changes.collect(), ..Planned::default() }
}

/// Lets pods with our trigger in.
pub(super) fn delete(snapshot: &Snapshot) -> Planned {
    let there = ours().into_iter().rev().filter(|(object, _)| snapshot.guard.contains(object));
    let changes = there.map(|(object, content)| Reversible::delete(object, Some(content)));
    Planned { changes: changes.collect(), ..Planned::default() }
}

/// Lets pods with Kridge's trigger in, for ever.
pub(super) fn delete_kridges(snapshot: &Snapshot) -> impl Iterator<Item = Reversible> {
    let there = kridges().into_iter().rev().filter(|(object, _)| snapshot.guard.contains(object));
    there.map(|(object, _)| Reversible::delete(object, None))
}

/// Label of pods that the predecessor's webhooks leave out. Some of them take no dry run.
const IGNORED: &str = "ctrlmesh.kusionstack.io/ignore-webhook";

/// A pod that only the policy of this name refuses, wherever it is made. It meets the strictest of Kubernetes' own
/// standards.
pub(in crate::migrate) fn probe(policy: &str) -> Value {
    let security = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let container = json!({"name": "probe", "image": "none", "securityContext": security});
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": policy, "labels": {IGNORED: "true"}, "annotations": {PROBE: policy}},
        "spec": {"automountServiceAccountToken": false, "containers": [container],
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}}}})
}
