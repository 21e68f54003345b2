//! Do shards that are written by hand leave hashes to nobody?
//!
//! The first of them always does, so it is no error. Shards of one operator are known by their lock or their workload;
//! one that does not ask for a hash has them all.

use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::SlotSet;

use super::claim::{Budget, BudgetExceeded, Claim, Named, named};

/// What shards may be divided by, whatever the managers were told.
const KEYS: [&str; 2] = [label::SHARDING_HASH, label::SHARD_HASH];

/// The hashes of a resource that neither `mine` has, which asks for some of them, nor any of `others`, the shards of the
/// same operator. `keys` are further labels with a hash.
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
