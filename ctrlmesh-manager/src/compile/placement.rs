//! Which pod of a root's workload is of which of its shards?
//!
//! Where the root divides, a StatefulSet's pods go by ordinal, and a Deployment's by a record. Where it does not, because
//! it is switched off or cannot be divided, its shards stand as they are, and so do the pods: each keeps the shard that
//! is written down for it, and one without any gets one of those that are there.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;

use super::World;
use crate::pod::Member;
use crate::shard::{self, Seat, Share};

/// The pods of one root, each with its shard.
#[derive(Clone, Debug)]
pub(super) struct Placement<'a> {
    root: &'a ShardingConfig,
    rule: &'a Root,
    shares: Vec<Share>,
    /// Whether the root makes no shards now.
    stands: bool,
    first_ordinal: u32,
    pods: BTreeMap<String, String>,
}

// === impl Placement ===

impl<'a> Placement<'a> {
    /// The pods of `near`, the enrolled ones of the root's namespace, among `shares`, those of a root that divides.
    pub(super) fn divided(
        root: &'a ShardingConfig,
        rule: &'a Root,
        shares: Vec<Share>,
        near: &[&Member],
        world: World<'_>,
    ) -> Self {
        Self::new(root, rule, shares, false, near, world)
    }

    /// The same among the `children` of a root that makes no shards now.
    pub(super) fn standing(
        root: &'a ShardingConfig,
        rule: &'a Root,
        children: &[&ShardingConfig],
        near: &[&Member],
        world: World<'_>,
    ) -> Self {
        Self::new(root, rule, shard::standing(rule, children), true, near, world)
    }

    fn new(
        root: &'a ShardingConfig,
        rule: &'a Root,
        shares: Vec<Share>,
        stands: bool,
        near: &[&Member],
        world: World<'_>,
    ) -> Self {
        let set = rule.target_stateful_set.as_deref().unwrap_or_default();
        let set = format!("{}/{set}", super::operator::namespace(root));
        let first_ordinal = world.first_ordinals.get(&set).copied().unwrap_or_default();
        let pods = BTreeMap::new();
        let mut this = Self { root, rule, shares, stands, first_ordinal, pods };
        let seats = this.seats(near.iter().copied());
        this.pods = shard::assign(&this.shares, &seats, !stands && is_settled(&seats));
        let seated = near.iter().filter_map(|pod| {
            let share = this.seated(pod)?;
            Some((pod.name.name.clone(), share.name.clone()))
        });
        let seated: Vec<_> = seated.collect();
        this.pods.extend(seated);
        this
    }

    /// By pod, its shard.
    pub(super) fn pods(&self) -> &BTreeMap<String, String> {
        &self.pods
    }

    /// The shards.
    pub(super) fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// The shard for `pod`, which is being admitted and has perhaps no name yet, beside those that are there.
    pub(super) fn shard_for(&self, pod: &Member, members: &[Member]) -> Option<&str> {
        let share = self.seated(pod).or_else(|| {
            let revision = revision(self.rule, pod)?;
            let recorded = self.shares.iter().find(|share| pod.recorded() == Some(&share.name));
            let near = members.iter().filter(|pod| self.is_candidate(pod));
            recorded.or_else(|| shard::choose(&self.shares, &self.seats(near), revision))
        });
        share.map(|share| share.name.as_str())
    }

    /// The share of a pod of the root's StatefulSet. One whose ordinal lies below the first is about to go: it keeps the
    /// shard that it had.
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
        if let Some(share) = before().filter(|_| self.stands || number.is_none()) {
            return Some(share);
        }
        match number {
            Some(number) => shard::by_ordinal(&self.shares, number),
            None => self.shares.iter().find(|share| !share.canary),
        }
    }

    /// The pods of the root's Deployment. What is written in the root's status counts before what a pod says of itself.
    fn seats<'b>(&self, near: impl Iterator<Item = &'b Member>) -> Vec<Seat> {
        let seats = near.filter_map(|pod| {
            let written = written(self.root).and_then(|written| written.shard_of(&pod.name.name));
            Some(Seat {
                pod: pod.name.name.clone(),
                revision: revision(self.rule, pod)?.to_owned(),
                shard: written.or(pod.recorded()).map(str::to_owned),
                leaving: pod.leaving,
            })
        });
        seats.collect()
    }

    fn is_candidate(&self, pod: &Member) -> bool {
        pod.enrolled() && pod.name.namespace == super::operator::namespace(self.root)
    }
}

/// Whether `pod` is of the workload that a root with this rule divides.
pub(super) fn is_of_target(rule: &Root, pod: &Member) -> bool {
    rule.target_stateful_set.as_deref().is_some_and(|set| pod.ordinal_in(set).is_some())
        || revision(rule, pod).is_some()
}

/// Whether no rollout is under way and no pod about to be replaced: then pods may move to shards that lack them.
fn is_settled(seats: &[Seat]) -> bool {
    seats.iter().all(|seat| !seat.leaving && seat.revision == seats[0].revision)
}

fn revision<'b>(rule: &Root, pod: &'b Member) -> Option<&'b str> {
    pod.revision_in(rule.target_deployment.as_deref()?)
}

fn written(root: &ShardingConfig) -> Option<&Ownership> {
    root.status.as_ref()?.ownership.as_ref()
}
