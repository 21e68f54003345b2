//! Divides shared buckets among pods, so that all parts together are never more than the bucket.
//!
//! A pod that comes waits until all others enforce a smaller part. A pod keeps its part until it is gone, or until its
//! proxy has acknowledged a policy without it.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{BucketDivision, BucketScope, DivisionPod};
use jiff::{SignedDuration, Timestamp};

use super::Target;
use crate::rules::breaker::{self, Breaker};
use crate::status::targets::Observed;

/// For how long room is kept for a pod that waits.
const RESERVED: SignedDuration = SignedDuration::from_secs(30);

/// A pod that shares a bucket, or has a part of it still.
#[derive(Clone, Debug)]
struct Sharer {
    pod: DivisionPod,
    /// Whether its proxy enforces the policy that follows from the written division.
    acknowledged: bool,
    /// Whether it may have a part.
    is_member: bool,
}

/// The next division of each group of pods that share a bucket.
pub(super) fn divisions(read: &Breaker, targets: &[Target<'_>], observed: Observed<'_>) -> Vec<BucketDivision> {
    let is_used = |scope: &BucketScope| read.rules.iter().any(|rule| rule.scope == *scope);
    let scopes: Vec<BucketScope> = [BucketScope::Operator, BucketScope::Shard].into_iter().filter(is_used).collect();
    let mut groups: BTreeMap<String, Vec<Sharer>> = BTreeMap::new();
    for target in targets {
        let Some(policy) = target.policy else { continue };
        let (operator, shard) = (policy.operator.as_deref(), policy.shard.as_deref());
        for group in scopes.iter().filter_map(|scope| breaker::group(*scope, operator, shard)) {
            let member = target.member;
            let pod = DivisionPod { name: member.name.name.clone(), uid: member.uid.clone() };
            let sharer = Sharer { pod, acknowledged: target.acknowledged, is_member: true };
            groups.entry(group).or_default().push(sharer);
        }
    }
    for before in &read.divisions {
        let sharers = groups.entry(before.group.clone()).or_default();
        let members: BTreeSet<String> = sharers.iter().map(|sharer| sharer.pod.uid.clone()).collect();
        let others = before.pods.iter().filter(|pod| !members.contains(&pod.uid));
        sharers.extend(others.filter_map(|pod| holder(read, pod, observed)));
    }
    let divide = |(group, sharers): (String, Vec<Sharer>)| {
        let before = read.divisions.iter().find(|one| one.group == group);
        next(&group, before, &sharers, observed.now)
    };
    groups.into_iter().filter_map(divide).collect()
}

/// A pod that shares the bucket no more; none if it is gone.
fn holder(read: &Breaker, pod: &DivisionPod, observed: Observed<'_>) -> Option<Sharer> {
    let mut members = observed.plan.snapshot.members.iter();
    let member = members.find(|member| member.uid == pod.uid && member.name.namespace == read.selection.namespace);
    // The watch of a new leader may not show it yet.
    let acknowledged = member.is_some_and(|member| observed.acknowledged(member));
    let is_gone = member.map_or(!observed.new_leader, |member| member.ended);
    (!is_gone).then(|| Sharer { pod: pod.clone(), acknowledged, is_member: false })
}

/// At most as many parts as pods have at any moment: a part grows only when a pod with one is gone, and a pod gets one
/// only when all others enforce the smaller ones. None once nobody shares the bucket.
fn next(group: &str, before: Option<&BucketDivision>, sharers: &[Sharer], now: Timestamp) -> Option<BucketDivision> {
    let find = |uid: &str| sharers.iter().find(|sharer| sharer.pod.uid == uid);
    let known = before.into_iter().flat_map(|before| &before.pods);
    let stays = |pod: &&DivisionPod| find(&pod.uid).is_some_and(|one| one.is_member || !one.acknowledged);
    let mut pods: Vec<DivisionPod> = known.filter(stays).cloned().collect();
    let waits = |one: &&Sharer| one.is_member && pods.iter().all(|pod| pod.uid != one.pod.uid);
    let waiting: Vec<&Sharer> = sharers.iter().filter(waits).collect();
    // One without a proxy would hold the others up.
    let new = waiting.iter().filter(|one| one.acknowledged).map(|one| one.pod.clone());
    let new: Vec<DivisionPod> = new.collect();
    let parts = u32::try_from(pods.len() + new.len()).unwrap_or(u32::MAX).max(1);
    let reserved =
        before.filter(|before| !waiting.is_empty() && is_young(before, now)).map_or(0, |before| before.parts);
    let parts = parts.max(reserved);
    let is_enforced = pods.iter().all(|pod| find(&pod.uid).is_some_and(|one| one.acknowledged));
    let has_room = before.is_none_or(|before| pods.is_empty() || before.parts >= parts);
    if is_enforced && has_room {
        pods.extend(new);
    }
    if pods.is_empty() && !sharers.iter().any(|one| one.is_member) {
        return None;
    }
    let generation = before.map_or(0, |before| before.generation);
    let unchanged = before.filter(|before| (before.parts, &before.pods) == (parts, &pods)).cloned();
    let changed = || BucketDivision {
        group: group.to_owned(),
        generation: now.as_millisecond().max(generation + 1),
        parts,
        pods,
    };
    Some(unchanged.unwrap_or_else(changed))
}

/// A pod that waits has to acknowledge each division anew. It may take longer than the leader's next look.
fn is_young(division: &BucketDivision, now: Timestamp) -> bool {
    i128::from(now.as_millisecond().saturating_sub(division.generation)) < RESERVED.as_millis()
}

#[cfg(test)]
mod tests;
