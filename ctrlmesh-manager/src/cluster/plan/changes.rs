//! Finds the namespaces in which something changed: what follows in one follows from what is there, and from what
//! counts in all.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Plan;
use crate::cluster::cache::Snapshot;
use crate::rules::compile::{Compiled, PoliciesByPod, Trouble};
use crate::rules::object_name::{namespace, namespace_in};

/// All namespaces, or these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    All,
    In(BTreeSet<String>),
}

impl Default for Changed {
    /// None.
    fn default() -> Self {
        Self::In(BTreeSet::new())
    }
}

impl Changed {
    /// Between two moments, of what policies follow from.
    pub(super) fn between(old: &Snapshot, new: &Snapshot) -> Self {
        let is_same = old.namespaces == new.namespaces
            && old.scheme.in_force == new.scheme.in_force
            && old.follows == new.follows;
        if !is_same {
            return Self::All;
        }
        let mut changed = Self::default();
        changed.compare(&old.configs, &new.configs, |one| namespace(&one.metadata));
        changed.compare(&old.breakers, &new.breakers, |one| &one.selection.namespace);
        changed.compare(&old.injections, &new.injections, |one| &one.selection.namespace);
        changed.compare(&old.members, &new.members, |one| &one.name.namespace);
        changed.compare_maps(&old.unenrolled, &new.unenrolled, |namespace| namespace);
        changed.compare_by_name(&old.first_ordinals, &new.first_ordinals);
        changed.compare_by_name(&old.evidence, &new.evidence);
        changed.compare_by_name(&old.loads, &new.loads);
        changed.compare_uids(old, new, |one| &one.held_back);
        changed.compare_uids(old, new, |one| &one.waiting);
        changed
    }

    /// Between two plans, of all that is in them.
    pub fn between_plans(old: &Plan, new: &Plan) -> Self {
        if std::ptr::eq(old, new) {
            return Self::default();
        }
        let (before, after) = (&*old.snapshot, &*new.snapshot);
        let is_same = before.scheme == after.scheme
            && before.served == after.served
            && before.listed == after.listed
            && before.unfit_nodes == after.unfit_nodes
            && before.runtime_handlers == after.runtime_handlers;
        if !is_same {
            return Self::All;
        }
        let mut changed = Self::between(before, after);
        changed.compare_by_name(&before.set_accounts, &after.set_accounts);
        changed.compare_by_name(&before.deployment_accounts, &after.deployment_accounts);
        changed.compare_by_name(&before.set_obstacles, &after.set_obstacles);
        changed.compare_by_name(&before.deployment_obstacles, &after.deployment_obstacles);
        changed.compare_by_name(&before.progress_deadlines, &after.progress_deadlines);
        changed.compare_by_name(&before.update_revisions, &after.update_revisions);
        changed.compare_uids(before, after, |one| &one.stopped);
        changed.compare_compiled(&old.compiled, &new.compiled);
        changed.compare_policies(old.sendable(), new.sendable());
        changed
    }

    /// These; of all, those of `all`.
    pub(super) fn namespaces(self, all: impl FnOnce() -> BTreeSet<String>) -> BTreeSet<String> {
        match self {
            Self::All => all(),
            Self::In(namespaces) => namespaces,
        }
    }

    pub fn has(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::In(namespaces) => namespaces.contains(namespace),
        }
    }

    pub fn add<'a>(&mut self, namespaces: impl IntoIterator<Item = &'a str>) {
        if let Self::In(all) = self {
            all.extend(namespaces.into_iter().map(str::to_owned));
        }
    }

    /// Those of either.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        match (self, other) {
            (Self::In(one), Self::In(other)) => Self::In(&one | &other),
            _ => Self::All,
        }
    }

    /// The namespaces for which something else was compiled.
    pub(super) fn compare_compiled(&mut self, old: &Compiled, new: &Compiled) {
        self.compare_policies(&old.policies, &new.policies);
        self.compare_by_name(&old.operators, &new.operators);
        self.compare(&old.troubles, &new.troubles, Trouble::namespace);
    }

    fn compare_policies(&mut self, old: &PoliciesByPod, new: &PoliciesByPod) {
        let is_same = |one: &Arc<_>, other: &Arc<_>| Arc::ptr_eq(one, other) || one == other;
        self.add(differing(old, new, is_same).map(|pod| pod.namespace.as_str()));
    }

    /// The namespaces of which two lists do not have the same.
    fn compare<T: PartialEq>(&mut self, old: &[T], new: &[T], namespace: impl Fn(&T) -> &str) {
        let mut by_namespace: [BTreeMap<&str, Vec<&T>>; 2] = Default::default();
        for (all, by_namespace) in [old, new].into_iter().zip(&mut by_namespace) {
            for one in all {
                by_namespace.entry(namespace(one)).or_default().push(one);
            }
        }
        self.compare_maps(&by_namespace[0], &by_namespace[1], |namespace| namespace);
    }

    /// The entries that only one of two maps has, or that are not the same.
    pub fn compare_maps<K: Ord, V: PartialEq>(
        &mut self,
        old: &BTreeMap<K, V>,
        new: &BTreeMap<K, V>,
        namespace: impl Fn(&K) -> &str,
    ) {
        self.add(differing(old, new, V::eq).map(namespace));
    }

    /// The same of maps by `NAMESPACE/NAME`.
    pub fn compare_by_name<V: PartialEq>(&mut self, old: &BTreeMap<String, V>, new: &BTreeMap<String, V>) {
        self.compare_maps(old, new, |name| namespace_in(name));
    }

    /// The namespaces of pods of which only one of two sets has the UID.
    fn compare_uids(&mut self, old: &Snapshot, new: &Snapshot, uids: impl Fn(&Snapshot) -> &BTreeSet<String>) {
        let differing: BTreeSet<&String> = uids(old).symmetric_difference(uids(new)).collect();
        if !differing.is_empty() {
            let pods = old.members.iter().chain(&new.members).filter(|pod| differing.contains(&pod.uid));
            self.add(pods.map(|pod| pod.name.namespace.as_str()));
        }
    }
}

/// The keys that only one of two maps has, or whose values are not the same.
fn differing<'a, K: Ord, V>(
    old: &'a BTreeMap<K, V>,
    new: &'a BTreeMap<K, V>,
    is_same: impl Fn(&V, &V) -> bool,
) -> impl Iterator<Item = &'a K> {
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    std::iter::from_fn(move || {
        loop {
            let order = match (old.peek(), new.peek()) {
                (Some((one, _)), Some((other, _))) => one.cmp(other),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => return None,
            };
            match order {
                Ordering::Less => return old.next().map(|(key, _)| key),
                Ordering::Greater => return new.next().map(|(key, _)| key),
                Ordering::Equal => {
                    let ((key, before), (_, after)) = (old.next()?, new.next()?);
                    if !is_same(before, after) {
                        return Some(key);
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_one_map_and_other_values_differ() {
        let map = |pairs: &[(&'static str, u8)]| -> BTreeMap<&str, u8> { pairs.iter().copied().collect() };
        let (old, new) = (map(&[("a", 1), ("b", 2), ("d", 4), ("e", 5)]), map(&[("b", 2), ("c", 3), ("d", 0)]));
        assert_eq!(differing(&old, &new, u8::eq).collect::<Vec<_>>(), [&"a", &"c", &"d", &"e"]);
        assert_eq!(differing(&old, &old, u8::eq).count(), 0);
    }

    #[test]
    fn what_counts_everywhere_changes_all() {
        let plan = |snapshot: Snapshot| Plan { snapshot: Arc::new(snapshot), ..Plan::default() };
        let unfit = Snapshot { unfit_nodes: ["n".to_owned()].into(), ..Snapshot::default() };
        assert_eq!(Changed::between_plans(&plan(Snapshot::default()), &plan(unfit)), Changed::All);
        let accounts =
            Snapshot { set_accounts: [("ops/op".to_owned(), "robot".to_owned())].into(), ..Snapshot::default() };
        let changed = Changed::between_plans(&plan(Snapshot::default()), &plan(accounts));
        assert!(changed.has("ops") && !changed.has("op"), "{changed:?}");
    }
}
