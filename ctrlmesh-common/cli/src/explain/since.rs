//! Says since when an object belongs to its owner.
//!
//! Pure. A table has no times. Events and a condition do: an event is exact, and is kept for an hour by most clusters.

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_manager::status::cluster_writer::GrantedShare;
use jiff::Timestamp;
use k8s_openapi::api::events::v1::Event;
use serde::Serialize;

use crate::events::entry;
use crate::owner::owners::{RootOwner, Rule};

/// Condition of a root that says whether ownership is on its way, and its reason where the owners are as wanted.
const SETTLED: &str = "Settled";

/// Since when an object belongs to its owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Since {
    pub(super) time: Timestamp,
    pub(super) source: Source,
}

/// What tells the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Source {
    /// The event with which the manager gave it. It is exact.
    GrantedEvent,
    /// Nothing of the root has moved since. It may have belonged to the owner before.
    SettledCondition,
}

/// `None`: nobody owns it, or no source tells it. `granted` are events with the reason `Granted` of the root.
pub(super) fn since(
    root: &ShardingConfig,
    owner: &RootOwner,
    object: (Slot, Option<&str>),
    granted: &[Event],
) -> Option<Since> {
    let shard = owner.shard.as_deref()?;
    let namespace = object.1.filter(|_| owner.rule == Rule::Namespace);
    let granted_share = GrantedShare { owner: shard, slot: object.0, namespace };
    let given = granted.iter().filter(|event| event.note.as_deref().is_some_and(|note| granted_share.is_in(note)));
    let exact = given.filter_map(entry::last_time).max();
    let condition = root.status.iter().flat_map(|status| &status.conditions).find(|one| one.type_ == SETTLED);
    let settled = condition.filter(|one| one.status == "True" && one.reason == SETTLED);
    let of_event = exact.map(|time| Since { time, source: Source::GrantedEvent });
    of_event.or_else(|| settled.map(|one| Since { time: one.last_transition_time.0, source: Source::SettledCondition }))
}

/// What the root waits for, if something is on its way.
pub(super) fn moving(root: &ShardingConfig) -> Option<String> {
    let mut conditions = root.status.iter().flat_map(|status| &status.conditions);
    conditions.find(|one| one.type_ == SETTLED && one.status == "False").map(|one| one.message.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn root(settled: Value) -> ShardingConfig {
        let root = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"namespace": "ops", "name": "web"}, "spec": {}, "status": {"conditions": [settled]}});
        serde_json::from_value(root).unwrap()
    }

    fn settled(status: &str, reason: &str) -> Value {
        json!({"type": "Settled", "status": status, "reason": reason, "message": "waits for pod a",
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    fn owner(shard: Option<&str>, rule: Rule) -> RootOwner {
        RootOwner {
            namespace: "ops".to_owned(),
            name: "web".to_owned(),
            workload: String::new(),
            epoch: Some(4),
            selected: true,
            fenced: true,
            shard: shard.map(str::to_owned),
            taken_from: None,
            rule,
            pods: Vec::new(),
        }
    }

    fn event(note: &str, time: &str) -> Event {
        let event = json!({"metadata": {"name": "e"}, "note": note, "eventTime": time});
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn an_event_is_exact_and_the_condition_a_bound() {
        let slot = Slot::try_from(7).unwrap();
        let events = [
            event("epoch 3: given to a: slots 6,7", "2026-01-02T00:00:00.000000Z"),
            event("epoch 4: given from b to a: slots 7", "2026-01-03T00:00:00.000000Z"),
            event("epoch 5: given to a: slots 8", "2026-01-04T00:00:00.000000Z"),
        ];
        let root = root(settled("True", "Settled"));
        let of = |owner: &RootOwner, events: &[Event]| since(&root, owner, (slot, Some("shop")), events);
        let exact = of(&owner(Some("a"), Rule::Slot), &events).unwrap();
        assert_eq!((exact.time.to_string().as_str(), exact.source), ("2026-01-03T00:00:00Z", Source::GrantedEvent));
        let bound = of(&owner(Some("a"), Rule::Slot), &[]).unwrap();
        assert_eq!((bound.time.to_string().as_str(), bound.source), ("2026-01-01T00:00:00Z", Source::SettledCondition));
        assert_eq!(of(&owner(None, Rule::Slot), &events), None);
        let pinned = of(&owner(Some("a"), Rule::Namespace), &events).unwrap();
        assert_eq!(pinned.source, Source::SettledCondition, "the slot does not count");
    }

    #[test]
    fn what_no_source_tells_is_not_known() {
        let slot = Slot::try_from(7).unwrap();
        for unknown in [settled("False", "Moving"), settled("True", "Unfenced")] {
            assert_eq!(since(&root(unknown), &owner(Some("a"), Rule::Slot), (slot, None), &[]), None);
        }
        assert_eq!(moving(&root(settled("False", "Moving"))).as_deref(), Some("waits for pod a"));
        assert_eq!(moving(&root(settled("True", "Settled"))), None);
    }
}
