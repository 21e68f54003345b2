//! Says what the pods of each shard of a root that is fenced see: what the shard owns, nothing, or what a version on
//! trial shadows.

use ctrlmesh_common::api::{Limit, Root, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::SlotSet;

use super::World;
use super::placement::Placement;
use crate::rules::shard::{self, DivideError, Shard, Versions};

/// What the pods of a shard see.
#[derive(Clone, Debug)]
pub(super) enum Sees {
    Nothing,
    Own(Vec<Limit>),
    /// What others own. Their writes are dry runs.
    Shadowed {
        limits: Vec<Limit>,
        slots: SlotSet,
    },
}

/// What each shard sees by the table. Of a version on trial that is a shadow, one shard sees what it would own: the
/// first one that has a pod. It may not have owned anything until just now.
pub(super) fn sees(
    root: &ShardingConfig,
    rule: &Root,
    (shards, placement): (&[Shard], &Placement<'_>),
    table: &Ownership,
    world: World<'_>,
) -> Result<Vec<Sees>, DivideError> {
    let owned = shard::owned(rule, shards, table, world.labelling, world.namespaces)?;
    let versions = Versions::of(root);
    let read = versions.read_unowned();
    let is_tried = |shard: &Shard| shard.share.second != versions.promoted_is_second();
    let has_pod = |shard: &Shard| placement.pods().values().any(|placed| *placed == shard.share.name);
    let reader = shards.iter().filter(|_| read.is_some()).find(|shard| is_tried(shard) && has_pod(shard));
    let reader = reader.filter(|shard| !owes(table, &shard.share.name)).map(|shard| &shard.share.name);
    let sees = shards.iter().zip(owned).map(|(shard, owned)| match (owned, &read) {
        (Some(limits), _) => Ok(Sees::Own(limits)),
        (None, Some(slice)) if reader == Some(&shard.share.name) => {
            let limits = shard::shadowed(rule, shard, slice, table, world.labelling, world.namespaces)?;
            Ok(limits.map_or(Sees::Nothing, |limits| Sees::Shadowed { limits, slots: slice.slots }))
        }
        (None, _) => Ok(Sees::Nothing),
    });
    sees.collect()
}

/// Whether something that was taken away from a shard is not proved to be left alone by it yet.
fn owes(table: &Ownership, shard: &str) -> bool {
    table.revoked.iter().any(|revoked| {
        let mut owners = revoked.slots.values().chain(revoked.namespaces.values()).chain(revoked.pod_uids.values());
        owners.any(|owner| owner == shard)
    })
}
