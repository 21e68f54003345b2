//! Says who wrote an object last, by its `managedFields`.
//!
//! Pure. A field manager is a name that the writer gives itself. It names no pod, so a shard is only likely.

use ctrlmesh_manager::status::cluster_writer::FIELD_MANAGER;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use serde::Serialize;

/// Most writes that are shown.
const SHOWN: usize = 5;

/// The last write of one field manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LastWrite {
    pub(super) manager: String,
    /// `Update` or `Apply`.
    pub(super) operation: String,
    /// Absent: the object itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) subresource: Option<String>,
    /// Absent: the API server did not note it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) time: Option<Timestamp>,
    pub(super) writer: Writer,
}

/// Who that was, as far as it can be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub(super) enum Writer {
    /// It uses the name of the manager of ctrlmesh.
    #[serde(rename = "Manager")]
    Manager,
    /// A pod of this shard, if it was the fenced workload of this root at all: nobody else of that owned the object.
    #[serde(rename = "LikelyShard")]
    LikelyShard { root: String, shard: String },
    #[serde(rename = "NotKnown")]
    NotKnown,
}

/// A shard that alone of its workload could write the object since a time.
#[derive(Clone, Debug)]
pub(super) struct SoleWriter {
    /// `NAMESPACE/NAME`.
    pub(super) root: String,
    pub(super) shard: String,
    pub(super) since: Timestamp,
}

/// Newest first.
pub(super) fn last_writes(fields: &[ManagedFieldsEntry], sole: &[SoleWriter]) -> Vec<LastWrite> {
    let mut writes: Vec<LastWrite> = fields.iter().map(|entry| LastWrite::of(entry, sole)).collect();
    writes.sort_by(|one, other| other.time.cmp(&one.time).then_with(|| one.manager.cmp(&other.manager)));
    writes.truncate(SHOWN);
    writes
}

impl LastWrite {
    fn of(entry: &ManagedFieldsEntry, sole: &[SoleWriter]) -> Self {
        let manager = entry.manager.clone().unwrap_or_default();
        let time = entry.time.as_ref().map(|time| time.0);
        // managedFields have whole seconds.
        let is_after = |one: &&SoleWriter| time.is_some_and(|time| time.as_second() > one.since.as_second());
        let likely = sole.iter().find(is_after);
        let writer = match likely {
            _ if manager == FIELD_MANAGER => Writer::Manager,
            Some(one) => Writer::LikelyShard { root: one.root.clone(), shard: one.shard.clone() },
            None => Writer::NotKnown,
        };
        let subresource = entry.subresource.clone().filter(|name| !name.is_empty());
        Self { manager, operation: entry.operation.clone().unwrap_or_default(), subresource, time, writer }
    }
}

impl Writer {
    /// For a table.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Manager => "perhaps ctrlmesh itself: it has that name".to_owned(),
            Self::LikelyShard { root, shard } => format!("if a pod of root {root} wrote it: one of {shard}"),
            Self::NotKnown => "not known".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(manager: &str, time: &str) -> ManagedFieldsEntry {
        let entry = json!({"manager": manager, "operation": "Update", "time": time, "subresource": ""});
        serde_json::from_value(entry).unwrap()
    }

    #[test]
    fn the_newest_five_are_shown() {
        let fields: Vec<_> =
            (1..8).map(|day| entry(&format!("m{day}"), &format!("2026-01-0{day}T00:00:00Z"))).collect();
        let names: Vec<String> = last_writes(&fields, &[]).into_iter().map(|write| write.manager).collect();
        assert_eq!(names, ["m7", "m6", "m5", "m4", "m3"]);
        assert_eq!(last_writes(&[], &[]), []);
    }

    #[test]
    fn a_shard_is_likely_only_for_what_came_after_it_owned_the_object() {
        let since = "2026-01-02T00:00:00.5Z".parse().unwrap();
        let sole = [SoleWriter { root: "ops/web".to_owned(), shard: "web-1".to_owned(), since }];
        let writer = |manager, time| last_writes(&[entry(manager, time)], &sole).remove(0).writer;
        let likely = Writer::LikelyShard { root: "ops/web".to_owned(), shard: "web-1".to_owned() };
        assert_eq!(writer("op", "2026-01-03T00:00:00Z"), likely);
        assert_eq!(writer("op", "2026-01-01T00:00:00Z"), Writer::NotKnown);
        assert_eq!(writer("op", "2026-01-02T00:00:00Z"), Writer::NotKnown, "within the same second");
        assert_eq!(writer("ctrlmesh-manager", "2026-01-03T00:00:00Z"), Writer::Manager);
    }
}
