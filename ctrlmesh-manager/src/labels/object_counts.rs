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
    /// How many counters there were.
    counters: u64,
}

#[derive(Debug, Default)]
struct KindObjects {
    /// Number of the counter. A kind that changes has a new one before the old one is gone.
    counter: u64,
    group: String,
    plural: String,
    /// Whether the kind cannot be listed any more.
    is_stale: bool,
    /// None before the first list is complete.
    listed: Option<Objects>,
    /// While a list is under way.
    listing: Option<Objects>,
}

/// Hashes of names: two of one namespace that are equal would count once, which is one chance in 10^13 with a thousand
/// objects.
#[derive(Debug, Default)]
struct Objects {
    by_namespace: HashMap<String, Names>,
    of_cluster: BTreeMap<Slot, HashSet<u64>>,
}

/// The objects of a namespace.
#[derive(Debug)]
struct Names {
    slot: Slot,
    hashes: HashSet<u64>,
}

/// How many objects of a kind there are somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Objects(u64),
    /// They are listed for the first time.
    InProgress,
    /// The kind cannot be listed any more.
    Stale,
    /// The kind is not labelled.
    Unlabelled,
}

/// Counts the objects of one kind until it is dropped.
#[derive(Debug)]
pub(super) struct KindCounter {
    counts: ObjectCounts,
    kind: String,
    number: u64,
    hash: NamespaceHash,
}

impl ObjectCounts {
    /// How many objects of the kind are where `is_there` says, which is asked with each slot and namespace.
    pub fn count(&self, group: &str, plural: &str, is_there: impl Fn(Slot, Option<&str>) -> bool) -> Counted {
        let state = lock(&self.0);
        let mut counted = Counted::Unlabelled;
        // A kind may be listed in two versions.
        for kind in state.kinds.values().filter(|kind| kind.group == group && kind.plural == plural) {
            counted = match &kind.listed {
                _ if kind.is_stale => Counted::Stale,
                Some(objects) => Counted::Objects(objects.count(&is_there)),
                None => Counted::InProgress,
            };
            if matches!(counted, Counted::Objects(_)) {
                break;
            }
        }
        drop(state);
        counted
    }

    /// Calls `visit` with slot, namespace and number of objects, of each kind that `covers` names by group and plural.
    /// Returns whether all of these kinds are listed; those that are not are left out.
    pub fn for_each(
        &self,
        covers: impl Fn(&str, &str) -> bool,
        mut visit: impl FnMut(Slot, Option<&str>, u64),
    ) -> bool {
        let state = lock(&self.0);
        let (mut seen, mut is_complete) = (HashSet::new(), true);
        for kind in state.kinds.values().filter(|kind| covers(&kind.group, &kind.plural)) {
            let Some(objects) = &kind.listed else {
                is_complete = false;
                continue;
            };
            // A kind may be listed in two versions.
            if !seen.insert((&kind.group, &kind.plural)) {
                continue;
            }
            for (namespace, names) in &objects.by_namespace {
                visit(names.slot, Some(namespace), names.hashes.len() as u64);
            }
            for (slot, hashes) in &objects.of_cluster {
                visit(*slot, None, hashes.len() as u64);
            }
        }
        let is_complete = is_complete && !seen.is_empty();
        drop(state);
        is_complete
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
            listed.insert(&object, NamespaceHash::default());
        }
        let (group, plural) = (group.to_owned(), plural.to_owned());
        let kind = KindObjects { group, plural, listed: Some(listed), ..KindObjects::default() };
        let kinds = [(String::new(), kind)].into();
        Self(Arc::new(Mutex::new(State { kinds, ..State::default() })))
    }

    /// Begins to count a kind, which is complete after its first list.
    pub(super) fn counter(&self, name: &str, kind: &Kind, hash: NamespaceHash) -> KindCounter {
        let (group, plural) = (kind.resource.group.clone(), kind.resource.plural.clone());
        let mut state = lock(&self.0);
        state.counters += 1;
        let number = state.counters;
        let objects = KindObjects { counter: number, group, plural, ..KindObjects::default() };
        state.kinds.insert(name.to_owned(), objects);
        drop(state);
        KindCounter { counts: self.clone(), kind: name.to_owned(), number, hash }
    }
}

impl KindCounter {
    /// A list begins. What is known counts until it is complete.
    pub(super) fn list_begins(&self) {
        self.change(|kind| {
            kind.listing = Some(Objects::default());
            false
        });
    }

    pub(super) fn list_ends(&self) {
        self.change(|kind| {
            kind.listed = kind.listing.take().or_else(|| kind.listed.take());
            kind.is_stale = false;
            true
        });
    }

    /// The kind cannot be listed any more. What is known may be old.
    pub(super) fn cannot_list(&self) {
        self.change(|kind| !std::mem::replace(&mut kind.is_stale, true));
    }

    pub(super) fn there_is(&self, object: &ObjectMeta) {
        let hash = self.hash;
        self.change(|kind| kind.current().insert(object, hash));
    }

    pub(super) fn there_is_no(&self, object: &ObjectMeta) {
        let hash = self.hash;
        self.change(|kind| kind.current().remove(object, hash));
    }

    /// `change` says whether a count is another one.
    fn change(&self, change: impl FnOnce(&mut KindObjects) -> bool) {
        let mut state = lock(&self.counts.0);
        let own = state.kinds.get_mut(&self.kind).filter(|kind| kind.counter == self.number);
        let changed = own.is_some_and(change);
        state.version += u64::from(changed);
    }
}

impl Drop for KindCounter {
    fn drop(&mut self) {
        let mut state = lock(&self.counts.0);
        if state.kinds.get(&self.kind).is_some_and(|kind| kind.counter == self.number) {
            state.version += 1;
            state.kinds.remove(&self.kind);
        }
    }
}

impl KindObjects {
    fn current(&mut self) -> &mut Objects {
        self.listing.as_mut().unwrap_or_else(|| self.listed.get_or_insert_default())
    }
}

impl Objects {
    /// Whether the object is new here.
    fn insert(&mut self, object: &ObjectMeta, hash: NamespaceHash) -> bool {
        let hashes = match &object.namespace {
            Some(namespace) => {
                let empty = || Names { slot: hash.slot(namespace), hashes: HashSet::new() };
                &mut self.by_namespace.entry(namespace.clone()).or_insert_with(empty).hashes
            }
            None => self.of_cluster.entry(own_slot(object, hash)).or_default(),
        };
        hashes.insert(name_hash(object))
    }

    /// Whether the object was here.
    fn remove(&mut self, object: &ObjectMeta, hash: NamespaceHash) -> bool {
        let Some(namespace) = &object.namespace else {
            let hashes = self.of_cluster.get_mut(&own_slot(object, hash));
            return hashes.is_some_and(|hashes| hashes.remove(&name_hash(object)));
        };
        let Some(names) = self.by_namespace.get_mut(namespace) else { return false };
        let was_here = names.hashes.remove(&name_hash(object));
        if names.hashes.is_empty() {
            self.by_namespace.remove(namespace);
        }
        was_here
    }

    fn count(&self, is_there: impl Fn(Slot, Option<&str>) -> bool) -> u64 {
        let namespaced = self.by_namespace.iter();
        let namespaced = namespaced.filter(|(namespace, names)| is_there(names.slot, Some(namespace.as_str())));
        let of_cluster = self.of_cluster.iter().filter(|(slot, _)| is_there(**slot, None)).map(|(_, hashes)| hashes);
        namespaced.map(|(_, names)| &names.hashes).chain(of_cluster).map(|hashes| hashes.len() as u64).sum()
    }
}

/// The slot of an object of cluster scope.
fn own_slot(object: &ObjectMeta, hash: NamespaceHash) -> Slot {
    hash.slot(object.name.as_deref().unwrap_or_default())
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
        counts.count("web.example.com", "websites", |_, _| true)
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
            counts.count("web.example.com", "websites", is_there)
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
    fn only_what_changes_a_count_is_a_change() {
        let counts = ObjectCounts::default();
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), NamespaceHash::default());
        counter.list_begins();
        counter.there_is(&object(Some("a"), "one"));
        counter.list_ends();
        let before = counts.version();
        counter.there_is(&object(Some("a"), "one"));
        counter.there_is_no(&object(Some("a"), "two"));
        counter.there_is_no(&object(Some("b"), "one"));
        assert_eq!(counts.version(), before);
        counter.there_is_no(&object(Some("a"), "one"));
        assert_ne!(counts.version(), before);
        let is_empty = |kind: &KindObjects| kind.listed.as_ref().unwrap().by_namespace.is_empty();
        assert!(lock(&counts.0).kinds.values().all(is_empty));
    }

    #[test]
    fn a_kind_that_cannot_be_listed_any_more_is_stale_until_it_can() {
        let counts = ObjectCounts::default();
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), NamespaceHash::default());
        counter.list_begins();
        counter.list_ends();
        counter.cannot_list();
        assert_eq!(all(&counts), Counted::Stale);
        counter.list_begins();
        assert_eq!(all(&counts), Counted::Stale);
        counter.list_ends();
        assert_eq!(all(&counts), Counted::Objects(0));
    }

    #[test]
    fn the_counter_of_a_former_kind_changes_nothing() {
        let (counts, hash) = (ObjectCounts::default(), NamespaceHash::default());
        let former = counts.counter("websites.web.example.com/v1", &kind("v1"), hash);
        let present = counts.counter("websites.web.example.com/v1", &kind("v1"), hash);
        present.list_begins();
        present.list_ends();
        former.there_is(&object(Some("a"), "one"));
        drop(former);
        assert_eq!(all(&counts), Counted::Objects(0));
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
        let of_slot = counts.count("web.example.com", "websites", |one, none| one == slot && none.is_none());
        assert_eq!(of_slot, Counted::Objects(1));
        let before = counts.version();
        drop(second);
        assert!(counts.version() > before);
        assert_eq!(all(&counts), Counted::InProgress);
        drop(first);
        assert_eq!(all(&counts), Counted::Unlabelled);
    }
}
