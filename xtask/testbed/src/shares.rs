//! What shards own, by an ownership table.

use std::collections::BTreeMap;

use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::COUNT;

/// Whether so many shards own all slots, each as many as the others or one more, and nothing is on its way.
pub fn are_even(table: &Ownership, shards: usize) -> bool {
    let mut sizes: BTreeMap<&String, usize> = BTreeMap::new();
    for owner in table.slots.values() {
        *sizes.entry(owner).or_default() += 1;
    }
    let fewest = usize::from(COUNT) / shards;
    let is_even = sizes.len() == shards && sizes.values().all(|size| (fewest..=fewest + 1).contains(size));
    is_even && table.is_total() && table.revoked.is_none()
}
