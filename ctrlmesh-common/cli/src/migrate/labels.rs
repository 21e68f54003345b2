//! Finds out by which labels the predecessor divides objects.
//!
//! Pure.

use ctrlmesh_common::names::{GROUP, KRIDGE_GROUP};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_manager::rules::shard::Labelling;
use kube::ResourceExt;
use kube::api::DynamicObject;

/// The slot, as the predecessor's program writes it, and as its documents do.
const HASH_KEYS: [&str; 2] = ["shard-hash", "sharding-hash"];

/// The labels of the predecessor, and whether all of them say what its hash makes of the namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Labels {
    pub(super) labelling: Labelling,
    /// Namespaces that carry the label.
    pub(super) labelled: usize,
    /// Those of them whose value is not that of the predecessor's hash.
    pub(super) different: Vec<String>,
}

impl Labels {
    /// By what most namespaces carry; where none carries anything, as the predecessor's program does.
    pub(super) fn of(namespaces: &[DynamicObject]) -> Self {
        let keys =
            [GROUP, KRIDGE_GROUP].into_iter().flat_map(|group| HASH_KEYS.map(|key| (group, format!("{group}/{key}"))));
        let count = |key: &str| namespaces.iter().filter(|one| one.labels().contains_key(key)).count();
        // The first of several that are as frequent.
        let mut best = (GROUP, format!("{GROUP}/{}", HASH_KEYS[0]), 0);
        for (group, key) in keys {
            let labelled = count(&key);
            if labelled > best.2 {
                best = (group, key, labelled);
            }
        }
        let (group, hash_key, labelled) = best;
        let hash = NamespaceHash::Kusionstack;
        let differs = |one: &&DynamicObject| {
            one.labels().get(&hash_key).is_some_and(|value| *value != hash.slot(&one.name_any()).to_string())
        };
        let different = namespaces.iter().filter(differs).map(ResourceExt::name_any).collect();
        let [namespace_key, control_key] = ["namespace", "control"].map(|key| format!("{group}/{key}"));
        Self { labelling: Labelling { hash_key, namespace_key, control_key, hash }, labelled, different }
    }

    /// Flags by which our managers keep to these labels.
    pub(super) fn flags(&self) -> Vec<String> {
        let Labelling { hash_key, namespace_key, control_key, hash } = &self.labelling;
        let ours = Labelling::default();
        let keys = [
            ("--label-sharding-hash", hash_key, &ours.hash_key),
            ("--label-namespace", namespace_key, &ours.namespace_key),
            ("--label-control", control_key, &ours.control_key),
        ];
        let others = keys.into_iter().filter(|(_, key, default)| key != default);
        let keys = others.map(|(flag, key, _)| format!("{flag}={key}"));
        [format!("--sharding-hash={hash}")].into_iter().chain(keys).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn namespace(name: &str, key: &str, slot: &str) -> DynamicObject {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {key: slot}}})).unwrap()
    }

    #[test]
    fn the_key_that_most_namespaces_carry_is_taken() {
        let [program, documents] = HASH_KEYS.map(|key| format!("{GROUP}/{key}"));
        let labels = Labels::of(&[
            namespace("ns-a", &program, "15"),
            namespace("ctrlmesh", &program, "2"),
            namespace("x", &documents, "1"),
        ]);
        assert_eq!((labels.labelled, labels.different.len()), (2, 0));
        assert_eq!(labels.labelling.hash_key, program);
        assert_eq!(labels.flags(), ["--sharding-hash=kusionstack", &format!("--label-sharding-hash={program}")]);
    }

    #[test]
    fn kridges_labels_are_taken_over_with_their_group() {
        let key = format!("{KRIDGE_GROUP}/shard-hash");
        let labels = Labels::of(&[namespace("ns-a", &key, "15"), namespace("ns-b", &key, "1")]);
        assert_eq!(labels.labelling.control_key, "kridge.kusionstack.io/control");
        assert_eq!(labels.different, ["ns-b"], "the hash says 16");
        assert_eq!(labels.flags().len(), 4);
    }

    #[test]
    fn without_labels_the_programs_key_counts() {
        let labels = Labels::of(&[]);
        assert_eq!((labels.labelling.hash_key.as_str(), labels.labelled), ("ctrlmesh.kusionstack.io/shard-hash", 0));
    }
}
