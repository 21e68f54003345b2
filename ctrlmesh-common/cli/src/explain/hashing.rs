//! Says how an object comes to its slot.
//!
//! Pure.

use ctrlmesh_common::slots::{self, NamespaceHash, Slot};
use ctrlmesh_manager::rules::shard::Labelling;
use serde::Serialize;

use crate::owner::object::Object;

/// What is hashed, and what comes out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Hashing {
    pub(super) of: Hashed,
    /// The name that is hashed.
    pub(super) name: String,
    /// The hash function: `fnv1a` or `kusionstack`.
    pub(super) hash: String,
    /// What the function gives, before modulo 32. Absent: `kusionstack` adds up code points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    pub(super) slot: Slot,
    /// The key of the label that has the slot.
    pub(super) label: String,
}

/// Whose name is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Hashed {
    Namespace,
    Object,
}

impl Hashing {
    pub(super) fn of(object: &Object, labelling: &Labelling) -> Self {
        let (of, name) = match object.counted_namespace() {
            Some(namespace) => (Hashed::Namespace, namespace),
            None => (Hashed::Object, object.name.as_str()),
        };
        let is_fnv = labelling.hash == NamespaceHash::Fnv1a;
        Self {
            of,
            name: name.to_owned(),
            hash: labelling.hash.to_string(),
            value: is_fnv.then(|| format!("{:#018x}", slots::fnv1a(name.as_bytes()))),
            slot: labelling.hash.slot(name),
            label: labelling.hash_key.clone(),
        }
    }

    /// In one sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { of, name, hash, value, slot, .. } = self;
        let of = match of {
            Hashed::Namespace => "namespace",
            Hashed::Object => "object, which is in no namespace",
        };
        let value = value.as_ref().map(|value| format!(", {value},")).unwrap_or_default();
        format!("The hash {hash} of the name {name:?} of its {of}{value} modulo {} is slot {slot}.", slots::COUNT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(namespace: Option<&str>, resource: &str) -> Object {
        let (group, name) = (String::new(), "one".to_owned());
        let namespace = namespace.map(str::to_owned);
        Object { group, resource: resource.to_owned(), namespace, name, labels: [].into() }
    }

    #[test]
    fn the_namespace_or_the_object_is_hashed() {
        let labelling = Labelling::default();
        for (object, of, name) in [
            (object(Some("shop"), "pods"), Hashed::Namespace, "shop"),
            (object(None, "nodes"), Hashed::Object, "one"),
            (object(None, "namespaces"), Hashed::Namespace, "one"),
        ] {
            let hashing = Hashing::of(&object, &labelling);
            assert_eq!((hashing.of, hashing.name.as_str()), (of, name));
            let value = u64::from_str_radix(&hashing.value.unwrap()[2..], 16).unwrap();
            assert_eq!(value % u64::from(slots::COUNT), u64::from(hashing.slot.number()), "{name}");
        }
    }

    #[test]
    fn the_predecessors_hash_has_no_value_of_its_own() {
        let labelling = Labelling { hash: NamespaceHash::Kusionstack, ..Labelling::default() };
        let hashing = Hashing::of(&object(Some("shop"), "pods"), &labelling);
        assert_eq!(hashing.value, None);
        let said =
            format!("The hash kusionstack of the name \"shop\" of its namespace modulo 32 is slot {}.", hashing.slot);
        assert_eq!(hashing.sentence(), said);
    }

    #[test]
    fn the_examples_in_the_docs_have_their_slots() {
        let docs = include_str!("../../../../docs/inspect.md");
        let market = Hashing::of(&object(Some("market"), "websites"), &Labelling::default());
        assert!(docs.contains(&market.sentence()), "{}", market.sentence());
        let shop = Hashing::of(&object(Some("shop"), "websites"), &Labelling::default());
        let expected = format!("Object: websites.web.example.com shop/site\nSlot:   {}\n", shop.slot);
        assert!(docs.contains(&expected), "{expected}");
    }
}
