//! Computes the status of a CircuitBreaker from what the proxies report.
//!
//! What is not known stays as it is: a new leader has not heard from every proxy yet.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{
    BreakerState, BreakerTargetStatus, BucketDivision, BucketScope, CircuitBreaker, CircuitBreakerStatus,
    LimitingSnapshot,
};
use ctrlmesh_common::wire::GuardState;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::cluster::cache::{Cache, CachedBreaker};
use crate::rules::breaker::{self, Breaker, Rule};
use crate::status::cluster_writer::EventNote;
use crate::status::finding::{Finding, condition, finding, listed, seconds};
use crate::status::rules_writer::RulesKind;
use crate::status::targets::{self, MAX_PODS, Observed};

mod access;
mod refusals;
mod division;
mod share_size;

use division::divisions;
use share_size::ShareSizes;

/// States of limits in one status, over all of its pods.
const MAX_SNAPSHOTS: usize = 2000;

/// A selected pod.
type Target<'a> = targets::Target<'a, BreakerTargetStatus>;

impl RulesKind for CircuitBreaker {
    type Read = Breaker;

    fn cached(cache: &Cache) -> Vec<CachedBreaker> {
        cache.breakers()
    }

    fn counts_objects(read: &Breaker) -> bool {
        read.rules.iter().any(|rule| rule.guard.budget.is_some())
    }

    fn set_written(status: &mut CircuitBreakerStatus, at: Time) {
        status.last_updated_time = Some(at);
    }

    fn compute(cached: &CachedBreaker, observed: Observed<'_>) -> CircuitBreakerStatus {
        of(cached, observed)
    }

    /// Whether nothing but counts of requests and objects has changed.
    fn differ_in_counts_only(before: &CircuitBreakerStatus, after: &CircuitBreakerStatus) -> bool {
        let without_counts = |status: &CircuitBreakerStatus| {
            let mut status = status.clone();
            for target in &mut status.target_status {
                for one in &mut target.limiting_snapshots {
                    (one.allowed, one.refused) = (None, None);
                }
                refusals::without_counts(&mut target.intercept_snapshots);
            }
            status.shares.iter_mut().for_each(|share| share.objects = 0);
            status
        };
        // A breaker must not open because its budget is that of a smaller share.
        let grows = after.shares.iter().zip(&before.shares).any(|(after, before)| after.objects > before.objects);
        !grows && without_counts(before) == without_counts(after)
    }

    fn events(before: &CircuitBreakerStatus, after: &CircuitBreakerStatus) -> Vec<EventNote> {
        let mut events = transitions(before, after);
        events.extend(refusals::events(&before.target_status, &after.target_status));
        events
    }
}

/// Everything but the time of the write.
fn of(cached: &CachedBreaker, observed: Observed<'_>) -> CircuitBreakerStatus {
    let CachedBreaker { object, read } = cached;
    let nothing = CircuitBreakerStatus::default();
    let before = object.status.as_ref().unwrap_or(&nothing);
    let rules: Vec<_> = read.rules.iter().map(|rule| (&rule.guard, rule.scope)).collect();
    let hash = read.selection.selector.as_ref().map(|_| targets::hash(&(&rules, &read.access)));
    let is_planned = observed.plan.snapshot.breakers.contains(read);
    let targets = observed.targets(&read.selection, is_planned, &before.target_status);
    let status = |target: &Target<'_>| BreakerTargetStatus {
        target: target.status(hash.as_ref()),
        limiting_snapshots: snapshots(target, object, read, observed.now),
        intercept_snapshots: refusals::snapshots(target, object, read),
    };
    let mut target_status: Vec<BreakerTargetStatus> = targets.iter().map(status).collect();
    let open = opened(&target_status);
    let divisions = if is_planned { divisions(read, &targets, observed) } else { read.divisions.clone() };
    let shares = ShareSizes::of(read, &targets, observed);
    let obstacle = targets::obstacle(&read.selection, &targets, observed.plan);
    let programmed = obstacle.or_else(|| shares.obstacle()).or_else(|| undivided(read, &targets, &divisions));
    let programmed = programmed.or_else(|| access::not_intercepted(&read.access, &targets));
    let programmed = programmed.unwrap_or_else(|| targets::acknowledged(&targets, hash.as_ref()));
    let conditions =
        [("Accepted", targets::accepted(&read.selection)), ("Programmed", programmed), ("Open", is_open(&open))];
    let path_not_visible = access::path_not_visible(&read.access).map(|finding| ("PathNotVisible", finding));
    bound(&mut target_status);
    let (generation, known) = (object.metadata.generation, &before.conditions);
    let conditions = conditions.into_iter().chain(path_not_visible);
    let conditions = conditions.map(|(kind, finding)| condition(kind, finding, generation, known, observed.now));
    CircuitBreakerStatus {
        observed_generation: generation,
        last_updated_time: before.last_updated_time.clone(),
        current_spec_hash: hash,
        conditions: conditions.collect(),
        divisions,
        shares: shares.sizes,
        target_status,
    }
}

/// What opened or closed between two statuses, by rule.
fn transitions(before: &CircuitBreakerStatus, after: &CircuitBreakerStatus) -> Vec<EventNote> {
    let (was_open, is_open) = (opened(&before.target_status), opened(&after.target_status));
    let none = Vec::new();
    let mut events = Vec::new();
    // A pod that is gone has closed nothing.
    let is_there = |pod: &String| after.target_status.iter().any(|target| target.target.pod_name.as_ref() == Some(pod));
    let mut compare = |warning, reason: &str, verb: &str, from: &Opened, to: &Opened| {
        for (rule, pods) in to {
            let known = from.get(rule).unwrap_or(&none);
            let new = pods.iter().filter(|pod| !known.contains(pod) && is_there(pod));
            let new: Vec<String> = new.cloned().collect();
            if !new.is_empty() {
                let message = format!("limit {rule:?} {verb} in pod {}", listed(&new, ", "));
                events.push(EventNote { warning, reason: reason.to_owned(), message });
            }
        }
    };
    compare(true, "BreakerOpened", "opened", &was_open, &is_open);
    compare(false, "BreakerClosed", "closed", &is_open, &was_open);
    events
}

/// The pods in which each limit is open.
type Opened = BTreeMap<String, Vec<String>>;

fn opened(targets: &[BreakerTargetStatus]) -> Opened {
    let mut opened = Opened::new();
    for target in targets {
        let open = target.limiting_snapshots.iter().filter(|one| one.state == BreakerState::Opened);
        for one in open {
            let pod = target.target.pod_name.clone().unwrap_or_default();
            opened.entry(one.name.clone()).or_default().push(pod);
        }
    }
    opened
}

/// The state of each limit in a pod.
fn snapshots(target: &Target<'_>, object: &CircuitBreaker, read: &Breaker, now: Timestamp) -> Vec<LimitingSnapshot> {
    let of_rule = |rule: &str| {
        let before = target.before.and_then(|before| before.limiting_snapshots.iter().find(|one| one.name == rule));
        let Some(receipt) = target.receipt else { return before.cloned() };
        let is_its = |one: &&GuardState| one.breaker == read.selection.name && one.rule == rule;
        let state = receipt.guards.iter().filter(|one| one.last_refused.is_empty()).find(is_its);
        state.map_or_else(|| before.cloned(), |state| Some(snapshot(state, before, now)))
    };
    let rules = object.spec.rate_limitings.iter();
    let rules = rules.filter(|rule| !rule.resource_rules.is_empty() || !rule.rest_rules.is_empty());
    rules.filter_map(|rule| of_rule(&rule.name)).collect()
}

fn snapshot(reported: &GuardState, before: Option<&LimitingSnapshot>, now: Timestamp) -> LimitingSnapshot {
    let state = if reported.open { BreakerState::Opened } else { BreakerState::Closed };
    let changed_at = i64::try_from(reported.changed_at).ok().filter(|at| *at > 0);
    let changed_at = changed_at.and_then(|at| Timestamp::from_millisecond(at).ok());
    let before = before.filter(|before| before.state == state);
    let last_transition_time = match (changed_at, before) {
        (Some(at), _) => Some(Time(seconds(at))),
        // Its proxy has started since.
        (None, Some(before)) => before.last_transition_time.clone(),
        (None, None) => reported.open.then(|| Time(seconds(now))),
    };
    let count = |count| Some(i64::try_from(count).unwrap_or(i64::MAX));
    LimitingSnapshot {
        name: reported.rule.clone(),
        state,
        last_transition_time,
        allowed: count(reported.allowed),
        refused: count(reported.refused),
    }
}

/// An object has room for so many.
fn bound(targets: &mut Vec<BreakerTargetStatus>) {
    let is_closed = |one: &LimitingSnapshot| one.state == BreakerState::Closed;
    if targets.len() > MAX_PODS {
        targets.sort_by_key(|target| target.limiting_snapshots.iter().all(is_closed));
        targets.truncate(MAX_PODS);
    }
    let of_each = MAX_SNAPSHOTS / targets.len().max(1);
    for target in targets {
        if target.limiting_snapshots.len() > of_each {
            target.limiting_snapshots.sort_by_key(is_closed);
            target.limiting_snapshots.truncate(of_each);
        }
        target.intercept_snapshots.truncate(of_each / 2);
    }
}

/// Why not every pod that shares a bucket has a part of it; `None` if all have.
fn undivided(read: &Breaker, targets: &[Target<'_>], divisions: &[BucketDivision]) -> Option<Finding> {
    if let Some(message) = crowded(read, divisions) {
        return Some(finding(false, "BurstTooSmall", message));
    }
    let waiting = waiting(read, targets, divisions);
    let message = || format!("pod {} waits until the others enforce a smaller part", listed(&waiting, ", "));
    (!waiting.is_empty()).then(|| finding(false, "Dividing", message()))
}

/// Shared buckets with less than one request for each pod.
fn crowded(read: &Breaker, divisions: &[BucketDivision]) -> Option<String> {
    let most = |scope| {
        let of_scope = divisions.iter().filter(|division| breaker::scope_of(&division.group) == scope);
        of_scope.map(|division| division.parts).max().unwrap_or_default()
    };
    let is_small = |rule: &&Rule| {
        let burst = rule.guard.bucket.map(|bucket| bucket.burst);
        rule.scope != BucketScope::Pod && burst.is_some_and(|burst| burst < most(rule.scope))
    };
    let small = read.rules.iter().find(is_small)?;
    Some(format!(
        "the burst of limit {:?} is less than the {} pods that share it; the last ones have nothing",
        small.guard.rule,
        most(small.scope)
    ))
}

/// Pods that share a bucket and have no part of it yet.
fn waiting(read: &Breaker, targets: &[Target<'_>], divisions: &[BucketDivision]) -> Vec<String> {
    let has_part = |target: &Target<'_>, rule: &Rule| {
        let (operator, shard) =
            (target.policy.and_then(|one| one.operator.as_deref()), target.policy.and_then(|one| one.shard.as_deref()));
        let Some(group) = breaker::group(rule.scope, operator, shard) else { return true };
        let division = divisions.iter().find(|division| division.group == group);
        division.is_some_and(|division| division.pods.iter().any(|pod| pod.uid == target.member.uid))
    };
    let waiting = targets.iter().filter(|target| !read.rules.iter().all(|rule| has_part(target, rule)));
    waiting.map(|target| target.member.name.name.clone()).collect()
}

fn is_open(open: &Opened) -> Finding {
    if open.is_empty() {
        return finding(false, "Closed", "no breaker is open");
    }
    let of_rule = |(rule, pods): (&String, &Vec<String>)| format!("limit {rule:?} in pod {}", listed(pods, ", "));
    let rules: Vec<String> = open.iter().map(of_rule).collect();
    finding(true, "Opened", listed(&rules, "; "))
}

#[cfg(test)]
mod tests;
