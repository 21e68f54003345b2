//! Finds out by which labels the predecessor divides objects.
//!
//! Pure.

use ctrlmesh_common::names::{GROUP, KRIDGE_GROUP};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_manager::rules::shard::Labelling;
use kube::ResourceExt as _;
use kube::api::DynamicObject;

use super::flags::{self, Flag};

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
    /// Flags of its manager that name a label, by which no object is divided.
    pub(super) unheeded: Vec<Flag>,
}

impl Labels {
    /// By what most namespaces carry; where none carries anything, as the predecessor's program does. Keys that flags
    /// of its manager name count, too. Only a value of its hash counts: ctrlmesh may have labelled by another one.
    pub(super) fn of(namespaces: &[DynamicObject], manager: Option<&DynamicObject>) -> Self {
        let hash = NamespaceHash::Kusionstack;
        let flags: Vec<Flag> = manager.map(flags::of).unwrap_or_default();
        let flags: Vec<Flag> = flags.into_iter().filter(|flag| is_qualified(&flag.value)).collect();
        let named = || flags.iter().map(|flag| flag.value.clone());
        let slot = |name: &str| hash.slot(name).to_string();
        let groups = [GROUP, KRIDGE_GROUP];
        let keys = groups.into_iter().flat_map(|group| HASH_KEYS.map(|key| format!("{group}/{key}")));
        let hash_key = most(namespaces, keys.chain(named()), |name, value| value == slot(name));
        let group = groups.into_iter().find(|group| hash_key.starts_with(&format!("{group}/"))).unwrap_or(GROUP);
        let of_group = |key: &str| std::iter::once(format!("{group}/{key}")).chain(named());
        let namespace_key = most(namespaces, of_group("namespace"), |name, value| value == name);
        let control_key = most(namespaces, of_group("control"), |_, value| value == "true");
        let values = || namespaces.iter().filter_map(|one| Some((one.name_any(), one.labels().get(&hash_key)?)));
        let different = values().filter(|(name, value)| **value != slot(name)).map(|(name, _)| name).collect();
        let labelled = values().count();
        let labelling = Labelling { hash_key, namespace_key, control_key, hash };
        let is_heeded = |key: &String| {
            let Labelling { hash_key, namespace_key, control_key, .. } = &labelling;
            [hash_key, namespace_key, control_key].contains(&key)
        };
        let unheeded =
            flags.into_iter().filter(|flag| flag.name.contains("label") && !is_heeded(&flag.value)).collect();
        Self { labelling, labelled, different, unheeded }
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

/// The key that is right on most namespaces, the first one of several.
fn most(
    namespaces: &[DynamicObject],
    keys: impl Iterator<Item = String>,
    is_right: impl Fn(&str, &str) -> bool,
) -> String {
    let right = |key: &str| {
        let is = |one: &&DynamicObject| one.labels().get(key).is_some_and(|value| is_right(&one.name_any(), value));
        namespaces.iter().filter(is).count()
    };
    let counted = keys.map(|key| (right(&key), key));
    counted.reduce(|best, one| if one.0 > best.0 { one } else { best }).map(|(_, key)| key).unwrap_or_default()
}

/// Whether it is a label's key with a prefix, such as `example.org/shard`.
fn is_qualified(text: &str) -> bool {
    let is_part = |part: &str, more: &[char]| {
        let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || more.contains(&letter);
        !part.is_empty() && part.chars().all(is_allowed)
    };
    text.split_once('/').is_some_and(|(prefix, name)| is_part(prefix, &['-', '.']) && is_part(name, &['-', '.', '_']))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn namespace(name: &str, key: &str, slot: &str) -> DynamicObject {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {key: slot}}})).unwrap()
    }

    fn manager(flags: &[&str]) -> DynamicObject {
        let spec = json!({"template": {"spec": {"containers": [{"args": flags}]}}});
        serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap()
    }

    #[test]
    fn the_key_that_most_namespaces_carry_is_taken() {
        let [program, documents] = HASH_KEYS.map(|key| format!("{GROUP}/{key}"));
        let namespaces = [
            namespace("ns-a", &program, "15"),
            namespace("ns-b", &program, "16"),
            namespace("ns-c", &documents, "17"),
            namespace("x", &program, "1"),
        ];
        let labels = Labels::of(&namespaces, None);
        assert_eq!((labels.labelled, labels.different), (3, vec!["x".to_owned()]));
        assert_eq!(labels.labelling.hash_key, program);
    }

    #[test]
    fn values_of_another_hash_do_not_count() {
        let [program, documents] = HASH_KEYS.map(|key| format!("{GROUP}/{key}"));
        let ours = |name: &str| namespace(name, &documents, &NamespaceHash::Fnv1a.slot(name).to_string());
        let labels = Labels::of(&[namespace("ns-a", &program, "15"), ours("x"), ours("y")], None);
        assert_eq!((labels.labelling.hash_key.as_str(), labels.labelled), (program.as_str(), 1));
        let taken = labels.flags();
        assert_eq!(taken, ["--sharding-hash=kusionstack", &format!("--label-sharding-hash={program}")]);
    }

    #[test]
    fn keys_that_flags_name_are_heeded() {
        let labels = json!({"example.org/slot": "15", "example.org/ns": "ns-a", "example.org/on": "true"});
        let namespace = serde_json::from_value(json!({"metadata": {"name": "ns-a", "labels": labels}})).unwrap();
        let flags =
            ["--hash-label=example.org/slot", "--ns-label", "example.org/ns", "--mark=example.org/on", "--dir=/a/b"];
        let labels = Labels::of(&[namespace], Some(&manager(&flags)));
        let Labelling { hash_key, namespace_key, control_key, .. } = &labels.labelling;
        assert_eq!([hash_key, namespace_key, control_key], ["example.org/slot", "example.org/ns", "example.org/on"]);
        assert_eq!((labels.unheeded, labels.labelled), (Vec::new(), 1));
    }

    #[test]
    fn a_key_that_no_namespace_carries_is_named() {
        let key = format!("{GROUP}/shard-hash");
        let flags = ["--watch-label=example.org/team", "--image=example.org/proxy"];
        let labels = Labels::of(&[namespace("ns-a", &key, "15")], Some(&manager(&flags)));
        assert_eq!(labels.labelling.hash_key, key);
        let named: Vec<&str> = labels.unheeded.iter().map(|flag| flag.value.as_str()).collect();
        assert_eq!(named, ["example.org/team"]);
    }

    #[test]
    fn kridges_labels_are_taken_over_with_their_group() {
        let key = format!("{KRIDGE_GROUP}/shard-hash");
        let labels = Labels::of(&[namespace("ns-a", &key, "15"), namespace("ns-b", &key, "1")], None);
        assert_eq!(labels.labelling.control_key, "kridge.kusionstack.io/control");
        assert_eq!(labels.different, ["ns-b"], "the hash says 16");
        assert_eq!(labels.flags().len(), 4);
    }

    #[test]
    fn without_labels_the_programs_key_counts() {
        let labels = Labels::of(&[], None);
        assert_eq!((labels.labelling.hash_key.as_str(), labels.labelled), ("ctrlmesh.kusionstack.io/shard-hash", 0));
    }
}
