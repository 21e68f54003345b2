//! Counts the objects of each labelled kind, by namespace and by the labels that somebody selects by.
//!
//! The watches that label objects show all of them anyway. Of an object of cluster scope, its slot is kept.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex};

use ctrlmesh_common::slots::Slot;
use ctrlmesh_runtime::sync::lock;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Kind;

mod objects;

use objects::Objects;
pub use objects::{AlikeObjects, KeptBy};

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

/// The objects of a kind, as far as they are known.
pub enum ListedKind<'a> {
    Objects(Box<dyn Iterator<Item = AlikeObjects<'a>> + 'a>),
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
    by: KeptBy,
}

impl ObjectCounts {
    /// How many objects of the kind are where `is_there` says, which is asked with each slot and namespace.
    pub fn count(&self, group: &str, plural: &str, is_there: impl Fn(Slot, Option<&str>) -> bool) -> Counted {
        self.with_kind(group, plural, |listed| match listed {
            ListedKind::Objects(alike) => {
                let there = alike.filter(|objects| is_there(objects.slot, objects.namespace));
                Counted::Objects(there.map(|objects| objects.count).sum())
            }
            ListedKind::InProgress => Counted::InProgress,
            ListedKind::Stale => Counted::Stale,
            ListedKind::Unlabelled => Counted::Unlabelled,
        })
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
            objects.counts().for_each(|(slot, namespace, count)| visit(slot, namespace, count));
        }
        let is_complete = is_complete && !seen.is_empty();
        drop(state);
        is_complete
    }

    /// Group and plural of all kinds that are labelled.
    pub fn kinds(&self) -> BTreeSet<(String, String)> {
        let state = lock(&self.0);
        state.kinds.values().map(|kind| (kind.group.clone(), kind.plural.clone())).collect()
    }

    /// What `read` makes of the objects of a kind.
    pub fn with_kind<T>(&self, group: &str, plural: &str, read: impl FnOnce(ListedKind<'_>) -> T) -> T {
        let state = lock(&self.0);
        let is_it = |kind: &&KindObjects| kind.group == group && kind.plural == plural;
        let mut listed = ListedKind::Unlabelled;
        // A kind may be listed in two versions.
        for kind in state.kinds.values().filter(is_it) {
            listed = match &kind.listed {
                _ if kind.is_stale => ListedKind::Stale,
                Some(objects) => ListedKind::Objects(Box::new(objects.alike())),
                None => ListedKind::InProgress,
            };
            if matches!(listed, ListedKind::Objects(_)) {
                break;
            }
        }
        let made = read(listed);
        drop(state);
        made
    }

    /// Grows with every change.
    pub fn version(&self) -> u64 {
        lock(&self.0).version
    }

    /// Of one kind, whose list is complete, with these objects by namespace and name.
    #[cfg(test)]
    pub fn of_kind(group: &str, plural: &str, objects: &[(Option<&str>, &str)]) -> Self {
        let object = |(namespace, name): &(Option<&str>, &str)| {
            let (name, namespace) = (Some((*name).to_owned()), namespace.map(str::to_owned));
            ObjectMeta { name, namespace, ..ObjectMeta::default() }
        };
        Self::of_metadata(group, plural, objects.iter().map(object), &KeptBy::default())
    }

    /// The same, of objects with labels.
    #[cfg(test)]
    pub fn of_metadata(group: &str, plural: &str, objects: impl IntoIterator<Item = ObjectMeta>, by: &KeptBy) -> Self {
        let mut listed = Objects::default();
        for object in objects {
            listed.insert(&object, by);
        }
        let (group, plural) = (group.to_owned(), plural.to_owned());
        let kind = KindObjects { group, plural, listed: Some(listed), ..KindObjects::default() };
        let kinds = [(String::new(), kind)].into();
        Self(Arc::new(Mutex::new(State { kinds, ..State::default() })))
    }

    /// Adds a kind that is being listed.
    #[cfg(test)]
    pub fn add_unlisted(&self, group: &str, plural: &str) {
        let (group, name) = (group.to_owned(), plural.to_owned());
        let kind = KindObjects { group, plural: name.clone(), ..KindObjects::default() };
        lock(&self.0).kinds.insert(name, kind);
    }

    /// Begins to count a kind, which is complete after its first list.
    pub(super) fn counter(&self, name: &str, kind: &Kind, by: KeptBy) -> KindCounter {
        let (group, plural) = (kind.resource.group.clone(), kind.resource.plural.clone());
        let mut state = lock(&self.0);
        state.counters += 1;
        let number = state.counters;
        let objects = KindObjects { counter: number, group, plural, ..KindObjects::default() };
        state.kinds.insert(name.to_owned(), objects);
        drop(state);
        KindCounter { counts: self.clone(), kind: name.to_owned(), number, by }
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
        self.change(|kind| kind.current().insert(object, &self.by));
    }

    pub(super) fn there_is_no(&self, object: &ObjectMeta) {
        self.change(|kind| kind.current().remove(object, &self.by));
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
        let (counts, by) = (ObjectCounts::default(), KeptBy::default());
        assert_eq!(all(&counts), Counted::Unlabelled);
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), by.clone());
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
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), KeptBy::default());
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
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), KeptBy::default());
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
        let is_empty = |kind: &KindObjects| kind.listed.as_ref().unwrap().counts().next().is_none();
        assert!(lock(&counts.0).kinds.values().all(is_empty));
    }

    #[test]
    fn a_kind_that_cannot_be_listed_any_more_is_stale_until_it_can() {
        let counts = ObjectCounts::default();
        let counter = counts.counter("websites.web.example.com/v1", &kind("v1"), KeptBy::default());
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
        let (counts, by) = (ObjectCounts::default(), KeptBy::default());
        let former = counts.counter("websites.web.example.com/v1", &kind("v1"), by.clone());
        let present = counts.counter("websites.web.example.com/v1", &kind("v1"), by.clone());
        present.list_begins();
        present.list_ends();
        former.there_is(&object(Some("a"), "one"));
        drop(former);
        assert_eq!(all(&counts), Counted::Objects(0));
    }

    #[test]
    fn a_kind_in_two_versions_counts_once_and_is_gone_with_its_counter() {
        let (counts, by) = (ObjectCounts::default(), KeptBy::default());
        let first = counts.counter("websites.web.example.com/v1", &kind("v1"), by.clone());
        let second = counts.counter("websites.web.example.com/v2", &kind("v2"), by.clone());
        second.list_begins();
        second.there_is(&object(None, "one"));
        second.list_ends();
        assert_eq!(all(&counts), Counted::Objects(1));
        let slot = by.hash.slot("one");
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
