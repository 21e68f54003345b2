//! Finds the namespaces in which something changed that policies follow from.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::cache::Snapshot;
use crate::rules::compile::{Compiled, Trouble};
use crate::rules::object_name::{namespace, namespace_in};

/// All namespaces, or these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Changed {
    All,
    In(BTreeSet<String>),
}

impl Changed {
    /// Between two moments.
    pub(super) fn between(old: &Snapshot, new: &Snapshot) -> Self {
        let is_same = old.namespaces == new.namespaces
            && old.scheme.in_force == new.scheme.in_force
            && old.follows == new.follows;
        if !is_same {
            return Self::All;
        }
        let mut found = Found::default();
        found.compare(&old.configs, &new.configs, |one| namespace(&one.metadata));
        found.compare(&old.breakers, &new.breakers, |one| &one.selection.namespace);
        found.compare(&old.injections, &new.injections, |one| &one.selection.namespace);
        found.compare(&old.members, &new.members, |one| &one.name.namespace);
        found.compare_by_key(&old.unenrolled, &new.unenrolled, |namespace| namespace);
        found.compare_by_key(&old.first_ordinals, &new.first_ordinals, |name| namespace_in(name));
        found.compare_by_key(&old.evidence, &new.evidence, |name| namespace_in(name));
        found.compare_by_key(&old.loads, &new.loads, |name| namespace_in(name));
        for (old_uids, new_uids) in [(&old.held_back, &new.held_back), (&old.waiting, &new.waiting)] {
            let uids: BTreeSet<&String> = old_uids.symmetric_difference(new_uids).collect();
            if !uids.is_empty() {
                let pods = old.members.iter().chain(&new.members).filter(|pod| uids.contains(&pod.uid));
                found.0.extend(pods.map(|pod| pod.name.namespace.clone()));
            }
        }
        Self::In(found.0)
    }
}

/// The namespaces for which something else was compiled.
pub(super) fn differing(old: &Compiled, new: &Compiled) -> BTreeSet<String> {
    let mut found = Found::default();
    found.compare_by_key(&old.policies, &new.policies, |pod| &pod.namespace);
    found.compare_by_key(&old.operators, &new.operators, |name| namespace_in(name));
    found.compare(&old.troubles, &new.troubles, Trouble::namespace);
    found.0
}

/// Namespaces.
#[derive(Default)]
struct Found(BTreeSet<String>);

impl Found {
    /// The namespaces of which two lists do not have the same.
    fn compare<T: PartialEq>(&mut self, old: &[T], new: &[T], namespace: impl Fn(&T) -> &str) {
        let mut by_namespace: [BTreeMap<&str, Vec<&T>>; 2] = Default::default();
        for (all, by_namespace) in [old, new].into_iter().zip(&mut by_namespace) {
            for one in all {
                by_namespace.entry(namespace(one)).or_default().push(one);
            }
        }
        self.compare_by_key(&by_namespace[0], &by_namespace[1], |namespace| namespace);
    }

    /// The entries that only one of two maps has, or that are not the same.
    fn compare_by_key<K: Ord, V: PartialEq>(
        &mut self,
        old: &BTreeMap<K, V>,
        new: &BTreeMap<K, V>,
        namespace: impl Fn(&K) -> &str,
    ) {
        let changed = new.iter().filter(|(key, value)| old.get(key) != Some(value)).map(|(key, _)| key);
        let gone = old.keys().filter(|key| !new.contains_key(key));
        self.0.extend(changed.chain(gone).map(|key| namespace(key).to_owned()));
    }
}
