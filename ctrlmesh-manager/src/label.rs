//! Which labels does an object have to carry so that it can be given to a shard?
//!
//! Three: the slot, the namespace, and that it is controlled. Namespaces and the objects of the listed kinds carry them:
//! at once, by a policy inside the API server and, where it serves none or cannot know the hash, by the mutating webhook,
//! and for ever, by watches that put right what those missed. What is terminating, or of a kind that is not listed, is
//! never touched.

use std::collections::BTreeMap;

use ctrlmesh_common::selector::Labels;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use crate::shard::Labelling;

mod kinds;
mod pace;
mod pending;
mod namespaces;
mod policy;
mod progress;
mod webhook;
mod at_once;
mod repair;

pub use at_once::AtOnce;
pub use kinds::{Kind, Kinds, KindsError, Served, served};
pub use pace::Pace;
pub use policy::{POLICY, binding, policy};
pub use progress::Progress;
pub use repair::{LabelMetrics, Labels as Labeller};
pub use webhook::webhook;

/// The list of kinds, as it stands in its ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Listed {
    /// By `GROUP/VERSION` (`v1` for the core group), kinds; `*` is every kind.
    #[serde(default)]
    pub group_version_kinds: BTreeMap<String, Vec<String>>,
}

/// The kind whose objects are always labelled.
const NAMESPACE: &str = "Namespace";

/// What stands for every kind.
const ALL: &str = "*";

/// Whether the objects of a kind are in namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// In namespaces; their slot is that of the namespace.
    Namespaced,
    /// In none; their slot is that of their own name.
    Cluster,
    /// They are namespaces; their slot is that of their own name, and they carry it for what is in them.
    Namespace,
}

// === impl Listed ===

impl Listed {
    /// Reads the list; of an empty text it is empty.
    ///
    /// # Errors
    /// Where the text is not what it should be.
    pub fn read(text: &str) -> Result<Self, Box<serde_saphyr::Error>> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(text).map_err(Box::new)
    }

    /// Whether the objects of a kind are labelled, in any version: those of a kind that is listed, and namespaces.
    pub fn has(&self, group: &str, kind: &str) -> bool {
        let is_it = |name: &str| name.rsplit_once('/').map_or("", |(group, _)| group) == group;
        let mut of_group = self.group_version_kinds.iter().filter(|(name, _)| is_it(name));
        (group.is_empty() && kind == NAMESPACE)
            || of_group.any(|(_, kinds)| kinds.iter().any(|one| one == ALL || one == kind))
    }
}

/// The labels that the object lacks, or has with other values; none where nothing is to be done.
pub fn missing(meta: &ObjectMeta, scope: Scope, labelling: &Labelling) -> Option<Labels> {
    let name = meta.name.as_deref().filter(|name| !name.is_empty());
    let wanted = match scope {
        _ if meta.deletion_timestamp.is_some() => return None,
        Scope::Namespaced => labelling.of_namespace(meta.namespace.as_deref()?),
        Scope::Cluster => labelling.of_cluster_object(name?),
        Scope::Namespace => labelling.of_namespace(name?),
    };
    let control = (labelling.control_key.as_str(), "true".to_owned());
    let there = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key));
    let missing: Labels = wanted
        .into_iter()
        .chain([control])
        .filter(|(key, value)| there(key) != Some(value))
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
    (!missing.is_empty()).then_some(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(namespace: Option<&str>, name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ObjectMeta {
            namespace: namespace.map(str::to_owned),
            name: Some(name.to_owned()),
            labels: Some(labels.collect()),
            ..ObjectMeta::default()
        }
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        let key = |key: &str| format!("ctrlmesh.kusionstack.io/{key}");
        pairs.iter().map(|(name, value)| (key(name), (*value).to_owned())).collect()
    }

    #[test]
    fn an_object_has_the_slot_of_its_namespace_and_one_of_cluster_scope_that_of_its_name() {
        let labelling = Labelling::default();
        let slot = labelling.hash.slot("shop").to_string();
        let control = ("control", "true");
        let of = |meta: &ObjectMeta, scope| missing(meta, scope, &labelling).unwrap();
        let in_shop = labels(&[("sharding-hash", &slot), ("namespace", "shop"), control]);
        assert_eq!(of(&meta(Some("shop"), "a", &[]), Scope::Namespaced), in_shop);
        assert_eq!(of(&meta(None, "shop", &[]), Scope::Namespace), in_shop);
        let cluster = format!("cluster.{slot}");
        let of_cluster = labels(&[("sharding-hash", &slot), ("namespace", &cluster), control]);
        assert_eq!(of(&meta(None, "shop", &[]), Scope::Cluster), of_cluster);
    }

    #[test]
    fn only_what_is_missing_or_wrong_is_to_be_done() {
        let labelling = Labelling::default();
        let slot = labelling.hash.slot("shop").to_string();
        let mut object = meta(Some("shop"), "a", &[("team", "a")]);
        let all = missing(&object, Scope::Namespaced, &labelling).unwrap();
        object.labels.as_mut().unwrap().extend(all);
        assert_eq!(missing(&object, Scope::Namespaced, &labelling), None);
        let key = labelling.hash_key.clone();
        object.labels.as_mut().unwrap().insert(key.clone(), "77".to_owned());
        let wrong = missing(&object, Scope::Namespaced, &labelling).unwrap();
        assert_eq!(wrong, [(key, slot)].into());
    }

    #[test]
    fn what_is_terminating_is_not_touched() {
        let mut object = meta(Some("shop"), "a", &[]);
        object.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        assert_eq!(missing(&object, Scope::Namespaced, &Labelling::default()), None);
    }

    #[test]
    fn another_key_or_another_hash_is_put_beside_or_in_its_place() {
        let labelled =
            missing(&meta(Some("ns-a"), "a", &[]), Scope::Namespaced, &Labelling::default());
        let mut object = meta(Some("ns-a"), "a", &[]);
        object.labels = labelled;
        let labelling = Labelling {
            hash_key: "ctrlmesh.kusionstack.io/shard-hash".to_owned(),
            hash: ctrlmesh_common::slots::NamespaceHash::Kusionstack,
            ..Labelling::default()
        };
        let found = missing(&object, Scope::Namespaced, &labelling).unwrap();
        assert_eq!(found, labels(&[("shard-hash", "15")]));
    }
}
