//! Says which shard of a root has which slots, changes it, and writes it as a root by hand.
//!
//! Pure.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{Manual, Root, ShardingConfig};
use ctrlmesh_common::slots::{Slot, SlotSet};
use ctrlmesh_manager::rules::shard::{self, Share, Versions, is_made_by};
use kube::ResourceExt as _;

use super::error::SteerError;
use super::pods::{LivePods, ShardPod};
use crate::plan::change::settled;
use crate::plan::live::Live;

/// Which shard of a root has which slots.
#[derive(Clone, Debug)]
pub(super) struct Division {
    canary: Option<Canary>,
    /// All but the canary.
    pub(super) shards: Vec<Shard>,
}

#[derive(Clone, Debug)]
pub(super) struct Canary {
    pub(super) name: String,
    pub(super) pods: Vec<ShardPod>,
    slots: SlotSet,
    namespaces: BTreeSet<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Shard {
    pub(super) name: String,
    pub(super) slots: SlotSet,
    /// What it owns until that goes to the shard that is to have it, which may have no pod.
    pub(super) held: SlotSet,
    pub(super) pods: Vec<ShardPod>,
    /// In the root's `manual`.
    id: i32,
    replicas: i32,
}

/// One shard of a [`Division`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Canary,
    /// Index in [`Division::shards`].
    Shard(usize),
}

impl Division {
    /// As the root divides now.
    ///
    /// # Errors
    /// It is switched off, or invalid, or elastic, or a version is tried in a part of the slots.
    pub(super) fn of(root: &ShardingConfig, live: &Live, live_pods: &LivePods) -> Result<Self, SteerError> {
        let name = root.name_any();
        if let Some(trial) = Versions::of(root).trial() {
            return Err(SteerError::Trial { name, revision: trial.revision.clone() });
        }
        if root.spec.root.as_ref().is_some_and(Root::is_elastic) {
            return Err(SteerError::Elastic { name });
        }
        let made: Vec<&ShardingConfig> = live.configs.iter().filter(|one| is_made_by(root, one)).collect();
        let shards = shard::divide(root, &live.labelling, &live.namespaces, &made);
        let shards = shards.map_err(|source| SteerError::Divide { name: name.clone(), source })?;
        let shards = shards.ok_or(SteerError::Disabled { name })?;
        let second = Versions::of(root).main_is_second();
        let all = shards.into_iter().map(|one| one.share);
        let divided: Vec<Share> = all.filter(|share| share.second == second).collect();
        let pods_of = |name: &str| {
            let made = made.iter().find(|one| one.name_any() == name);
            made.map(|config| live_pods.of(config)).unwrap_or_default()
        };
        let table = root.status.as_ref().and_then(|status| status.ownership.clone()).map(settled).unwrap_or_default();
        let held = |name: &str| table.slots_of(name).collect();
        let in_canary = root.spec.root.iter().filter_map(|rule| rule.canary.as_ref());
        let namespaces = in_canary.flat_map(|canary| canary.in_namespaces.iter().cloned()).collect();
        let canary = divided.iter().find(|share| share.canary);
        Ok(Self {
            canary: canary.map(|share| {
                let (name, pods) = (share.name.clone(), pods_of(&share.name));
                Canary { name, pods, slots: share.slots, namespaces }
            }),
            shards: divided
                .iter()
                .filter(|share| !share.canary)
                .filter_map(|one| Shard::of(one, held(&one.name), pods_of(&one.name)))
                .collect(),
        })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        let canary = self.canary.iter().map(|canary| &canary.name);
        canary.chain(self.shards.iter().map(|shard| &shard.name))
    }

    pub(super) fn owner(&self, shard: &str) -> Option<Owner> {
        if self.canary.as_ref().is_some_and(|canary| canary.name == shard) {
            return Some(Owner::Canary);
        }
        self.shards.iter().position(|one| one.name == shard).map(Owner::Shard)
    }

    pub(super) fn canary(&self) -> Option<&Canary> {
        self.canary.as_ref()
    }

    /// Gives slots to one shard, whoever had them.
    pub(super) fn give(&mut self, slots: SlotSet, to: Owner) {
        let all = self.canary.iter_mut().map(|canary| &mut canary.slots);
        for share in all.chain(self.shards.iter_mut().map(|shard| &mut shard.slots)) {
            *share = share.intersection(slots.complement());
        }
        let share = match to {
            Owner::Canary => self.canary.as_mut().map(|canary| &mut canary.slots),
            Owner::Shard(at) => self.shards.get_mut(at).map(|shard| &mut shard.slots),
        };
        if let Some(share) = share {
            *share = share.union(slots);
        }
    }

    /// Gives a namespace to one shard: to the canary by its name, and to another shard with its whole slot.
    pub(super) fn give_namespace(&mut self, namespace: &str, slot: Slot, to: Owner) {
        let slots: SlotSet = [slot].into_iter().collect();
        match (to, &mut self.canary) {
            (Owner::Canary, Some(canary)) => {
                if !canary.slots.contains(slot) {
                    canary.namespaces.insert(namespace.to_owned());
                }
            }
            (_, canary) => {
                if let Some(canary) = canary {
                    canary.namespaces.remove(namespace);
                }
                self.give(slots, to);
            }
        }
    }

    /// The root with this division, written by hand.
    pub(super) fn written(&self, root: &ShardingConfig) -> ShardingConfig {
        let mut written = root.clone();
        if let Some(rule) = &mut written.spec.root {
            self.write(rule);
        }
        written
    }

    fn write(&self, rule: &mut Root) {
        rule.auto = None;
        let manual = |shard: &Shard| Manual {
            id: shard.id,
            hashes: hashes(shard.slots),
            replicas: (shard.replicas != 1).then_some(shard.replicas),
        };
        rule.manual = self.shards.iter().map(manual).collect();
        if let (Some(canary), Some(share)) = (&mut rule.canary, &self.canary) {
            canary.in_namespaces = share.namespaces.iter().cloned().collect();
            canary.in_shard_hash = hashes(share.slots);
        }
    }
}

impl Shard {
    /// `None`: its name has no number. The manager makes no such name.
    fn of(share: &Share, held: SlotSet, pods: Vec<ShardPod>) -> Option<Self> {
        let id = share.name.rsplit('-').nth(1)?.parse().ok()?;
        let replicas = i32::try_from(share.replicas).ok()?;
        Some(Self { name: share.name.clone(), slots: share.slots, held, pods, id, replicas })
    }
}

fn hashes(slots: SlotSet) -> Vec<String> {
    slots.iter().map(|slot| slot.to_string()).collect()
}
