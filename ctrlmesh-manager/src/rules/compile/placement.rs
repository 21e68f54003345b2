//! Assigns the pods of a root's workload to its shards.
//!
//! An active root assigns a StatefulSet's pods by ordinal, and a Deployment's pods by a record. Under an
//! inactive root (switched off or invalid), each pod keeps its recorded shard, and a pod without one gets an
//! existing shard.
//!
//! The pods of each version are assigned to that version's shards, as if there were no others.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::{Ownership, STANDBY};

use super::World;
use crate::rules::object_name::namespace;
use crate::rules::pod::Member;
use crate::rules::shard::{self, Moves, PodRecord, Share, Versions};
use crate::rules::shared::{Shared, each};

#[derive(Clone, Debug)]
pub(super) struct Placement<'a> {
    root: &'a ShardingConfig,
    rule: &'a Root,
    shares: Vec<Share>,
    versions: Versions<'a>,
    /// Whether the root makes no shards now.
    inactive: bool,
    first_ordinal: u32,
    pods: BTreeMap<String, String>,
    /// Pods that are not being deleted.
    staying: BTreeMap<String, String>,
}

impl<'a> Placement<'a> {
    /// `candidates` are the enrolled pods of the root's namespace.
    pub(super) fn of_active_root(
        root: &'a ShardingConfig,
        rule: &'a Root,
        shares: Vec<Share>,
        candidates: &[&Member],
        world: World<'_>,
    ) -> Self {
        Self::new(root, rule, shares, false, candidates, world)
    }

    /// `children` are the shards that the root made earlier.
    pub(super) fn of_inactive_root(
        root: &'a ShardingConfig,
        rule: &'a Root,
        children: &[&ShardingConfig],
        candidates: &[&Member],
        world: World<'_>,
    ) -> Self {
        Self::new(root, rule, shard::existing_shares(rule, children), true, candidates, world)
    }

    fn new(
        root: &'a ShardingConfig,
        rule: &'a Root,
        shares: Vec<Share>,
        inactive: bool,
        candidates: &[&Member],
        world: World<'_>,
    ) -> Self {
        let set = rule.target_stateful_set.as_deref().unwrap_or_default();
        let set = format!("{}/{set}", namespace(&root.metadata));
        let first_ordinal = world.first_ordinals.get(&set).copied().unwrap_or_default();
        let (pods, staying) = (BTreeMap::new(), BTreeMap::new());
        let versions = Versions::of(root);
        let mut this = Self { root, rule, shares, versions, inactive, first_ordinal, pods, staying };
        let main = this.shares_of(versions.promoted_is_second());
        let moves = if inactive { Moves::None } else { moves(rule, &main, candidates) };
        for second in [false, true] {
            let is_of = |pod: &&&Member| this.is_second(pod) == second;
            let records = this.records(candidates.iter().filter(is_of).copied());
            this.pods.extend(shard::assign(&this.shares_of(second), &records, moves));
        }
        let by_stateful_set = candidates.iter().filter_map(|pod| {
            let share = this.by_stateful_set(pod)?;
            Some((pod.name.name.clone(), share.name))
        });
        let by_stateful_set: Vec<_> = by_stateful_set.collect();
        this.pods.extend(by_stateful_set);
        let staying = candidates.iter().filter(|pod| !pod.terminating);
        let staying = staying
            .filter_map(|pod| this.pods.get_key_value(&pod.name.name).map(|(pod, shard)| (pod.clone(), shard.clone())));
        this.staying = staying.collect();
        this
    }

    /// Shard by pod.
    pub(super) fn pods(&self) -> &BTreeMap<String, String> {
        &self.pods
    }

    /// Shards without a pod that stays.
    pub(super) fn unserved(&self) -> Vec<String> {
        shard::unserved(&self.shares, &self.staying).map(str::to_owned).collect()
    }

    /// The shard for a pod that is being admitted, and may have no name yet.
    pub(super) fn shard_for(&self, pod: &Member, members: &[Shared<Member>]) -> Option<String> {
        let share = self.by_stateful_set(pod).or_else(|| {
            let (revision, second) = (revision(self.rule, pod)?, self.is_second(pod));
            let shares = self.shares_of(second);
            let recorded = shares.iter().find(|share| pod.labelled_shard() == Some(&share.name));
            let candidates = each(members).filter(|pod| self.is_candidate(pod) && self.is_second(pod) == second);
            let records = || shard::as_assigned(&shares, self.records(candidates));
            recorded.or_else(|| shard::choose(&shares, &records(), revision)).cloned()
        });
        share.map(|share| share.name)
    }

    /// Whether the pod's version has the shards with the second names.
    fn is_second(&self, pod: &Member) -> bool {
        // An inactive root holds no version back: there is one.
        let revision = pod.revision_of(self.rule).filter(|_| !self.inactive);
        self.versions.is_second(revision)
    }

    fn shares_of(&self, second: bool) -> Vec<Share> {
        self.shares.iter().filter(|share| share.second == second).cloned().collect()
    }

    /// For a pod of the root's StatefulSet. A pod below the first ordinal is about to be deleted, and keeps
    /// its shard.
    fn by_stateful_set(&self, pod: &Member) -> Option<Share> {
        let ordinal = pod.ordinal_in(self.rule.target_stateful_set.as_deref()?)?;
        let shares = self.shares_of(self.is_second(pod));
        let named = |name: Option<&str>| name.and_then(|name| shares.iter().find(|share| share.name == name));
        let before = || {
            let written = written(self.root).and_then(|written| written.shard_of(&pod.name.name));
            named(written).or_else(|| named(pod.labelled_shard()))
        };
        let number = ordinal.checked_sub(self.first_ordinal);
        if let Some(share) = before().filter(|_| self.inactive || number.is_none()) {
            return Some(share.clone());
        }
        match number {
            Some(number) => shard::by_ordinal(&shares, number).cloned(),
            None => shares.iter().find(|share| !share.canary).cloned(),
        }
    }

    /// Pods of the root's Deployment. The root's status has precedence over the pod's label. Ended pods are
    /// left out: evicted ones stay by the hundreds.
    fn records<'b>(&self, candidates: impl Iterator<Item = &'b Member>) -> Vec<PodRecord> {
        let records = candidates.filter(|pod| !pod.ended).filter_map(|pod| {
            let table = written(self.root);
            let written = table.and_then(|table| table.shard_of(&pod.name.name));
            Some(PodRecord {
                pod: pod.name.name.clone(),
                revision: revision(self.rule, pod)?.to_owned(),
                shard: written.or(pod.labelled_shard()).map(str::to_owned),
                terminating: pod.terminating,
                ready: pod.ready,
                stands_by: table
                    .is_some_and(|table| table.pod_uids.get(&pod.uid).is_some_and(|owner| owner == STANDBY)),
                created_at: pod.created_at,
            })
        });
        records.collect()
    }

    fn is_candidate(&self, pod: &Member) -> bool {
        pod.enrolled() && pod.name.namespace == namespace(&self.root.metadata)
    }
}

/// Which pods may move to other shards: none while a rollout is under way or a pod will be replaced.
///
/// A deleted pod can stay for very long on a dead node. It counts only until there are enough pods, or until
/// a newer pod has replaced it.
fn moves(rule: &Root, shares: &[Share], candidates: &[&Member]) -> Moves {
    let of_target = candidates.iter().filter(|pod| !pod.ended && revision(rule, pod).is_some());
    let (terminating, staying): (Vec<&Member>, Vec<&Member>) = of_target.copied().partition(|pod| pod.terminating);
    let revisions: BTreeSet<_> = staying.iter().filter_map(|pod| revision(rule, pod)).collect();
    let enough = staying.len() >= shares.iter().map(|share| share.replicas).sum();
    match revisions.len() {
        0 | 1 if enough => Moves::All,
        0 | 1 if are_replaced(&terminating, &staying) => Moves::Ready,
        _ => Moves::None,
    }
}

/// Whether each of `terminating` has a pod in `staying` that was created after its deletion.
fn are_replaced(terminating: &[&Member], staying: &[&Member]) -> bool {
    let newest = |times: &mut Vec<Option<i64>>| times.sort_unstable_by(|one, other| other.cmp(one));
    let mut deleted: Vec<Option<i64>> = terminating.iter().map(|pod| pod.deleted_at).collect();
    let mut created_at: Vec<Option<i64>> = staying.iter().map(|pod| pod.created_at).collect();
    newest(&mut deleted);
    newest(&mut created_at);
    deleted.len() <= created_at.len()
        && deleted.iter().zip(created_at).all(|(deleted, created_at)| deleted.is_some() && created_at >= *deleted)
}

fn revision<'b>(rule: &Root, pod: &'b Member) -> Option<&'b str> {
    pod.revision_in(rule.target_deployment.as_deref()?)
}

fn written(root: &ShardingConfig) -> Option<&Ownership> {
    root.status.as_ref()?.ownership.as_ref()
}

#[cfg(test)]
mod tests;
