//! Labels objects, so that they can be assigned to shards.
//!
//! An object carries its slot, its namespace and a control mark; during a migration it carries two sets of these.
//! Namespaces are labelled, and the objects of the kinds that a root names or the ConfigMap lists.
//!
//! A policy inside the API server labels at admission. The mutating webhook does so where the API server serves no
//! policy or cannot compute the hash. Watches label what both missed. Terminating objects and other kinds are never
//! changed.

use std::collections::BTreeMap;

use ctrlmesh_common::names::resource_list;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use crate::rules::label_scheme::Scheme;

mod kinds;
mod rights;
mod named;
mod selected;
mod rate_limit;
mod retry_queue;
mod namespaces;
mod policy;
mod progress;
mod webhook;
mod admission_labelling;
mod object_counts;
mod labeller;
pub mod migration;

pub use admission_labelling::AdmissionLabelling;
pub use kinds::{Kind, Kinds, KindsError, Served, served};
pub use labeller::{LabelMetrics, Labeller};
pub use named::{NamedResources, UNNAMED, is_named, named_resources};
pub use object_counts::{AlikeObjects, Counted, KeptBy, ListedKind, ObjectCounts};
pub use policy::{POLICY, binding, policy};
pub use progress::{CurrentProgress, Progress};
pub use rate_limit::RateLimit;
pub use webhook::webhook;

/// The list of kinds in its ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KindList {
    /// By `GROUP/VERSION` (`v1` for the core group), kinds; `*` is every kind.
    #[serde(default)]
    pub group_version_kinds: BTreeMap<String, Vec<String>>,
}

/// Namespaces are always labelled.
const NAMESPACE: &str = "Namespace";

pub const NAMESPACES: &str = "namespaces";

/// Stands for every kind.
const ALL: &str = "*";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The slot is that of the namespace.
    Namespaced,
    /// The slot is that of the object's own name.
    Cluster,
    /// The slot is that of the namespace's own name; its objects inherit it.
    Namespace,
}

/// The object of events about labels; `namespace` is the manager's.
pub fn list_of_kinds(namespace: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("ConfigMap".to_owned()),
        name: Some(resource_list::NAME.to_owned()),
        namespace: Some(namespace.to_owned()),
        ..ObjectReference::default()
    }
}

impl KindList {
    /// An empty text is an empty list.
    ///
    /// # Errors
    /// Where the text is not a list of kinds.
    pub fn read(text: &str) -> Result<Self, Box<serde_saphyr::Error>> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(text).map_err(Box::new)
    }

    /// Whether objects of this kind are labelled, in any version.
    pub fn has(&self, group: &str, kind: &str) -> bool {
        let is_it = |name: &str| name.rsplit_once('/').map_or("", |(group, _)| group) == group;
        let mut of_group = self.group_version_kinds.iter().filter(|(name, _)| is_it(name));
        (group.is_empty() && kind == NAMESPACE)
            || of_group.any(|(_, kinds)| kinds.iter().any(|one| one == ALL || one == kind))
    }
}

/// By key: the new value of a label, or none where it is removed.
pub type Change = BTreeMap<String, Option<String>>;

/// The labels to add, change or remove; none where nothing is to be done.
pub fn change(meta: &ObjectMeta, scope: Scope, scheme: &Scheme) -> Option<Change> {
    if meta.deletion_timestamp.is_some() { None } else { needed(meta, scope, scheme) }
}

/// Whether a migration must wait for the end of this object. It is terminating, so its labels stay. With the new labels
/// in force, its shard would lose it without a DELETE event.
fn is_waited_for(meta: &ObjectMeta, scope: Scope, scheme: &Scheme) -> bool {
    let is_leaving = scheme.next.is_some() && meta.deletion_timestamp.is_some();
    is_leaving && needed(meta, scope, scheme).is_some()
}

/// The change, even for a terminating object.
fn needed(meta: &ObjectMeta, scope: Scope, scheme: &Scheme) -> Option<Change> {
    let name = meta.name.as_deref().filter(|name| !name.is_empty());
    let there = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key));
    let mut change = Change::new();
    for labelling in scheme.carried() {
        let wanted = match scope {
            Scope::Namespaced => labelling.of_namespace(meta.namespace.as_deref()?),
            Scope::Cluster => labelling.of_cluster_object(name?),
            Scope::Namespace => labelling.of_namespace(name?),
        };
        let control = (labelling.control_key.as_str(), "true".to_owned());
        let missing = wanted.into_iter().chain([control]);
        let missing = missing.filter(|(key, value)| there(key) != Some(value));
        change.extend(missing.map(|(key, value)| (key.to_owned(), Some(value))));
    }
    let removed = scheme.removed().filter(|key| there(key).is_some());
    change.extend(removed.map(|key| (key.to_owned(), None)));
    (!change.is_empty()).then_some(change)
}

/// Whether a label is missing or wrong that shards select by.
fn is_unowned(change: &Change, scheme: &Scheme) -> bool {
    scheme.in_force.keys().iter().any(|key| change.contains_key(*key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::shard::Labelling;

    fn meta(namespace: Option<&str>, name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ObjectMeta {
            namespace: namespace.map(str::to_owned),
            name: Some(name.to_owned()),
            labels: Some(labels.collect()),
            ..ObjectMeta::default()
        }
    }

    fn labels(pairs: &[(&str, &str)]) -> Change {
        let key = |key: &str| format!("ctrlmesh.kusionstack.io/{key}");
        pairs.iter().map(|(name, value)| (key(name), Some((*value).to_owned()))).collect()
    }

    /// The object after the change.
    fn with(mut object: ObjectMeta, change: Change) -> ObjectMeta {
        let labels = object.labels.get_or_insert_default();
        for (key, value) in change {
            match value {
                Some(value) => labels.insert(key, value),
                None => labels.remove(&key),
            };
        }
        object
    }

    #[test]
    fn the_slot_follows_the_namespace_or_the_own_name() {
        let scheme = Scheme::default();
        let slot = scheme.in_force.hash.slot("shop").to_string();
        let control = ("control", "true");
        let of = |meta: &ObjectMeta, scope| change(meta, scope, &scheme).unwrap();
        let in_shop = labels(&[("sharding-hash", &slot), ("namespace", "shop"), control]);
        assert_eq!(of(&meta(Some("shop"), "a", &[]), Scope::Namespaced), in_shop);
        assert_eq!(of(&meta(None, "shop", &[]), Scope::Namespace), in_shop);
        let cluster = format!("cluster.{slot}");
        let of_cluster = labels(&[("sharding-hash", &slot), ("namespace", &cluster), control]);
        assert_eq!(of(&meta(None, "shop", &[]), Scope::Cluster), of_cluster);
    }

    #[test]
    fn only_missing_or_wrong_labels_are_changed() {
        let scheme = Scheme::default();
        let slot = scheme.in_force.hash.slot("shop").to_string();
        let object = meta(Some("shop"), "a", &[("team", "a")]);
        let all = change(&object, Scope::Namespaced, &scheme).unwrap();
        let mut object = with(object, all);
        assert_eq!(change(&object, Scope::Namespaced, &scheme), None);
        let key = scheme.in_force.hash_key.clone();
        object.labels.as_mut().unwrap().insert(key.clone(), "77".to_owned());
        let wrong = change(&object, Scope::Namespaced, &scheme).unwrap();
        assert!(is_unowned(&wrong, &scheme));
        assert_eq!(wrong, [(key, Some(slot))].into());
    }

    #[test]
    fn terminating_objects_are_not_changed() {
        let mut object = meta(Some("shop"), "a", &[]);
        object.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        let settled = Scheme::default();
        assert_eq!(change(&object, Scope::Namespaced, &settled), None);
        assert!(!is_waited_for(&object, Scope::Namespaced, &settled));
        // A migration waits for its end: otherwise its shard would not see it go.
        let other = Labelling { hash_key: "x.io/hash".to_owned(), ..Labelling::default() };
        let next = Scheme { next: Some(other), ..Scheme::default() };
        assert_eq!(change(&object, Scope::Namespaced, &next), None);
        assert!(is_waited_for(&object, Scope::Namespaced, &next));
        object.deletion_timestamp = None;
        let object = with(object.clone(), change(&object, Scope::Namespaced, &next).unwrap());
        let leaving =
            ObjectMeta { deletion_timestamp: serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap(), ..object };
        assert!(!is_waited_for(&leaving, Scope::Namespaced, &next), "it has them");
    }

    #[test]
    fn new_labels_are_added_before_old_ones_are_removed() {
        let old = Scheme::default();
        let next = Labelling { hash_key: "ctrlmesh.kusionstack.io/shard-hash".to_owned(), ..Labelling::default() };
        let object = meta(Some("ns-a"), "a", &[]);
        let object = with(object.clone(), change(&object, Scope::Namespaced, &old).unwrap());
        let slot = old.in_force.hash.slot("ns-a").to_string();
        let begun = Scheme { next: Some(next.clone()), ..old.clone() };
        let beside = change(&object, Scope::Namespaced, &begun).unwrap();
        assert!(!is_unowned(&beside, &begun), "shards go by what it has");
        assert_eq!(beside, labels(&[("shard-hash", &slot)]));
        let object = with(object, beside);
        let switched = Scheme { former: Some(old.in_force.clone()), ..Scheme::settled(next.clone()) };
        for scheme in [&begun, &switched] {
            assert_eq!(change(&object, Scope::Namespaced, scheme), None);
        }
        let left = [old.in_force.hash_key.clone()];
        let left = Scheme { leftover: left.into(), ..Scheme::settled(next.clone()) };
        let gone = change(&object, Scope::Namespaced, &left).unwrap();
        assert_eq!(gone, [(old.in_force.hash_key.clone(), None)].into());
        let waits = Scheme { former: Some(old.in_force), ..left.clone() };
        assert_eq!(change(&object, Scope::Namespaced, &waits), None, "not yet");
        assert_eq!(change(&with(object, gone), Scope::Namespaced, &left), None);
    }
}
