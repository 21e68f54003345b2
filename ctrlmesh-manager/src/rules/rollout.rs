//! What a root's rollout goes by: its pods, what their readiness gates should say, and which of them are in the way.
//!
//! Pure.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{RolloutStatus, Root, ShardingConfig, TrialPhase};
use ctrlmesh_common::names::annotation;
use ctrlmesh_common::ownership::{Ownership, STANDBY};
use ctrlmesh_common::rollout::PodFacts;
use ctrlmesh_common::slots::SlotSet;

use crate::rules::fenced::is_fenced;
use crate::rules::object_name::{full_name, namespace};
use crate::rules::pod::{DeletionCost, Gate, Member};
use crate::rules::shard::{Share, Slice, Versions, has_second_name};
use crate::rules::shared::{Shared, each};

/// How old a pod is, in seconds, of which it is known what its StatefulSet makes of it, and whether it owns anything.
const SETTLED_AFTER: i64 = 30;

/// What is to be written into the status of a root, by `NAMESPACE/NAME`.
pub type Decisions = BTreeMap<String, Decision>;

/// The next status of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What it follows.
    pub base: Option<RolloutStatus>,
    pub next: RolloutStatus,
}

/// What the readiness gate of a pod should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedGate {
    pub holds: bool,
    /// One word.
    pub reason: &'static str,
    pub message: String,
}

/// What a version owns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owned {
    pub slots: SlotSet,
    pub namespaces: BTreeSet<String>,
    /// Whether something is on its way.
    pub moves: bool,
}

/// A root with the pods of its workload.
#[derive(Clone, Debug)]
pub struct Workload<'a> {
    pub root: &'a ShardingConfig,
    pub rule: &'a Root,
    /// Enrolled pods that have not ended.
    pub pods: Vec<&'a Member>,
    versions: Versions<'a>,
}

/// Whether pods of its Deployment can own nothing for long.
fn marks_idle(root: &ShardingConfig, rule: &Root) -> bool {
    let is_active = is_fenced(rule) && root.metadata.deletion_timestamp.is_none();
    is_active && rule.target_deployment.is_some() && (rule.is_elastic() || root.spec.controller.is_none())
}

/// Whether the pod has a gate, or a mark of ours.
fn is_touched(pod: &Member) -> bool {
    pod.gate.is_some() || pod.deletion_cost == DeletionCost::DeletedFirst
}

/// The roots that have a rollout, or pods that can own nothing or have our gate or mark, each with the pods of its
/// workload. `members` are the enrolled pods.
pub fn workloads<'a>(configs: &'a [Shared<ShardingConfig>], members: &'a [Shared<Member>]) -> Vec<Workload<'a>> {
    let is_followed = |config: &ShardingConfig| {
        config.spec.root.as_ref().is_some_and(|rule| rule.rollout.is_some() || marks_idle(config, rule))
    };
    if !each(configs).any(is_followed) && !each(members).any(is_touched) {
        return Vec::new();
    }
    let mut by_namespace: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for pod in members.iter().filter(|pod| pod.enrolled() && !pod.ended) {
        by_namespace.entry(&pod.name.namespace).or_default().push(pod);
    }
    let workload = |root: &'a ShardingConfig| {
        let rule = root.spec.root.as_ref()?;
        let near = by_namespace.get(namespace(&root.metadata)).map_or(&[][..], Vec::as_slice);
        if rule.rollout.is_none() && !marks_idle(root, rule) && !near.iter().any(|pod| is_touched(pod)) {
            return None;
        }
        let pods = near.iter().copied().filter(|pod| pod.is_of_target(rule)).collect();
        Some(Workload { root, rule, pods, versions: Versions::of(root) })
    };
    each(configs).filter_map(workload).collect()
}

impl<'a> Workload<'a> {
    /// Whether new versions are tried now.
    pub fn has_rollout(&self) -> bool {
        self.rule.rollout.is_some() && is_fenced(self.rule) && self.root.metadata.deletion_timestamp.is_none()
    }

    /// Whether the next version takes over everything.
    pub fn is_promoting(&self) -> bool {
        self.versions.is_promoting()
    }

    /// `NAMESPACE/NAME` of the root.
    pub fn name(&self) -> String {
        full_name(&self.root.metadata)
    }

    pub fn status(&self) -> Option<&'a RolloutStatus> {
        self.root.status.as_ref()?.rollout.as_ref()
    }

    pub fn table(&self) -> Option<&'a Ownership> {
        self.root.status.as_ref()?.ownership.as_ref()
    }

    /// What the version on trial owns.
    pub fn owned_on_trial(&self) -> Owned {
        let Some(table) = self.table() else { return Owned::default() };
        let is_its = |owner: &String| has_second_name(owner) != self.versions.promoted_is_second();
        let slots = table.slots.iter().filter(|(_, owner)| is_its(owner)).map(|(slot, _)| *slot);
        let namespaces = table.namespaces.iter().filter(|(_, owner)| is_its(owner)).map(|(name, _)| name.clone());
        Owned { slots: slots.collect(), namespaces: namespaces.collect(), moves: table.revoked.is_some() }
    }

    /// What the version on trial reads, where its writes are dry runs.
    pub fn shadowed(&self) -> Option<Slice> {
        self.versions.shadowed()
    }

    /// What somebody wants done.
    pub fn command(&self) -> Option<&'a str> {
        self.root.metadata.annotations.as_ref()?.get(annotation::ROLLOUT).map(String::as_str)
    }

    /// Whether the pod is of the version that is promoted.
    pub fn is_promoted(&self, pod: &Member) -> bool {
        self.status().is_some_and(|status| pod.revision_of(self.rule) == Some(&status.promoted))
    }

    /// Whether it is of the version that is tried.
    pub fn is_on_trial(&self, pod: &Member) -> bool {
        self.versions.trial().is_some_and(|trial| pod.revision_of(self.rule) == Some(&trial.revision))
    }

    pub fn facts(&self) -> Vec<PodFacts> {
        let facts = |pod: &&Member| {
            Some(PodFacts {
                revision: pod.revision_of(self.rule)?.to_owned(),
                created_at: pod.created_at.unwrap_or_default(),
                terminating: pod.terminating,
                stopped: pod.stopped,
                ready: pod.ready,
                restarts: pod.restarts,
            })
        };
        self.pods.iter().filter_map(facts).collect()
    }

    /// Pods that a Deployment should delete before others: those that own nothing of an elastic root, those that stand
    /// by, and while the next version takes over, those whose shards own nothing any more.
    ///
    /// `now` is in seconds since 1970.
    pub fn deleted_first(&self, now: i64) -> BTreeSet<&'a str> {
        let is_promoting = self.versions.is_promoting();
        let table = self.table().filter(|_| is_promoting || marks_idle(self.root, self.rule));
        let Some(table) = table else { return BTreeSet::new() };
        let owners = owners(table);
        let may_be_marked = |pod: &Member, owner: &String| {
            if is_promoting {
                self.is_promoted(pod)
            } else {
                // One that has just come owns something in a moment.
                (self.rule.is_elastic() || owner == STANDBY) && has_settled(pod, now)
            }
        };
        let is_idle = |pod: &&&Member| {
            let owner = table.pod_uids.get(&pod.uid);
            owner.is_some_and(|owner| !owners.contains(owner) && may_be_marked(pod, owner))
        };
        let staying = self.pods.iter().filter(|pod| !pod.terminating);
        staying.filter(is_idle).map(|pod| pod.uid.as_str()).collect()
    }

    /// Whether all of them are marked for that.
    pub fn are_marked(&self, deleted_first: &BTreeSet<&str>) -> bool {
        let is_unmarked = |pod: &&&Member| pod.deletion_cost == DeletionCost::None;
        let mut unmarked = self.pods.iter().filter(is_unmarked);
        self.rule.target_deployment.is_none() || !unmarked.any(|pod| deleted_first.contains(pod.uid.as_str()))
    }

    /// What the gate of `pod` should say; `None`: it is not known yet. `shares` are those of the root's division, and
    /// `are_marked` is what [`Self::are_marked`] says.
    pub fn gate(&self, pod: &Member, shares: &[Share], are_marked: bool) -> Option<WantedGate> {
        let gate = |holds, reason, message: String| Some(WantedGate { holds, reason, message });
        if !self.has_rollout() {
            return gate(true, "NoRollout", "its root tries no new versions".to_owned());
        }
        let status = self.status()?;
        if self.is_promoted(pod) {
            return gate(true, "Promoted", "its version is promoted".to_owned());
        }
        let Some(trial) = self.versions.trial().filter(|_| self.is_on_trial(pod)) else {
            return gate(
                false,
                "NotTried",
                format!("revision {} is promoted, and this one is not tried", status.promoted),
            );
        };
        let (reason, message) = match trial.phase {
            TrialPhase::Promoting => return self.gate_of_promotion(pod, shares, are_marked),
            TrialPhase::Starting => ("Starting", "its containers are not ready yet".to_owned()),
            TrialPhase::Analysing => ("Analysing", format!("step {} of its trial", trial.step)),
            TrialPhase::Waiting => {
                ("Waiting", format!("step {} of its trial passed, and waits for somebody", trial.step))
            }
            TrialPhase::Held | TrialPhase::RollingBack => ("Failed", trial.message.clone()),
        };
        gate(false, reason, message)
    }

    /// A pod that takes over holds its workload up until all that is its own has come, and until the pods that it
    /// replaces are marked.
    fn gate_of_promotion(&self, pod: &Member, shares: &[Share], are_marked: bool) -> Option<WantedGate> {
        let gate = |holds, reason, message: &str| Some(WantedGate { holds, reason, message: message.to_owned() });
        let table = self.table()?;
        // One that stands by waits for the pod of its shard that works.
        let standing_by = table.pod_uids.get(&pod.uid).filter(|owner| *owner == STANDBY);
        let own = match standing_by {
            Some(_) => table.pods.get(&pod.name.name)?,
            None => table.pod_uids.get(&pod.uid)?,
        };
        let share = shares.iter().find(|share| share.name == *own)?;
        let has = |owner: Option<&String>| owner == Some(own);
        let is_elastic = self.rule.is_elastic() && !share.canary;
        let is_in = pod.gate.as_ref().is_some_and(|gate| gate.holds == Some(true));
        let has_slots = if is_elastic {
            // What it has changes with each pod that comes or goes.
            is_in || has_part(table, own, shares)
        } else {
            share.slots.iter().all(|slot| has(table.slots.get(&slot)))
        };
        let has_all = has_slots && share.namespaces.iter().all(|namespace| has(table.namespaces.get(namespace)));
        if !pod.ready || !has_all || !are_marked {
            return gate(false, "TakingOver", "it takes over its share");
        }
        gate(true, "TookOver", "it owns its share")
    }

    /// Pods that a StatefulSet leaves alone because they never become Ready, though their template is not its own any
    /// more. `update_revision` is that of its template, if it is known, and `now` is in seconds since 1970.
    pub fn stuck(&self, update_revision: Option<&str>, now: i64) -> Vec<&'a Member> {
        let Some(update_revision) = update_revision.filter(|_| self.rule.target_stateful_set.is_some()) else {
            return Vec::new();
        };
        // Of a pod that has just come, the StatefulSet may say more in a moment.
        let is_held =
            |pod: &Member| has_settled(pod, now) && pod.gate.as_ref().is_some_and(|gate| gate.holds == Some(false));
        let is_other = |pod: &Member| pod.revision_of(self.rule).is_some_and(|revision| revision != update_revision);
        let stuck = |pod: &&Member| is_held(pod) && is_other(pod) && !self.is_promoted(pod) && !pod.terminating;
        self.pods.iter().copied().filter(stuck).collect()
    }
}

/// Whether the pod was not made only just.
fn has_settled(pod: &Member, now: i64) -> bool {
    pod.created_at.is_some_and(|at| now.saturating_sub(at) >= SETTLED_AFTER)
}

/// Whether the pod's gate says something else, or nothing.
pub fn differs(gate: &Gate, wanted: &WantedGate) -> bool {
    gate.holds != Some(wanted.holds) || gate.message != wanted.message
}

/// Whether a shard of an elastic root has as many slots as every other one that follows its pods, or one less.
fn has_part(table: &Ownership, shard: &str, shares: &[Share]) -> bool {
    let count = |name: &str| table.slots.values().filter(|owner| *owner == name).count();
    let others = shares.iter().filter(|share| !share.canary).map(|share| count(&share.name));
    others.max().is_none_or(|most| count(shard) + 1 >= most)
}

/// The shards that have anything, or had it until it was taken away.
fn owners(table: &Ownership) -> BTreeSet<&String> {
    let revoked = table.revoked.iter();
    let revoked = revoked.flat_map(|revoked| revoked.slots.values().chain(revoked.namespaces.values()));
    table.slots.values().chain(table.namespaces.values()).chain(revoked).collect()
}

#[cfg(test)]
mod tests;
