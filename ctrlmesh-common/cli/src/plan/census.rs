//! Counts the objects that a root selects, by slot and namespace.
//!
//! Pure. So the counts hold whoever owns the slots.

use std::collections::BTreeMap;

use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::Slot;

/// The owner before, and the owner after.
pub(super) type Owners = (Option<String>, Option<String>);

/// Objects of one slot that the root selects as it is, as it would be, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    slot: Slot,
    before: bool,
    after: bool,
}

/// How many objects there are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Census {
    /// By namespace, which is empty for what is in none.
    groups: BTreeMap<Group, BTreeMap<String, u64>>,
}

impl Census {
    /// Counts an object that the root selects as it is (`before`), or as it would be.
    pub(super) fn count(&mut self, slot: Slot, namespace: Option<&str>, before: bool, after: bool) {
        if !before && !after {
            return;
        }
        let namespaces = self.groups.entry(Group { slot, before, after }).or_default();
        let namespace = namespace.unwrap_or_default();
        match namespaces.get_mut(namespace) {
            Some(count) => *count += 1,
            None => drop(namespaces.insert(namespace.to_owned(), 1)),
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        for (group, namespaces) in other.groups {
            let sums = self.groups.entry(group).or_default();
            for (namespace, count) in namespaces {
                *sums.entry(namespace).or_default() += count;
            }
        }
    }

    /// By the owner in either table. Of what is not selected there is none.
    pub(super) fn by_owners(&self, before: &Ownership, after: &Ownership) -> BTreeMap<Owners, u64> {
        let mut counts = BTreeMap::new();
        for (group, namespace, count) in self.entries() {
            let owner = |selected: bool, table: &Ownership| {
                let owner = selected.then(|| table.owner(group.slot, namespace)).flatten();
                owner.map(str::to_owned)
            };
            let owners = (owner(group.before, before), owner(group.after, after));
            *counts.entry(owners).or_default() += count;
        }
        counts
    }

    /// The objects that go with each slot: those that the root would select, and whose namespace the table does not
    /// name.
    pub(crate) fn by_slot(&self, table: &Ownership) -> BTreeMap<Slot, u64> {
        let mut counts = BTreeMap::new();
        let is_pinned = |namespace: Option<&str>| namespace.is_some_and(|name| table.namespaces.contains_key(name));
        for (group, _, count) in self.entries().filter(|(group, namespace, _)| group.after && !is_pinned(*namespace)) {
            *counts.entry(group.slot).or_default() += count;
        }
        counts
    }

    fn entries(&self) -> impl Iterator<Item = (&Group, Option<&str>, u64)> {
        self.groups.iter().flat_map(|(group, namespaces)| {
            namespaces
                .iter()
                .map(move |(name, count)| (group, Some(name.as_str()).filter(|name| !name.is_empty()), *count))
        })
    }
}
