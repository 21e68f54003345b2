//! Finds hashes that no manual shard owns.
//!
//! It gives warnings only, because the first shard always leaves some. Lock or workload tell the shards of
//! one operator. A shard that does not select by hash has all of them.

use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::SlotSet;

use super::claim::{Budget, BudgetExceeded, Claim, Named, named};

/// Labels that shards may select by, whatever the flags.
const KEYS: [&str; 2] = [label::SHARDING_HASH, label::SHARD_HASH];

/// Hashes of a resource that neither `mine`, which selects by hash, nor `others` of the same operator have.
/// `keys` are further hash labels.
pub(super) fn unowned<'a>(
    mine: &'a Claim<'a>,
    others: &[Claim<'_>],
    keys: &[&str],
    budget: &mut Budget,
) -> Result<Option<(Named<'a>, SlotSet)>, BudgetExceeded> {
    let further = keys.iter().copied().filter(|key| !KEYS.contains(key));
    for key in KEYS.into_iter().chain(further) {
        for resource in named([mine]) {
            if mine.admits(resource, key, "", budget)?.is_none() {
                continue;
            }
            let mut left = SlotSet::EMPTY;
            for slot in SlotSet::ALL.iter() {
                let mut owned = false;
                for claim in others.iter().chain([mine]) {
                    let admits = claim.admits(resource, key, &slot.to_string(), budget)?;
                    owned |= admits.unwrap_or(true);
                }
                if !owned {
                    left = left.union([slot].into_iter().collect());
                }
            }
            if !left.is_empty() {
                return Ok(Some((resource, left)));
            }
        }
    }
    Ok(None)
}
