//! Says how many objects a limit with `percentOfShare` goes by.
//!
//! A count that is not known at the moment stays as it was: a new leader has not seen all objects yet.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{BucketScope, ShareSize};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::guard::{Budget, Guard, RequestMatch};
use ctrlmesh_common::resource::WILDCARD;
use ctrlmesh_common::slots::Slot;

use super::Target;
use crate::labels::Counted;
use crate::rules::breaker::{self, Breaker};
use crate::status::finding::{Finding, finding, listed};
use crate::status::targets::Observed;

/// The sizes of the shares that pods are limited by, and why some are not known.
#[derive(Debug, Default)]
pub(super) struct ShareSizes {
    pub(super) sizes: Vec<ShareSize>,
    /// One reason a limit and shard.
    uncounted: Vec<String>,
}

/// What a shard owns, by the table of its operator.
#[derive(Clone, Copy)]
struct Owned<'a> {
    shard: &'a str,
    table: &'a Ownership,
}

impl ShareSizes {
    pub(super) fn of(read: &Breaker, targets: &[Target<'_>], observed: Observed<'_>) -> Self {
        let policies = targets.iter().filter_map(|target| target.policy);
        let shards: BTreeSet<(&str, &str)> =
            policies.filter_map(|policy| Some((policy.operator.as_deref()?, policy.shard.as_deref()?))).collect();
        let mut all = Self::default();
        for rule in read.rules.iter().filter(|rule| rule.guard.budget.is_some()) {
            for (operator, shard) in &shards {
                all.add(read, &rule.guard, (operator, shard), observed);
            }
        }
        all
    }

    fn add(&mut self, read: &Breaker, guard: &Guard, (operator, shard): (&str, &str), observed: Observed<'_>) {
        let Some(group) = breaker::group(BucketScope::Shard, Some(operator), Some(shard)) else { return };
        let before = read.share_size(&guard.rule, &group, &breaker::kinds_hash(guard));
        match count(guard, operator, shard, observed) {
            Ok(objects) => {
                let before = before.filter(|before| is_near(guard, before.objects, objects));
                let limit = guard.rule.clone();
                let size =
                    || ShareSize { limit, shard: group, objects, resource_rules_hash: breaker::kinds_hash(guard) };
                self.sizes.push(before.cloned().unwrap_or_else(size));
            }
            Err(why) => {
                self.uncounted.push(format!("limit {:?}, shard {group}: {why}", guard.rule));
                self.sizes.extend(before.cloned());
            }
        }
    }

    /// Why some limit has no budget, or an old one; `None` if all have.
    pub(super) fn obstacle(&self) -> Option<Finding> {
        (!self.uncounted.is_empty()).then(|| finding(false, "NotCounted", listed(&self.uncounted, "; ")))
    }
}

/// A budget follows a share that grows by a tenth, and one that shrinks at once. So its growth is not written for every
/// object.
fn is_near(guard: &Guard, before: i64, now: i64) -> bool {
    let Some(budget) = guard.budget else { return false };
    let requests =
        |objects: i64| Budget { objects: u64::try_from(objects).ok(), ..budget }.requests().unwrap_or_default();
    let (before, now) = (requests(before), requests(now));
    before <= now && now - before <= before / 10
}

/// The objects of the limit's kinds and namespaces in the share.
fn count(guard: &Guard, operator: &str, shard: &str, observed: Observed<'_>) -> Result<i64, String> {
    let record = observed.plan.compiled.operators.get(operator);
    let table = record.and_then(|record| record.ownership.as_ref());
    let table = table.ok_or("the shard is by hand, so nobody knows what it owns")?;
    let owned = Owned { shard, table };
    let mut kinds: BTreeSet<(&str, &str)> = BTreeSet::new();
    for requests in &guard.requests {
        // `pods/eviction` is of pods.
        let plurals = requests.resources.iter().map(|name| name.split_once('/').map_or(&**name, |(plural, _)| plural));
        kinds.extend(plurals.flat_map(|plural| requests.api_groups.iter().map(move |group| (&**group, plural))));
    }
    let mut objects = 0_u64;
    for (group, plural) in kinds {
        let rules: Vec<&RequestMatch> =
            guard.requests.iter().filter(|requests| is_named(requests, group, plural)).collect();
        objects = objects.saturating_add(of_kind((group, plural), &rules, owned, observed)?);
    }
    Ok(i64::try_from(objects).unwrap_or(i64::MAX))
}

fn of_kind(
    (group, plural): (&str, &str),
    rules: &[&RequestMatch],
    owned: Owned<'_>,
    observed: Observed<'_>,
) -> Result<u64, String> {
    let hash = observed.plan.snapshot.scheme.in_force.hash;
    let is_named = |namespace: Option<&str>| {
        let mut namespaces = rules.iter().flat_map(|rule| &rule.namespaces);
        namespaces.any(|name| name == WILDCARD || Some(name.as_str()) == namespace)
    };
    let is_there = |slot: Slot, namespace: Option<&str>| {
        is_named(namespace) && owned.table.owner(slot, namespace) == Some(owned.shard)
    };
    if (group, plural) == ("", "namespaces") {
        let mut all = observed.plan.snapshot.namespaces.iter();
        let there = all.by_ref().filter(|name| is_there(hash.slot(name), Some(name)));
        return Ok(there.count() as u64);
    }
    match observed.objects.count(group, plural, hash, is_there) {
        Counted::Objects(objects) => Ok(objects),
        Counted::InProgress => Err(format!("{plural} of group {group:?} are being counted")),
        Counted::Unlabelled => Err(format!("{plural} of group {group:?} are not labelled, so they are not counted")),
    }
}

fn is_named(requests: &RequestMatch, group: &str, plural: &str) -> bool {
    let is_plural = |name: &String| name.split_once('/').map_or(name.as_str(), |(plural, _)| plural) == plural;
    requests.api_groups.iter().any(|one| one == group) && requests.resources.iter().any(is_plural)
}

#[cfg(test)]
mod tests;
