//! The ownership table of one operator: which shard owns which objects.
//!
//! A pinned namespace belongs to its shard. Every other object belongs to the shard of its slot. A missing slot belongs
//! to nobody; a table may say so only while the slot moves from one owner to another. The table maps text to text, so
//! that a CEL rule can look an object up without a loop.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::slots::{COUNT, Slot};

/// The greatest epoch. Up to it whoever reads JSON reads a number exactly; with a change each second it lasts for 285
/// million years.
pub const MAX_EPOCH: u64 = (1 << 53) - 1;

/// The owner that stands for the pods of a workload that are not enrolled. No shard has this name: the name of a shard
/// has a hyphen.
pub const UNSHARDED: &str = "unsharded";

/// The owner that stands for pods that stand by, where the operator does not elect which pod of a shard works. It owns
/// nothing.
pub const STANDBY: &str = "standby";

/// The ownership table of one operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "api", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Ownership {
    /// Grows with every change of the table, and with nothing else. From 1; default 0, a table that was never
    /// written.
    #[serde(default)]
    #[cfg_attr(feature = "api", schemars(with = "i64", range(min = 0, max = MAX_EPOCH)))]
    pub epoch: u64,
    /// The shard of each slot, "0" to "31". A slot that is missing belongs to nobody; absent or empty: all
    /// do.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "known_slots")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::slots"))]
    pub slots: BTreeMap<Slot, String>,
    /// The shard of each namespace that is pinned; here the slot of its name does not count. Absent or empty:
    /// none is.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::names"))]
    pub namespaces: BTreeMap<String, String>,
    /// The shard of each of the operator's pods. Absent or empty: it has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::names"))]
    pub pods: BTreeMap<String, String>,
    /// The owner for which each pod may write, by the pod's UID: a shard, `unsharded`, or `standby`, which owns
    /// nothing. A pod that is missing may write for none. Absent or empty: the operator is not fenced, or has no pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::names"))]
    pub pod_uids: BTreeMap<String, String>,
    /// What is taken away and not granted yet. Absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Revoked>,
}

/// What an operator's table has taken away from its owners, until it is proved that they cannot write any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "api", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Revoked {
    /// The epoch of the table that took the last of it away. A proof counts from this epoch on.
    #[cfg_attr(feature = "api", schemars(with = "i64", range(min = 0, max = MAX_EPOCH)))]
    pub epoch: u64,
    /// The former owner of each slot, "0" to "31". Absent or empty: no slot moves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "known_slots")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::slots"))]
    pub slots: BTreeMap<Slot, String>,
    /// The former owner of each namespace that is or was pinned. Absent or empty: none moves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::names"))]
    pub namespaces: BTreeMap<String, String>,
    /// The former owner of each pod that changes its owner, by the pod's UID. Absent or empty: none does.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "api", schemars(schema_with = "schema::names"))]
    pub pod_uids: BTreeMap<String, String>,
}

/// A table in which somebody wrote what is no slot is read without that: one object that cannot be read would hold up
/// all that are read with it.
pub(crate) fn known_slots<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<Slot, String>, D::Error> {
    let all = BTreeMap::<String, String>::deserialize(deserializer)?;
    Ok(all.into_iter().filter_map(|(slot, shard)| Some((slot.parse().ok()?, shard))).collect())
}

impl Ownership {
    /// The owner of the objects of `slot` in `namespace`; objects of cluster scope are in none. A namespace that is
    /// revoked belongs to nobody, whatever its slot.
    pub fn owner(&self, slot: Slot, namespace: Option<&str>) -> Option<&str> {
        let is_revoked = |name| self.revoked.as_ref().is_some_and(|revoked| revoked.namespaces.contains_key(name));
        if namespace.is_some_and(is_revoked) {
            return None;
        }
        namespace
            .and_then(|namespace| self.namespaces.get(namespace))
            .or_else(|| self.slots.get(&slot))
            .map(String::as_str)
    }

    /// The slots of an owner.
    pub fn slots_of(&self, owner: &str) -> impl Iterator<Item = Slot> {
        self.slots.iter().filter(move |(_, one)| *one == owner).map(|(slot, _)| *slot)
    }

    /// The shard of the pod called `pod`.
    pub fn shard_of(&self, pod: &str) -> Option<&str> {
        self.pods.get(pod).map(String::as_str)
    }

    /// Whether every object has an owner.
    pub fn is_total(&self) -> bool {
        self.slots.len() == usize::from(COUNT)
    }

    /// The same table as the successor of `before`: one epoch later where it says something else, and in the same
    /// epoch where it does not.
    #[must_use]
    pub fn after(self, before: &Self) -> Self {
        let same = Self { epoch: before.epoch, ..self };
        if same == *before { same } else { Self { epoch: before.epoch.saturating_add(1), ..same } }
    }
}

#[cfg(feature = "api")]
pub(crate) mod schema {
    use schemars::{Schema, SchemaGenerator, json_schema};

    use crate::slots::COUNT;

    /// By slot, the name of a shard.
    pub(crate) fn slots(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "maxProperties": COUNT,
            "additionalProperties": { "type": "string", "maxLength": 253 },
            "x-kubernetes-validations": [{
                "rule": "self.all(slot, slot.matches('^([0-9]|[12][0-9]|3[01])$'))",
                "message": "every key must be a slot, \"0\" to \"31\"",
            }],
        })
    }

    /// By name, the name of a shard.
    pub(super) fn names(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "maxProperties": 10000,
            "additionalProperties": { "type": "string", "maxLength": 253 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: i64) -> Slot {
        Slot::try_from(number).unwrap()
    }

    fn table() -> Ownership {
        Ownership {
            epoch: 4,
            slots: [(slot(7), "a".to_owned()), (slot(8), "b".to_owned())].into(),
            namespaces: [("shop".to_owned(), "c".to_owned())].into(),
            pods: [("op-0".to_owned(), "a".to_owned())].into(),
            ..Ownership::default()
        }
    }

    #[test]
    fn a_pinned_namespace_counts_before_its_slot() {
        let table = table();
        assert_eq!(table.owner(slot(7), Some("pay")), Some("a"));
        assert_eq!(table.owner(slot(7), Some("shop")), Some("c"));
        assert_eq!(table.owner(slot(8), None), Some("b"));
        assert_eq!(table.owner(slot(9), Some("pay")), None);
        assert_eq!(table.shard_of("op-0"), Some("a"));
        assert_eq!(table.shard_of("op-1"), None);
        assert!(!table.is_total());
    }

    #[test]
    fn a_revoked_namespace_belongs_to_nobody() {
        let revoked =
            Revoked { epoch: 4, namespaces: [("pay".to_owned(), "a".to_owned())].into(), ..Revoked::default() };
        let table = Ownership { revoked: Some(revoked), ..table() };
        assert_eq!(table.owner(slot(7), Some("pay")), None);
        assert_eq!(table.owner(slot(7), Some("play")), Some("a"));
    }

    #[cfg(feature = "api")]
    #[test]
    fn a_table_with_what_is_no_slot_is_read_without_that() {
        let text = r#"{"epoch": 1, "slots": {"7": "a", "07": "b", "32": "c", "x": "d"}}"#;
        let read: Ownership = serde_json::from_str(text).unwrap();
        assert_eq!(read.slots, [(slot(7), "a".to_owned())].into());
    }

    #[test]
    fn the_epoch_grows_only_with_what_the_table_says() {
        let same = Ownership { epoch: 0, ..table() };
        assert_eq!(same.after(&table()), table());
        let mut other = table();
        other.pods.clear();
        assert_eq!(other.after(&table()).epoch, 5);
        assert_eq!(table().after(&Ownership::default()).epoch, 1);
    }
}
