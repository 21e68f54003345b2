//! Counts the objects of each labelled kind, by namespace.
//!
//! The watches that label objects show all of them anyway. Of an object of cluster scope, its slot is kept.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};

use ctrlmesh_common::slots::{NamespaceHash, Slot};
use ctrlmesh_runtime::sync::lock;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Kind;

/// The counts of the kinds that this replica labels. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ObjectCounts(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// By name of the kind.
    kinds: BTreeMap<String, KindObjects>,
    /// Grows with every change.
    version: u64,
}

#[derive(Debug, Default)]
struct KindObjects {
    group: String,
    plural: String,
    /// None before the first list is complete.
    listed: Option<Objects>,
    /// While a list is under way.
    listing: Option<Objects>,
}

/// Hashes of names: two of one namespace that are equal would count once, which is one chance in 10^13 with a thousand
/// objects.
#[derive(Debug, Default)]
struct Objects {
    by_namespace: HashMap<String, HashSet<u64>>,
    of_cluster: BTreeMap<Slot, HashSet<u64>>,
}

/// How many objects of a kind there are somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Objects(u64),
    /// They are listed for the first time.
    InProgress,
    /// The kind is not labelled.
    Unlabelled,
}

/// Counts the objects of one kind until it is dropped.
#[derive(Debug)]
pub(super) struct KindCounter {
    counts: ObjectCounts,
    kind: String,
    hash: NamespaceHash,
}

impl ObjectCounts {
    /// How many objects of the kind are where `is_there` says, which is asked with each slot and namespace.
    pub fn count(
        &self,
        group: &str,
        plural: &str,
        hash: NamespaceHash,
        is_there: impl Fn(Slot, Option<&str>) -> bool,
    ) -> Counted {
        let state = lock(&self.0);
        let mut counted = Counted::Unlabelled;
        // A kind may be listed in two versions.
        for kind in state.kinds.values().filter(|kind| kind.group == group && kind.plural == plural) {
            if let Some(objects) = &kind.listed {
                counted = Counted::Objects(objects.count(hash, &is_there));
                break;
            }
            counted = Counted::InProgress;
        }
        drop(state);
        counted
    }

    /// Grows with every change.
    pub fn version(&self) -> u64 {
        lock(&self.0).version
    }

    /// Of one kind, whose list is complete, with these objects by namespace and name.
    #[cfg(test)]
    pub fn of_kind(group: &str, plural: &str, objects: &[(Option<&str>, &str)]) -> Self {
        let mut listed = Objects::default();
        for (namespace, name) in objects {
            let (name, namespace) = (Some((*name).to_owned()), namespace.map(str::to_owned));
            let object = ObjectMeta { name, namespace, ..ObjectMeta::default() };
            listed.names(&object, NamespaceHash::default()).insert(name_hash(&object));
        }
        let (group, plural) = (group.to_owned(), plural.to_owned());
        let kind = KindObjects { group, plural, listed: Some(listed), listing: None };
        Self(Arc::new(Mutex::new(State { kinds: [(String::new(), kind)].into(), version: 1 })))
    }

    /// Begins to count a kind, which is complete after its first list.
    pub(super) fn counter(&self, name: &str, kind: &Kind, hash: NamespaceHash) -> KindCounter {
        let (group, plural) = (kind.resource.group.clone(), kind.resource.plural.clone());
        let objects = KindObjects { group, plural, listed: None, listing: None };
        lock(&self.0).kinds.insert(name.to_owned(), objects);
        KindCounter { counts: self.clone(), kind: name.to_owned(), hash }
    }
}

impl KindCounter {
    /// A list begins. What is known counts until it is complete.
    pub(super) fn list_begins(&self) {
        self.change(|kind| kind.listing = Some(Objects::default()));
    }

    pub(super) fn list_ends(&self) {
        self.change(|kind| kind.listed = kind.listing.take().or_else(|| kind.listed.take()));
    }

    pub(super) fn there_is(&self, object: &ObjectMeta) {
        let hash = self.hash;
        self.change(|kind| {
            kind.current().names(object, hash).insert(name_hash(object));
        });
    }

    pub(super) fn there_is_no(&self, object: &ObjectMeta) {
        let hash = self.hash;
        self.change(|kind| {
            kind.current().names(object, hash).remove(&name_hash(object));
        });
    }

    fn change(&self, change: impl FnOnce(&mut KindObjects)) {
        let mut state = lock(&self.counts.0);
        state.version += 1;
        if let Some(kind) = state.kinds.get_mut(&self.kind) {
            change(kind);
        }
    }
}

impl Drop for KindCounter {
    fn drop(&mut self) {
        let mut state = lock(&self.counts.0);
        state.version += 1;
        state.kinds.remove(&self.kind);
    }
}

impl KindObjects {
    fn current(&mut self) -> &mut Objects {
        self.listing.as_mut().unwrap_or_else(|| self.listed.get_or_insert_default())
    }
}

impl Objects {
    fn names(&mut self, object: &ObjectMeta, hash: NamespaceHash) -> &mut HashSet<u64> {
        match &object.namespace {
            Some(namespace) => self.by_namespace.entry(namespace.clone()).or_default(),
            None => self.of_cluster.entry(hash.slot(object.name.as_deref().unwrap_or_default())).or_default(),
        }
    }

    fn count(&self, hash: NamespaceHash, is_there: impl Fn(Slot, Option<&str>) -> bool) -> u64 {
        let namespaced = self.by_namespace.iter();
        let namespaced = namespaced.filter(|(namespace, _)| is_there(hash.slot(namespace), Some(namespace.as_str())));
        let of_cluster = self.of_cluster.iter().filter(|(slot, _)| is_there(**slot, None)).map(|(_, names)| names);
        namespaced.map(|(_, names)| names).chain(of_cluster).map(|names| names.len() as u64).sum()
    }
}

fn name_hash(object: &ObjectMeta) -> u64 {
    let mut hasher = DefaultHasher::new();
    object.name.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use kube::core::{ApiResource, GroupVersionKind};

    use super::*;
    use crate::labels::Scope;

    fn kind(version: &str) -> Kind {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("web.example.com", version, "Website"));
        Kind { resource, scope: Scope::Namespaced }
    }

    fn object(namespace: Option<&str>, name: &str) -> ObjectMeta {
        let namespace = namespace.map(str::to_owned);
        ObjectMeta { name: Some(name.to_owned()), namespace, ..ObjectMeta::default() }
    }

    fn all(counts: &ObjectCounts) -> Counted {
        counts.count("web.example.com", "websites", NamespaceHash::default(), |_, _| true)
    }

    #[test]
    fn objects_count_once_the_first_list_is_complete() {
        let (counts, hash) = (ObjectCounts::default(), NamespaceHash::default());
        assert_eq!(all(&counts), Counted::Unlabelled);
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), hash);
        counter.list_begins();
        for (namespace, name) in [("a", "one"), ("a", "two"), ("b", "one")] {
            counter.there_is(&object(Some(namespace), name));
        }
        assert_eq!(all(&counts), Counted::InProgress);
        counter.list_ends();
        assert_eq!(all(&counts), Counted::Objects(3));
        // A change of an object, one that goes, and one that was never there.
        counter.there_is(&object(Some("a"), "one"));
        counter.there_is_no(&object(Some("a"), "two"));
        counter.there_is_no(&object(Some("c"), "two"));
        assert_eq!(all(&counts), Counted::Objects(2));
        let of = |wanted: &str| {
            let is_there = |_, namespace: Option<&str>| namespace == Some(wanted);
            counts.count("web.example.com", "websites", hash, is_there)
        };
        assert_eq!((of("a"), of("b"), of("c")), (Counted::Objects(1), Counted::Objects(1), Counted::Objects(0)));
    }

    #[test]
    fn what_was_known_counts_while_a_list_is_made_anew() {
        let counts = ObjectCounts::default();
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), NamespaceHash::default());
        counter.list_begins();
        counter.there_is(&object(Some("a"), "one"));
        counter.list_ends();
        counter.list_begins();
        counter.there_is(&object(Some("a"), "two"));
        counter.there_is(&object(Some("a"), "three"));
        assert_eq!(all(&counts), Counted::Objects(1));
        counter.list_ends();
        assert_eq!(all(&counts), Counted::Objects(2));
    }

    #[test]
    fn a_kind_in_two_versions_counts_once_and_is_gone_with_its_counter() {
        let (counts, hash) = (ObjectCounts::default(), NamespaceHash::default());
        let first = counts.counter("websites.web.example.com/v1", &kind("v1"), hash);
        let second = counts.counter("websites.web.example.com/v2", &kind("v2"), hash);
        second.list_begins();
        second.there_is(&object(None, "one"));
        second.list_ends();
        assert_eq!(all(&counts), Counted::Objects(1));
        let slot = hash.slot("one");
        let of_slot = counts.count("web.example.com", "websites", hash, |one, none| one == slot && none.is_none());
        assert_eq!(of_slot, Counted::Objects(1));
        let before = counts.version();
        drop(second);
        assert!(counts.version() > before);
        assert_eq!(all(&counts), Counted::InProgress);
        drop(first);
        assert_eq!(all(&counts), Counted::Unlabelled);
    }
}
