//! Takes the predecessor's webhook configurations away, and ours while nobody answers there.
//!
//! Pure.

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::Value;

use super::Planned;
use crate::migrate::change::Reversible;
use crate::migrate::object::{ObjectRef, WEBHOOKS, portable};
use crate::migrate::snapshot::Snapshot;

/// Name of our webhook configurations.
pub(in crate::migrate) const OUR_WEBHOOKS: &str = "ctrlmesh";

pub(super) fn plan(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    for webhook in &snapshot.webhooks {
        let Some(target) = ObjectRef::among(webhook, &WEBHOOKS) else { continue };
        if snapshot.is_predecessors(webhook) {
            planned.problems.extend(is_final(webhook, &target));
            planned.changes.push(Reversible::delete(target, portable(webhook)));
        } else if webhook.name_any() == OUR_WEBHOOKS && !snapshot.has_own_managers() {
            // Nobody answers there, and they would refuse what later steps write.
            let Reversible { change, inverse } = Reversible::delete(target, portable(webhook));
            planned.resumed.extend(inverse);
            planned.changes.push(Reversible { change, inverse: None });
        } else if let Some(service) = snapshot.called_nearby(webhook).next() {
            planned.notes.push(format!(
                "{target} stays: Service {}/{service}, which it calls, has another selector than the predecessor's manager",
                snapshot.predecessor.namespace
            ));
        }
    }
    planned
}

/// Why an undo could not make a webhook configuration again: Kubernetes before 1.22 took more than today's does.
fn is_final(webhook: &DynamicObject, target: &ObjectRef) -> Option<String> {
    let hooks = webhook.data.get("webhooks").and_then(Value::as_array);
    let is_old = |hook: &Value| ["Unknown", "Some"].into_iter().any(|effects| hook["sideEffects"] == effects);
    hooks.into_iter().flatten().any(is_old).then(|| {
        format!(
            "{target} could not be made again by an undo: change its sideEffects to NoneOnDryRun, or to None, first"
        )
    })
}
