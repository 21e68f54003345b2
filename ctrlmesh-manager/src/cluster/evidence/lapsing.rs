//! Knows of which pods the proxy has a policy in force that lapses.
//!
//! A proxy that has such a policy and is sent others later has one of those in force, or still the first. So all that
//! may have been sent since must lapse, too. What a proxy never said it has in force is not known to lapse. Nor does
//! anything end the writes of a pod whose connections pass where no proxy takes them. Only writes of kinds that a
//! policy fences end with it: where a later one fences more, what is known begins anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Mode;

use super::{InForce, Leader, Revocation, remember};
use crate::cluster::plan::Plan;
use crate::rules::compile::CompiledPolicy;
use crate::rules::evidence;
use crate::rules::fenced::lapses;
use crate::rules::object_name::full_name;
use crate::rules::pod::PodName;
use crate::rules::shared::each;

#[derive(Debug, Default)]
pub(super) struct LapsingPods {
    by_uid: BTreeMap<String, Lapsing>,
    /// Of ShardingConfigs, by `NAMESPACE/NAME`.
    generations: BTreeMap<String, (Option<String>, i64)>,
}

/// A pod whose policies lapse, as far as is known.
#[derive(Debug)]
struct Lapsing {
    operator: String,
    /// The last one that may have been sent. None of the others fences fewer kinds.
    last: Arc<CompiledPolicy>,
    /// Oldest first.
    digests: Vec<u64>,
    /// Whether one of them was in force.
    was_in_force: bool,
}

impl LapsingPods {
    /// Takes what pods may be sent now, and what their proxies said. Returns whether there is more to hear from them.
    pub(super) fn update(&mut self, plan: &Plan, receipts: impl FnOnce() -> BTreeMap<PodName, InForce>) -> bool {
        let missed = self.missed_changes(plan);
        if self.by_uid.is_empty() && !each(&plan.snapshot.configs).any(lapses) {
            return false;
        }
        let members: BTreeSet<&str> = plan.snapshot.members.iter().map(|pod| pod.uid.as_str()).collect();
        self.by_uid.retain(|uid, pod| members.contains(uid.as_str()) && !missed.contains(&pod.operator));
        for pod in &plan.snapshot.members {
            // A pod without a policy keeps the one that it has.
            let Some(policy) = plan.sendable().get(&pod.name) else { continue };
            // Under that of a shadow, nothing is stored either.
            let fence = policy.policy.fence.as_ref().filter(|_| policy.policy.mode == Mode::Enforce);
            let lapses = !policy.policy.fail_open && fence.is_some_and(|fence| fence.lapses);
            let Some(operator) = policy.operator.as_ref().filter(|_| lapses) else {
                self.by_uid.remove(&pod.uid);
                continue;
            };
            let of_pod = self.by_uid.entry(pod.uid.clone());
            let of_pod = of_pod.or_insert_with(|| Lapsing::new(operator.clone(), policy));
            if of_pod.operator != *operator || !of_pod.fences_all_of(policy) {
                *of_pod = Lapsing::new(operator.clone(), policy);
            }
            of_pod.last = Arc::clone(policy);
            remember(&mut of_pod.digests, policy.digest());
        }
        let is_open = |pod: &Lapsing| !pod.was_in_force;
        if self.by_uid.values().any(is_open) {
            for receipt in receipts().values() {
                if let Some(pod) = self.by_uid.get_mut(&receipt.uid) {
                    pod.was_in_force |= pod.digests.contains(&receipt.digest);
                }
            }
        }
        self.by_uid.values().any(is_open)
    }

    /// Whether whatever the pod's proxy has in force lapses.
    pub(super) fn has(&self, uid: &str) -> bool {
        self.by_uid.get(uid).is_some_and(|pod| pod.was_in_force)
    }

    /// By UID, when the pods of `table` lapse unless they are confirmed, of those that do.
    pub(super) fn times(
        &self,
        table: &Ownership,
        Revocation { since, version, .. }: Revocation,
        leader: Leader<'_>,
        now: Instant,
    ) -> BTreeMap<String, Instant> {
        let since = since.max(leader.since);
        let lapsing = evidence::uids(table).filter(|uid| self.has(uid) && version > 0);
        lapsing.map(|uid| (uid.clone(), leader.confirmations.lapse(uid, version, since, now))).collect()
    }

    /// ShardingConfigs that changed twice since the last time: what followed from the first change was not seen.
    /// Nothing follows from a change before it is written into the status.
    fn missed_changes(&mut self, plan: &Plan) -> BTreeSet<String> {
        let configs = plan.snapshot.configs.iter().filter(|config| config.spec.root.is_some());
        let now = configs.map(|root| {
            let (name, meta) = (full_name(&root.metadata), &root.metadata);
            let is_written = plan.compiled.operators.get(&name).is_none_or(|record| record.written);
            let former = self.generations.get(&name).filter(|(uid, _)| !is_written && *uid == meta.uid);
            let seen = former.cloned().unwrap_or_else(|| (meta.uid.clone(), meta.generation.unwrap_or_default()));
            (name, seen)
        });
        let now = now.collect();
        let before = std::mem::replace(&mut self.generations, now);
        let is_next = |(name, (uid, generation)): (&String, &(Option<String>, i64))| {
            let seen = self.generations.get(name);
            seen.is_some_and(|(one, now)| one == uid && *now <= generation + 1)
        };
        before.iter().filter(|root| !is_next(*root)).map(|(name, _)| name.clone()).collect()
    }
}

impl Lapsing {
    fn new(operator: String, policy: &Arc<CompiledPolicy>) -> Self {
        Self { operator, last: Arc::clone(policy), digests: Vec::new(), was_in_force: false }
    }

    /// Whether each kind that `next` fences was fenced before.
    fn fences_all_of(&self, next: &Arc<CompiledPolicy>) -> bool {
        if Arc::ptr_eq(&self.last, next) {
            return true;
        }
        let (before, after) = (&self.last.policy, &next.policy);
        let (Some(fence), Some(later)) = (&before.fence, &after.fence) else { return false };
        fence.covers_kinds_of(later) && before.member_division() == after.member_division()
    }
}
