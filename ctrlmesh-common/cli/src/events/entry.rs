//! Picks the events that are of ours, and reads times and counts, however they are written.
//!
//! Pure. An event of `events.k8s.io` has `eventTime`, and a `series` once it was repeated. One that was written through
//! the core API has `deprecatedFirstTimestamp`, `deprecatedLastTimestamp` and `deprecatedCount` in their place.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::GROUP;
use ctrlmesh_manager::status::cluster_writer::FIELD_MANAGER;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use kube::Resource as _;
use serde::Serialize;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Entry {
    /// Of the event itself.
    pub(super) namespace: String,
    pub(super) name: String,
    /// When it came first. Absent: the event does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first: Option<Timestamp>,
    /// When it came last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) last: Option<Timestamp>,
    pub(super) count: i32,
    /// `Normal` or `Warning`.
    #[serde(rename = "type")]
    pub(super) type_: String,
    pub(super) reason: String,
    pub(super) regarding: Regarding,
    pub(super) message: String,
    pub(super) reported_by: String,
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Regarding {
    pub(super) kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

/// Those of ours, the newest last. With `configs`, only those about ShardingConfigs of these names.
pub(super) fn entries(events: &[Event], configs: Option<&BTreeSet<String>>) -> Vec<Entry> {
    let is_meant = |event: &&Event| match configs {
        Some(names) => config_name(event).is_some_and(|name| names.contains(name)),
        None => is_ours(event),
    };
    let mut entries: Vec<Entry> = events.iter().filter(is_meant).map(Entry::of).collect();
    entries
        .sort_by(|one, other| (one.last, &one.namespace, &one.name).cmp(&(other.last, &other.namespace, &other.name)));
    entries
}

/// When an event came last.
pub(crate) fn last_time(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().map(|series| series.last_observed_time.0);
    let deprecated = event.deprecated_last_timestamp.as_ref().map(|time| time.0);
    let time = event.event_time.as_ref().map(|time| time.0);
    series.or(deprecated).or(time).or(created(event))
}

/// The ShardingConfig that an event is about. `None`: it is about something else.
pub(super) fn config_name(event: &Event) -> Option<&str> {
    let regarding = event.regarding.as_ref()?;
    let is_config = regarding.kind.as_deref() == Some(&*ShardingConfig::kind(&()));
    regarding.name.as_deref().filter(|_| is_config)
}

impl Entry {
    fn of(event: &Event) -> Self {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let time = event.event_time.as_ref().map(|time| time.0);
        let deprecated = event.deprecated_first_timestamp.as_ref().map(|time| time.0);
        let series = event.series.as_ref().map(|series| series.count);
        let source = event.deprecated_source.as_ref().and_then(|source| source.component.clone());
        let reporter = event.reporting_controller.clone().filter(|name| !name.is_empty());
        Self {
            namespace: text(&event.metadata.namespace),
            name: text(&event.metadata.name),
            first: time.or(deprecated).or(created(event)),
            last: last_time(event),
            count: series.or(event.deprecated_count).unwrap_or(1).max(1),
            type_: text(&event.type_),
            reason: text(&event.reason),
            regarding: Regarding::of(event.regarding.as_ref()),
            message: text(&event.note),
            reported_by: reporter.or(source).unwrap_or_default(),
        }
    }
}

impl Regarding {
    fn of(reference: Option<&ObjectReference>) -> Self {
        let text = |text: Option<&String>| text.cloned().unwrap_or_default();
        Self {
            kind: text(reference.and_then(|one| one.kind.as_ref())),
            namespace: reference.and_then(|one| one.namespace.clone()),
            name: text(reference.and_then(|one| one.name.as_ref())),
        }
    }
}

fn created(event: &Event) -> Option<Timestamp> {
    event.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// Whether it is about a resource of ours, or reported by our manager.
fn is_ours(event: &Event) -> bool {
    let regarding = event.regarding.as_ref();
    let group = regarding.and_then(|one| one.api_version.as_ref()?.split_once('/')).map(|(group, _)| group);
    let source = event.deprecated_source.as_ref().and_then(|source| source.component.as_deref());
    let reporters = [event.reporting_controller.as_deref(), source];
    group == Some(GROUP) || reporters.contains(&Some(FIELD_MANAGER))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn event(name: &str, fields: Value) -> Event {
        let mut event = json!({"metadata": {"namespace": "ops", "name": name}, "type": "Normal", "reason": "Granted",
            "note": "epoch 1", "reportingController": "ctrlmesh-manager",
            "regarding": {"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "name": "web"}});
        event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        serde_json::from_value(event).unwrap()
    }

    fn at(second: u8) -> String {
        format!("2026-01-01T00:00:0{second}Z")
    }

    #[test]
    fn times_and_counts_are_read_in_both_spellings() {
        let micro = |second| format!("2026-01-01T00:00:0{second}.000000Z");
        let once = event("a", json!({"eventTime": micro(1)}));
        let series = json!({"eventTime": micro(1), "series": {"count": 3, "lastObservedTime": micro(4)}});
        let series = event("b", series);
        let core = json!({"deprecatedFirstTimestamp": at(2), "deprecatedLastTimestamp": at(3), "deprecatedCount": 7,
            "deprecatedSource": {"component": "old"}, "reportingController": ""});
        let core = event("c", core);
        let read = entries(&[series, core, once], None);
        let said = |entry: &Entry| {
            let time = |time: Option<Timestamp>| time.unwrap().to_string();
            (entry.name.clone(), time(entry.first), time(entry.last), entry.count, entry.reported_by.clone())
        };
        let expected = [("a", 1, 1, 1, "ctrlmesh-manager"), ("c", 2, 3, 7, "old"), ("b", 1, 4, 3, "ctrlmesh-manager")];
        let expected =
            expected.map(|(name, first, last, count, by)| (name.to_owned(), at(first), at(last), count, by.to_owned()));
        assert_eq!(read.iter().map(said).collect::<Vec<_>>(), expected, "the newest is last");
    }

    #[test]
    fn an_event_without_times_goes_by_its_creation() {
        let created = event("a", json!({"metadata": {"name": "a", "creationTimestamp": at(5)}}));
        assert_eq!(last_time(&created).unwrap().to_string(), at(5));
        assert_eq!(last_time(&event("a", json!({}))), None);
    }

    #[test]
    fn only_events_of_ours_are_shown() {
        let secret = json!({"regarding": {"apiVersion": "v1", "kind": "Secret", "name": "ctrlmesh-ca"}});
        let foreign =
            json!({"regarding": {"apiVersion": "v1", "kind": "Pod", "name": "p"}, "reportingController": "kubelet"});
        let by_hand = json!({"reportingController": "kubectl"});
        let events = [event("secret", secret), event("foreign", foreign), event("by-hand", by_hand)];
        let names: Vec<String> = entries(&events, None).into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["by-hand", "secret"]);
        let web: BTreeSet<String> = ["web".to_owned()].into();
        let names: Vec<String> = entries(&events, Some(&web)).into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["by-hand"]);
        let other: BTreeSet<String> = ["other".to_owned()].into();
        assert_eq!(entries(&events, Some(&other)), []);
    }
}
