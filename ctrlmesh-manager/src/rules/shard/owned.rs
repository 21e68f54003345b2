//! Limits shards to what they own in the ownership table.
//!
//! While something moves, that differs from what the root divides: what is taken away is seen by no shard. Otherwise
//! the limits are those of the shard's ShardingConfig.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{Limit, Root};
use ctrlmesh_common::ownership::Ownership;

use super::share::{ListedBy, Share};
use super::{DivideError, Labelling, MAX_VALUES, Shard, Slice, expressions, limits};

/// The limits of each of the `shards` by `table`; `None` for one that owns nothing.
///
/// `namespaces` are those of the cluster.
///
/// # Errors
/// If too many namespaces would have to be listed.
pub fn owned(
    rule: &Root,
    shards: &[Shard],
    table: &Ownership,
    labelling: &Labelling,
    namespaces: &BTreeSet<String>,
) -> Result<Vec<Option<Vec<Limit>>>, DivideError> {
    let revoked = table.revoked.iter().flat_map(|revoked| revoked.namespaces.keys());
    let mut listed: BTreeSet<String> = table.namespaces.keys().chain(revoked).cloned().collect();
    let pinned = listed.clone();
    let listed_by = shards.iter().map(|Shard { share, .. }| {
        let share = in_table(share, table);
        let foreign = |name: &String| pinned.contains(name) && !share.namespaces.contains(name);
        match share.listed_by(labelling, namespaces) {
            ListedBy::Namespaces(names) => {
                ListedBy::Namespaces(names.into_iter().filter(|name| !foreign(name)).collect())
            }
            by_slots @ ListedBy::Slots(_) => by_slots,
        }
    });
    let listed_by: Vec<ListedBy> = listed_by.collect();
    listed.extend(listed_by.iter().flat_map(ListedBy::listed));
    if listed.len() > MAX_VALUES {
        return Err(DivideError::TooManyNamespaces { namespaces: listed.len() });
    }
    let owned = shards.iter().zip(listed_by).map(|(shard, listed_by)| {
        if listed_by.is_empty() {
            return Ok(None);
        }
        match limits(rule, &shard.share.name, &expressions(listed_by, &listed, labelling)) {
            // The root excludes all that the shard owns for the moment.
            Err(DivideError::Nothing { .. }) => Ok(None),
            limits => limits.map(Some),
        }
    });
    owned.collect()
}

/// The limits of a shard that owns nothing, and reads the objects of `slice` all the same; `None`: there are none.
///
/// # Errors
/// If too many namespaces would have to be listed.
pub fn shadowed(
    rule: &Root,
    shard: &Shard,
    slice: &Slice,
    table: &Ownership,
    labelling: &Labelling,
    namespaces: &BTreeSet<String>,
) -> Result<Option<Vec<Limit>>, DivideError> {
    let name = || shard.share.name.clone();
    let mut table = table.clone();
    table.slots.extend(slice.slots.iter().map(|slot| (slot, name())));
    table.namespaces.extend(slice.namespaces.iter().map(|namespace| (namespace.clone(), name())));
    owned(rule, std::slice::from_ref(shard), &table, labelling, namespaces).map(|mut limits| limits.pop().flatten())
}

/// The share as the table has it.
fn in_table(share: &Share, table: &Ownership) -> Share {
    let namespaces = table.namespaces.iter().filter(|(_, owner)| **owner == share.name);
    Share {
        slots: table.slots_of(&share.name).collect(),
        namespaces: namespaces.map(|(namespace, _)| namespace.clone()).collect(),
        ..share.clone()
    }
}
