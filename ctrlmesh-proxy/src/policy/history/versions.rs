//! Remembers for which resources versions compare with the version at which the policy changed.
//!
//! An API server may keep some resources in another store, and aggregated API servers have stores of their own, with
//! versions of their own. Where a resource's newest version is smaller than that of the change, which has happened, the
//! two do not compare. The proxy finds that out once for each change.

use std::sync::{Mutex, MutexGuard};

use ctrlmesh_common::resource::ResourceKey;
use ctrlmesh_runtime::sync::lock;

use super::reads::ReadResource;

/// Resources that are remembered.
const MAX_KNOWN: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Versions(Mutex<Vec<Comparison>>);

#[derive(Debug)]
struct Comparison {
    of: ReadResource,
    changed_at: u64,
    compare: bool,
}

impl Versions {
    /// Whether versions of a resource compare with the one at which the policy changed, where that is known.
    pub(super) fn compare(&self, of: ResourceKey<'_>, changed_at: u64) -> Option<bool> {
        let is_known = |known: &&Comparison| known.of.key() == of && known.changed_at == changed_at;
        self.known().iter().find(is_known).map(|known| known.compare)
    }

    /// Records the newest version of a resource after the change. Returns whether the two compare.
    pub(super) fn found(&self, of: ResourceKey<'_>, changed_at: u64, newest: u64) -> bool {
        let compare = newest >= changed_at;
        let mut known = self.known();
        known.retain(|known| known.of.key() != of);
        if known.len() >= MAX_KNOWN {
            known.remove(0);
        }
        known.push(Comparison { of: ReadResource::new(of), changed_at, compare });
        compare
    }

    fn known(&self) -> MutexGuard<'_, Vec<Comparison>> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: ResourceKey<'_> = ResourceKey::of_host("", "events");

    #[test]
    fn what_was_found_holds_for_one_change_of_one_resource() {
        let versions = Versions::default();
        assert_eq!(versions.compare(EVENTS, 100), None);
        assert!(!versions.found(EVENTS, 100, 99));
        assert_eq!(versions.compare(EVENTS, 100), Some(false));
        assert_eq!(versions.compare(EVENTS, 101), None);
        assert_eq!(versions.compare(ResourceKey::of_host("events.k8s.io", "events"), 100), None);
        assert!(versions.found(EVENTS, 101, 101));
        assert_eq!(versions.compare(EVENTS, 101), Some(true));
        assert_eq!(versions.compare(EVENTS, 100), None);
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let versions = Versions::default();
        for number in 0..=MAX_KNOWN {
            versions.found(ResourceKey::of_host("", &number.to_string()), 100, 1);
        }
        assert_eq!(versions.compare(ResourceKey::of_host("", "0"), 100), None);
        assert_eq!(versions.compare(ResourceKey::of_host("", "1"), 100), Some(false));
    }
}
