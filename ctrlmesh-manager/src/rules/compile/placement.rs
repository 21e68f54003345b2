//! Assigns the pods of a root's workload to its shards.
//!
//! An active root assigns a StatefulSet's pods by ordinal, and a Deployment's pods by a record. Under an
//! inactive root (switched off or invalid), each pod keeps its recorded shard, and a pod without one gets an
//! existing shard.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;

use super::World;
use crate::rules::pod::Member;
use crate::rules::shard::{self, PodRecord, Share};

#[derive(Clone, Debug)]
pub(super) struct Placement<'a> {
    root: &'a ShardingConfig,
    rule: &'a Root,
    shares: Vec<Share>,
    /// Whether the root makes no shards now.
    inactive: bool,
    first_ordinal: u32,
    pods: BTreeMap<String, String>,
    /// Pods that are not being deleted.
    staying: BTreeMap<String, String>,
}

// === impl Placement ===

impl<'a> Placement<'a> {
    /// `near` are the enrolled pods of the root's namespace.
    pub(super) fn of_active_root(
        root: &'a ShardingConfig,
        rule: &'a Root,
        shares: Vec<Share>,
        near: &[&Member],
        world: World<'_>,
    ) -> Self {
        Self::new(root, rule, shares, false, near, world)
    }

    /// `children` are the shards that the root made earlier.
    pub(super) fn of_inactive_root(
        root: &'a ShardingConfig,
        rule: &'a Root,
        children: &[&ShardingConfig],
        near: &[&Member],
        world: World<'_>,
    ) -> Self {
        Self::new(root, rule, shard::existing_shares(rule, children), true, near, world)
    }

    fn new(
        root: &'a ShardingConfig,
        rule: &'a Root,
        shares: Vec<Share>,
        inactive: bool,
        near: &[&Member],
        world: World<'_>,
    ) -> Self {
        let set = rule.target_stateful_set.as_deref().unwrap_or_default();
        let set = format!("{}/{set}", namespace(root));
        let first_ordinal = world.first_ordinals.get(&set).copied().unwrap_or_default();
        let (pods, staying) = (BTreeMap::new(), BTreeMap::new());
        let mut this = Self { root, rule, shares, inactive, first_ordinal, pods, staying };
        let seats = this.seats(near.iter().copied());
        let settled = !inactive && is_settled(rule, &this.shares, near);
        this.pods = shard::assign(&this.shares, &seats, settled);
        let seated = near.iter().filter_map(|pod| {
            let share = this.seated(pod)?;
            Some((pod.name.name.clone(), share.name.clone()))
        });
        let seated: Vec<_> = seated.collect();
        this.pods.extend(seated);
        let staying = near.iter().filter(|pod| !pod.leaving);
        let staying = staying.filter_map(|pod| {
            this.pods.get_key_value(&pod.name.name).map(|(pod, shard)| (pod.clone(), shard.clone()))
        });
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
    pub(super) fn shard_for(&self, pod: &Member, members: &[Member]) -> Option<&str> {
        let share = self.seated(pod).or_else(|| {
            let revision = revision(self.rule, pod)?;
            let recorded = self.shares.iter().find(|share| pod.recorded() == Some(&share.name));
            let near = members.iter().filter(|pod| self.is_candidate(pod));
            recorded.or_else(|| shard::choose(&self.shares, &self.seats(near), revision))
        });
        share.map(|share| share.name.as_str())
    }

    /// For a pod of the root's StatefulSet. A pod below the first ordinal is about to be deleted, and keeps
    /// its shard.
    fn seated(&self, pod: &Member) -> Option<&Share> {
        let ordinal = pod.ordinal_in(self.rule.target_stateful_set.as_deref()?)?;
        let named = |name: Option<&str>| {
            name.and_then(|name| self.shares.iter().find(|share| share.name == name))
        };
        let before = || {
            let written = written(self.root).and_then(|written| written.shard_of(&pod.name.name));
            named(written).or_else(|| named(pod.recorded()))
        };
        let number = ordinal.checked_sub(self.first_ordinal);
        if let Some(share) = before().filter(|_| self.inactive || number.is_none()) {
            return Some(share);
        }
        match number {
            Some(number) => shard::by_ordinal(&self.shares, number),
            None => self.shares.iter().find(|share| !share.canary),
        }
    }

    /// Pods of the root's Deployment. The root's status has precedence over the pod's label. Ended pods are
    /// left out: evicted ones stay by the hundreds.
    fn seats<'b>(&self, near: impl Iterator<Item = &'b Member>) -> Vec<PodRecord> {
        let seats = near.filter(|pod| !pod.ended).filter_map(|pod| {
            let written = written(self.root).and_then(|written| written.shard_of(&pod.name.name));
            Some(PodRecord {
                pod: pod.name.name.clone(),
                revision: revision(self.rule, pod)?.to_owned(),
                shard: written.or(pod.recorded()).map(str::to_owned),
                leaving: pod.leaving,
            })
        });
        seats.collect()
    }

    fn is_candidate(&self, pod: &Member) -> bool {
        pod.enrolled() && pod.name.namespace == namespace(self.root)
    }
}

/// Whether no rollout is under way and no pod will be replaced. Only then may pods move to other shards.
///
/// A deleted pod can stay for very long on a dead node. It counts only until there are enough pods, or until
/// a newer pod has replaced it.
fn is_settled(rule: &Root, shares: &[Share], near: &[&Member]) -> bool {
    let of_target = near.iter().filter(|pod| !pod.ended && revision(rule, pod).is_some());
    let (leaving, staying): (Vec<&Member>, Vec<&Member>) =
        of_target.copied().partition(|pod| pod.leaving);
    let revisions: BTreeSet<_> = staying.iter().filter_map(|pod| revision(rule, pod)).collect();
    let enough = staying.len() >= shares.iter().map(|share| share.replicas).sum();
    revisions.len() <= 1 && (enough || are_replaced(&leaving, &staying))
}

/// Whether each of `leaving` has a pod in `staying` that was created after its deletion.
fn are_replaced(leaving: &[&Member], staying: &[&Member]) -> bool {
    let newest = |times: &mut Vec<Option<i64>>| times.sort_unstable_by(|one, other| other.cmp(one));
    let mut told: Vec<Option<i64>> = leaving.iter().map(|pod| pod.deleted_since).collect();
    let mut born: Vec<Option<i64>> = staying.iter().map(|pod| pod.born).collect();
    newest(&mut told);
    newest(&mut born);
    told.len() <= born.len()
        && told.iter().zip(born).all(|(told, born)| told.is_some() && born >= *told)
}

fn revision<'b>(rule: &Root, pod: &'b Member) -> Option<&'b str> {
    pod.revision_in(rule.target_deployment.as_deref()?)
}

fn written(root: &ShardingConfig) -> Option<&Ownership> {
    root.status.as_ref()?.ownership.as_ref()
}

pub(super) fn namespace(config: &ShardingConfig) -> &str {
    config.metadata.namespace.as_deref().unwrap_or_default()
}
