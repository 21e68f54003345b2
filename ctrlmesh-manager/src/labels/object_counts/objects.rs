//! The objects of one kind, by namespace, and of cluster scope by slot.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use ctrlmesh_common::selector::Labels;
use ctrlmesh_common::slots::{NamespaceHash, Slot};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// How objects of a kind are kept: by the slots of `hash`, with the labels that somebody selects by.
#[derive(Clone, Debug, Default)]
pub struct KeptBy {
    pub hash: NamespaceHash,
    pub label_keys: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub(super) struct Objects {
    by_namespace: HashMap<String, Names>,
    of_cluster: BTreeMap<Slot, Names>,
    /// Most objects have the same labels, as far as they are kept.
    label_sets: HashSet<Arc<Labels>>,
}

/// The objects of a namespace, or those of cluster scope with one slot.
#[derive(Debug)]
pub(super) struct Names {
    slot: Slot,
    by_name: HashMap<Box<str>, Arc<Labels>>,
    /// How many have the same labels, by the address of these.
    sets: HashMap<usize, (Arc<Labels>, u64)>,
}

/// Objects of one namespace, or of one slot and cluster scope, that have the same labels.
#[derive(Clone, Copy, Debug)]
pub struct AlikeObjects<'a> {
    pub slot: Slot,
    /// `None`: they are of cluster scope.
    pub namespace: Option<&'a str>,
    /// Those that somebody selects by.
    pub labels: &'a Labels,
    pub count: u64,
    names: &'a Names,
}

impl Objects {
    /// Whether the object is new here, or has other labels.
    pub(super) fn insert(&mut self, object: &ObjectMeta, by: &KeptBy) -> bool {
        let labels = self.shared(kept_labels(object, by));
        let names = if let Some(namespace) = &object.namespace {
            let empty = || Names::of(by.hash.slot(namespace));
            self.by_namespace.entry(namespace.clone()).or_insert_with(empty)
        } else {
            let slot = own_slot(object, by.hash);
            self.of_cluster.entry(slot).or_insert_with(|| Names::of(slot))
        };
        let before = names.put(object.name.as_deref().unwrap_or_default(), labels);
        match before {
            Insertion::New => true,
            Insertion::Same => false,
            Insertion::Replaced(before) => {
                self.forget(&before);
                true
            }
        }
    }

    /// Whether the object was here.
    pub(super) fn remove(&mut self, object: &ObjectMeta, by: &KeptBy) -> bool {
        let name = object.name.as_deref().unwrap_or_default();
        let removed = match &object.namespace {
            Some(namespace) => {
                let removed = self.by_namespace.get_mut(namespace).and_then(|names| names.take(name));
                if self.by_namespace.get(namespace).is_some_and(|names| names.by_name.is_empty()) {
                    self.by_namespace.remove(namespace);
                }
                removed
            }
            None => self.of_cluster.get_mut(&own_slot(object, by.hash)).and_then(|names| names.take(name)),
        };
        if let Some(labels) = &removed {
            self.forget(labels);
        }
        removed.is_some()
    }

    /// Slot, namespace and number of objects.
    pub(super) fn counts(&self) -> impl Iterator<Item = (Slot, Option<&str>, u64)> {
        self.all().map(|(namespace, names)| (names.slot, namespace, names.by_name.len() as u64))
    }

    pub(super) fn alike(&self) -> impl Iterator<Item = AlikeObjects<'_>> {
        self.all().flat_map(|(namespace, names)| {
            let slot = names.slot;
            names.sets.values().map(move |(labels, count)| AlikeObjects {
                slot,
                namespace,
                labels,
                count: *count,
                names,
            })
        })
    }

    fn all(&self) -> impl Iterator<Item = (Option<&str>, &Names)> {
        let namespaced = self.by_namespace.iter().map(|(namespace, names)| (Some(namespace.as_str()), names));
        namespaced.chain(self.of_cluster.values().map(|names| (None, names)))
    }

    fn shared(&mut self, labels: Labels) -> Arc<Labels> {
        if let Some(known) = self.label_sets.get(&labels) {
            return known.clone();
        }
        let labels = Arc::new(labels);
        self.label_sets.insert(labels.clone());
        labels
    }

    /// An object does not have them any more.
    fn forget(&mut self, labels: &Arc<Labels>) {
        // The caller's, and that of the set.
        if Arc::strong_count(labels) <= 2 {
            self.label_sets.remove(labels);
        }
    }
}

enum Insertion {
    New,
    Same,
    /// It had these labels.
    Replaced(Arc<Labels>),
}

impl Names {
    fn of(slot: Slot) -> Self {
        Self { slot, by_name: HashMap::new(), sets: HashMap::new() }
    }

    fn put(&mut self, name: &str, labels: Arc<Labels>) -> Insertion {
        let before = match self.by_name.get_mut(name) {
            Some(before) if Arc::ptr_eq(before, &labels) => return Insertion::Same,
            Some(before) => Some(std::mem::replace(before, labels.clone())),
            None => {
                self.by_name.insert(name.into(), labels.clone());
                None
            }
        };
        self.sets.entry(address(&labels)).or_insert((labels, 0)).1 += 1;
        before.map_or(Insertion::New, |before| {
            self.uncount(&before);
            Insertion::Replaced(before)
        })
    }

    fn take(&mut self, name: &str) -> Option<Arc<Labels>> {
        let labels = self.by_name.remove(name)?;
        self.uncount(&labels);
        Some(labels)
    }

    fn uncount(&mut self, labels: &Arc<Labels>) {
        let Some((_, count)) = self.sets.get_mut(&address(labels)) else { return };
        *count -= 1;
        if *count == 0 {
            self.sets.remove(&address(labels));
        }
    }
}

impl AlikeObjects<'_> {
    /// The first names of them, as `NAMESPACE/NAME` or `NAME`.
    pub fn examples(&self, most: usize) -> Vec<String> {
        if most == 0 {
            return Vec::new();
        }
        let is_one = |labels: &&Arc<Labels>| std::ptr::eq(Arc::as_ptr(labels), self.labels);
        let of_set = self.names.by_name.iter().filter(|(_, labels)| is_one(labels)).map(|(name, _)| &**name);
        let first: BTreeSet<&str> = of_set.fold(BTreeSet::new(), |mut first, name| {
            first.insert(name);
            if first.len() > most {
                first.pop_last();
            }
            first
        });
        let full =
            |name: &str| self.namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}/{name}"));
        first.into_iter().map(full).collect()
    }
}

fn address(labels: &Arc<Labels>) -> usize {
    Arc::as_ptr(labels).addr()
}

/// The slot of an object of cluster scope.
fn own_slot(object: &ObjectMeta, hash: NamespaceHash) -> Slot {
    hash.slot(object.name.as_deref().unwrap_or_default())
}

fn kept_labels(object: &ObjectMeta, by: &KeptBy) -> Labels {
    let labels = object.labels.iter().flatten().filter(|(key, _)| by.label_keys.contains(*key));
    labels.map(|(key, value)| (key.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let namespace = Some("a".to_owned());
        ObjectMeta { name: Some(name.to_owned()), namespace, labels: Some(labels.collect()), ..ObjectMeta::default() }
    }

    fn by_team() -> KeptBy {
        KeptBy { label_keys: ["team".to_owned()].into(), ..KeptBy::default() }
    }

    /// Of each set the team, the count and the names.
    fn sets(objects: &Objects) -> Vec<(Option<String>, u64, Vec<String>)> {
        let team = |labels: &Labels| labels.get("team").cloned();
        let mut sets: Vec<_> =
            objects.alike().map(|alike| (team(alike.labels), alike.count, alike.examples(2))).collect();
        sets.sort();
        sets
    }

    #[test]
    fn objects_with_the_same_kept_labels_are_alike() {
        let (mut objects, by) = (Objects::default(), by_team());
        for (name, team) in [("three", "x"), ("one", "x"), ("two", "y"), ("four", "x")] {
            assert!(objects.insert(&object(name, &[("team", team), ("other", name)]), &by));
        }
        let x = (Some("x".to_owned()), 3, vec!["a/four".to_owned(), "a/one".to_owned()]);
        assert_eq!(sets(&objects), [x, (Some("y".to_owned()), 1, vec!["a/two".to_owned()])]);
        assert!(!objects.insert(&object("two", &[("team", "y"), ("other", "z")]), &by), "nothing that is kept");
        assert_eq!(objects.label_sets.len(), 2);
    }

    #[test]
    fn labels_that_no_object_has_any_more_are_forgotten() {
        let (mut objects, by) = (Objects::default(), by_team());
        objects.insert(&object("one", &[("team", "x")]), &by);
        assert!(objects.insert(&object("one", &[]), &by), "its label was taken away");
        assert_eq!(sets(&objects), [(None, 1, vec!["a/one".to_owned()])]);
        assert_eq!(objects.label_sets.len(), 1);
        assert!(objects.remove(&object("one", &[("team", "x")]), &by));
        assert!(!objects.remove(&object("one", &[]), &by));
        assert!(objects.label_sets.is_empty() && objects.by_namespace.is_empty() && objects.counts().next().is_none());
    }
}
