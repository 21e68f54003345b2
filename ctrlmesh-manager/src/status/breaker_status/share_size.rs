//! Says how many objects a limit with `percentOfShare` goes by.
//!
//! A count that is not known at the moment stays as it was: a new leader has not seen all objects yet.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{BucketScope, ShareSize};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::guard::{Budget, Guard, RequestMatch};
use ctrlmesh_common::resource::{WILDCARD, without_subresource};
use ctrlmesh_common::slots::Slot;

use super::Target;
use crate::labels::Counted;
use crate::rules::breaker::{self, Breaker, Rule};
use crate::status::finding::{Finding, finding, listed};
use crate::status::targets::Observed;

/// The sizes of the shares that pods are limited by, and why some are not known.
#[derive(Debug, Default)]
pub(super) struct ShareSizes {
    pub(super) sizes: Vec<ShareSize>,
    /// What is not counted, and why.
    uncounted: Vec<String>,
    /// Whether a size is not written yet, so that no proxy knows it.
    is_new: bool,
}

/// What a shard owns, by the table of its operator.
#[derive(Clone, Copy)]
struct Owned<'a> {
    shard: &'a str,
    table: &'a Ownership,
}

/// Why a share is not counted.
enum Uncounted {
    /// It will be. Meanwhile, what is written holds.
    Yet(String),
    No(String),
}

impl ShareSizes {
    pub(super) fn of(read: &Breaker, targets: &[Target<'_>], observed: Observed<'_>) -> Self {
        let mut all = Self::default();
        let limits: Vec<&Rule> = read.rules.iter().filter(|rule| rule.guard.budget.is_some()).collect();
        if limits.is_empty() {
            return all;
        }
        let mut shards: BTreeSet<(&str, &str)> = BTreeSet::new();
        for target in targets {
            let shard = target.policy.map(|policy| policy.operator.as_deref().zip(policy.shard.as_deref()));
            match shard {
                Some(Some(shard)) => drop(shards.insert(shard)),
                Some(None) => all.uncounted.push(format!("pod {} is of no shard", target.member.name.name)),
                None => {}
            }
        }
        // A shard may be without a pod for a moment.
        let known = read.shares.iter().filter_map(|size| size.shard.rsplit_once('/'));
        shards.extend(
            known.filter(|(operator, shard)| table(operator, observed).is_some_and(|table| owns(table, shard))),
        );
        for rule in limits {
            for shard in &shards {
                all.add(read, rule, *shard, observed);
            }
        }
        all
    }

    fn add(&mut self, read: &Breaker, rule: &Rule, (operator, shard): (&str, &str), observed: Observed<'_>) {
        let Some(group) = breaker::group(BucketScope::Shard, Some(operator), Some(shard)) else { return };
        let (guard, limit) = (&rule.guard, rule.guard.rule.clone());
        let before = read.share_size(rule, &group);
        self.is_new |= before.is_none();
        let why = match count(guard, operator, shard, observed) {
            Ok(objects) => {
                let stays = before.filter(|before| is_near(guard, before.objects, objects));
                let resource_rules_hash = rule.requests_hash.clone();
                let size = || ShareSize { limit, shard: group, objects, resource_rules_hash };
                self.sizes.push(stays.cloned().unwrap_or_else(size));
                return;
            }
            Err(Uncounted::Yet(why)) => Some(why).filter(|_| before.is_none()),
            Err(Uncounted::No(why)) => Some(why),
        };
        self.uncounted.extend(why.map(|why| format!("limit {limit:?}, shard {group}: {why}")));
        self.sizes.extend(before.cloned());
    }

    /// Why some proxy has no budget, or an old one; `None` if all have theirs.
    pub(super) fn obstacle(&self) -> Option<Finding> {
        if self.uncounted.is_empty() {
            return self
                .is_new
                .then(|| finding(false, "Counting", "the proxies do not know the sizes of all shares yet"));
        }
        Some(finding(false, "NotCounted", listed(&self.uncounted, "; ")))
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

fn table<'a>(operator: &str, observed: Observed<'a>) -> Option<&'a Ownership> {
    observed.plan.compiled.operators.get(operator)?.ownership.as_ref()
}

fn owns(table: &Ownership, shard: &str) -> bool {
    table.slots.values().chain(table.namespaces.values()).any(|owner| owner == shard)
}

/// The objects of the limit's kinds and namespaces in the share.
fn count(guard: &Guard, operator: &str, shard: &str, observed: Observed<'_>) -> Result<i64, Uncounted> {
    let Some(table) = table(operator, observed) else {
        let is_known = observed.plan.compiled.operators.contains_key(operator);
        let why =
            if is_known { "it is a shard by hand, and nobody knows what it owns" } else { "its root is not valid" };
        return Err(Uncounted::No(why.to_owned()));
    };
    if table.revoked.is_some() {
        return Err(Uncounted::Yet("slots are on their way from one shard to another".to_owned()));
    }
    if !owns(table, shard) {
        return Err(Uncounted::Yet("it owns nothing yet".to_owned()));
    }
    let owned = Owned { shard, table };
    let mut kinds: BTreeMap<(&str, &str), Vec<&RequestMatch>> = BTreeMap::new();
    for requests in &guard.requests {
        for plural in requests.resources.iter().map(|name| without_subresource(name)) {
            for group in &requests.api_groups {
                kinds.entry((group, plural)).or_default().push(requests);
            }
        }
    }
    let mut objects = 0_u64;
    for (kind, rules) in kinds {
        objects = objects.saturating_add(of_kind(kind, &rules, owned, observed)?);
    }
    Ok(i64::try_from(objects).unwrap_or(i64::MAX))
}

fn of_kind(
    (group, plural): (&str, &str),
    rules: &[&RequestMatch],
    owned: Owned<'_>,
    observed: Observed<'_>,
) -> Result<u64, Uncounted> {
    let hash = observed.plan.snapshot.scheme.in_force.hash;
    let is_named = |namespace: Option<&str>| {
        let mut namespaces = rules.iter().flat_map(|rule| &rule.namespaces);
        namespaces.any(|name| name == WILDCARD || Some(name.as_str()) == namespace)
    };
    let is_there = |slot: Slot, namespace: Option<&str>| {
        is_named(namespace) && owned.table.owner(slot, namespace) == Some(owned.shard)
    };
    if (group, plural) == ("", "namespaces") {
        let all = observed.plan.snapshot.namespaces.iter();
        return Ok(all.filter(|name| is_there(hash.slot(name), Some(name))).count() as u64);
    }
    let (why, is_passing) = match observed.objects.count(group, plural, is_there) {
        Counted::Objects(objects) => return Ok(objects),
        Counted::InProgress => ("are being counted", true),
        Counted::Stale => ("cannot be listed any more", false),
        // The watches of a new leader have not begun.
        Counted::Unlabelled => ("are not labelled, so they are not counted", observed.new_leader),
    };
    let why = format!("{plural} of group {group:?} {why}");
    Err(if is_passing { Uncounted::Yet(why) } else { Uncounted::No(why) })
}

#[cfg(test)]
mod tests;
