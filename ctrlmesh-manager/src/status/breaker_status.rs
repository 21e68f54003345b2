//! Computes the status of a CircuitBreaker from what the proxies report.
//!
//! What is not known stays as it is: a new leader has not heard from every proxy yet.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{
    BreakerState, BreakerTargetStatus, BucketDivision, BucketScope, CircuitBreaker, CircuitBreakerStatus,
    LimitingSnapshot, TargetStatus,
};
use ctrlmesh_common::wire::{self, GuardState};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::cluster::cache::CachedBreaker;
use crate::cluster::plan::Plan;
use crate::push::policy_store::Receipt;
use crate::rules::breaker::{self, Breaker, Rule};
use crate::rules::compile::CompiledPolicy;
use crate::rules::pod::{Member, PodName};
use crate::status::cluster_writer::EventNote;
use crate::status::finding::{Finding, condition, finding, listed, seconds};

mod division;

use division::divisions;

/// Pods in one status.
const MAX_PODS: usize = 200;

/// States of limits in one status, over all of its pods.
const MAX_SNAPSHOTS: usize = 2000;

/// The newest receipt of each pod's proxy.
pub(super) type ReceiptsByPod = BTreeMap<PodName, Receipt>;

/// A selected pod.
struct Target<'a> {
    member: &'a Member,
    policy: Option<&'a CompiledPolicy>,
    receipt: Option<&'a Receipt>,
    /// What the status said before.
    before: Option<&'a BreakerTargetStatus>,
    /// Whether its proxy has the policy that the plan gives it.
    acknowledged: bool,
}

/// What a status depends on besides its CircuitBreaker.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observed<'a> {
    pub(super) plan: &'a Plan,
    pub(super) receipts: &'a ReceiptsByPod,
    /// Whether this replica became leader so recently that its watches may lag behind.
    pub(super) new_leader: bool,
    pub(super) now: Timestamp,
}

/// Everything but the time of the write.
pub(super) fn of(cached: &CachedBreaker, observed: Observed<'_>) -> CircuitBreakerStatus {
    let CachedBreaker { object, read } = cached;
    let nothing = CircuitBreakerStatus::default();
    let before = object.status.as_ref().unwrap_or(&nothing);
    let hash = read.selector.as_ref().map(|_| hash(read));
    // The plan may be older than what was written since.
    let is_planned = observed.plan.snapshot.breakers.contains(read);
    let targets = targets(read, before, observed, is_planned);
    let is_current = |target: &Target<'_>| hash.is_some() && target.config_hash(hash.as_ref()) == hash;
    let current = targets.iter().filter(|target| is_current(target)).count();
    let mut target_status: Vec<BreakerTargetStatus> =
        targets.iter().map(|target| target.status(object, read, hash.as_ref(), observed.now)).collect();
    let open = opened(&target_status);
    let divisions = if is_planned { divisions(read, &targets, observed) } else { read.divisions.clone() };
    let conditions = [
        ("Accepted", accepted(read)),
        ("Programmed", programmed(read, &targets, current, &divisions, observed.plan)),
        ("Open", is_open(&open)),
    ];
    bound(&mut target_status);
    let (generation, known) = (object.metadata.generation, &before.conditions);
    let conditions = conditions.map(|(kind, finding)| condition(kind, finding, generation, known, observed.now));
    CircuitBreakerStatus {
        observed_generation: generation,
        last_updated_time: before.last_updated_time.clone(),
        current_spec_hash: hash,
        conditions: conditions.into(),
        divisions,
        target_status,
    }
}

/// Whether nothing but counts of requests has changed.
pub(super) fn differ_in_counts_only(before: &CircuitBreakerStatus, after: &CircuitBreakerStatus) -> bool {
    let without_counts = |status: &CircuitBreakerStatus| {
        let mut status = status.clone();
        for one in status.target_status.iter_mut().flat_map(|target| &mut target.limiting_snapshots) {
            (one.allowed, one.refused) = (None, None);
        }
        status
    };
    without_counts(before) == without_counts(after)
}

/// What opened or closed between two statuses, by rule.
pub(super) fn transitions(before: &CircuitBreakerStatus, after: &CircuitBreakerStatus) -> Vec<EventNote> {
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

/// A hash of what the proxies are to have.
fn hash(read: &Breaker) -> String {
    // Strings and numbers always serialise.
    let guards: Vec<_> = read.rules.iter().map(|rule| (&rule.guard, rule.scope)).collect();
    let guards = serde_json::to_vec(&guards).unwrap_or_default();
    format!("{:016x}", wire::digest(&guards))
}

/// The selected pods, by name.
fn targets<'a>(
    read: &Breaker,
    before: &'a CircuitBreakerStatus,
    observed: Observed<'a>,
    is_planned: bool,
) -> Vec<Target<'a>> {
    let Some(selector) = &read.selector else { return Vec::new() };
    let is_near = |member: &&Member| member.name.namespace == read.namespace && member.enrolled() && !member.ended;
    let selected =
        observed.plan.snapshot.members.iter().filter(is_near).filter(|member| selector.matches(&member.labels));
    let target = |member: &'a Member| {
        let policy = observed.plan.sendable().get(&member.name).map(|policy| &**policy);
        // Another pod may have had the name.
        let is_its = |one: &&BreakerTargetStatus| {
            one.target.pod_name.as_ref() == Some(&member.name.name) && one.target.pod_ip == member.ip
        };
        let before = before.target_status.iter().find(is_its);
        let acknowledged = is_planned && observed.acknowledged(member);
        Target { member, policy, receipt: observed.receipt(member), before, acknowledged }
    };
    selected.map(target).collect()
}

impl<'a> Observed<'a> {
    fn receipt(&self, member: &Member) -> Option<&'a Receipt> {
        self.receipts.get(&member.name).filter(|receipt| receipt.uid == member.uid)
    }

    /// Whether the pod's proxy has the policy that the plan gives it.
    fn acknowledged(&self, member: &Member) -> bool {
        let policy = self.plan.sendable().get(&member.name);
        policy.zip(self.receipt(member)).is_some_and(|(policy, receipt)| receipt.digest == policy.digest())
    }
}

impl Target<'_> {
    /// Of the spec that its proxy has.
    fn config_hash(&self, current: Option<&String>) -> Option<String> {
        if self.acknowledged {
            return current.cloned();
        }
        self.before.and_then(|before| before.target.config_hash.clone())
    }

    fn status(
        &self,
        object: &CircuitBreaker,
        read: &Breaker,
        current: Option<&String>,
        now: Timestamp,
    ) -> BreakerTargetStatus {
        let refused = self.receipt.and_then(|receipt| receipt.refused.as_ref());
        let target = TargetStatus {
            pod_name: Some(self.member.name.name.clone()),
            pod_ip: self.member.ip.clone(),
            config_hash: self.config_hash(current),
            message: refused.map(|reason| format!("its proxy refuses its policy: {reason}")),
        };
        let rules = object.spec.rate_limitings.iter().filter(|rule| !rule.resource_rules.is_empty());
        let limiting_snapshots = rules.filter_map(|rule| self.snapshot(read, &rule.name, now)).collect();
        BreakerTargetStatus { target, limiting_snapshots }
    }

    fn snapshot(&self, read: &Breaker, rule: &str, now: Timestamp) -> Option<LimitingSnapshot> {
        let before = self.before.and_then(|before| before.limiting_snapshots.iter().find(|one| one.name == rule));
        let Some(receipt) = self.receipt else { return before.cloned() };
        let state = receipt.guards.iter().find(|one| one.breaker == read.name && one.rule == rule);
        state.map_or_else(|| before.cloned(), |state| Some(snapshot(state, before, now)))
    }
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
    }
}

fn accepted(read: &Breaker) -> Finding {
    match (&read.selector, read.errors.as_slice()) {
        (Some(_), _) => finding(true, "Valid", "it is valid and complete"),
        (None, []) => finding(true, "Disabled", "it is switched off, and limits nothing"),
        (None, errors) => finding(false, "Invalid", listed(errors, "; ")),
    }
}

fn programmed(
    read: &Breaker,
    targets: &[Target<'_>],
    current: usize,
    divisions: &[BucketDivision],
    plan: &Plan,
) -> Finding {
    if read.selector.is_none() {
        let (reason, message) = if read.errors.is_empty() {
            ("Disabled", "it is switched off, and limits nothing")
        } else {
            ("Invalid", "it limits nothing until it is valid")
        };
        return finding(false, reason, message);
    }
    let object = format!("CircuitBreaker {}", read.name);
    if let Some(trouble) = plan.compiled.troubles.iter().find(|trouble| trouble.object == object) {
        return finding(false, "NoRoom", &*trouble.message);
    }
    let refused = targets.iter().filter(|target| target.receipt.is_some_and(|receipt| receipt.refused.is_some()));
    let refused: Vec<String> = refused.map(|target| target.member.name.name.clone()).collect();
    if !refused.is_empty() {
        let message = format!("the proxy refuses its policy in pod {}", listed(&refused, ", "));
        return finding(false, "PolicyRefused", message);
    }
    if let Some(message) = crowded(read, divisions) {
        return finding(false, "BurstTooSmall", message);
    }
    let all = targets.len();
    let waiting = waiting(read, targets, divisions);
    match current {
        _ if all == 0 => finding(false, "NoPods", "its selector selects no enrolled pod of its namespace"),
        _ if !waiting.is_empty() => {
            let message = format!("pod {} waits until the others enforce a smaller part", listed(&waiting, ", "));
            finding(false, "Dividing", message)
        }
        some if some == all => finding(true, "Acknowledged", format!("every proxy, {all} of {all}, enforces it")),
        some => finding(false, "Waiting", format!("{some} of {all} proxies enforce it")),
    }
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
