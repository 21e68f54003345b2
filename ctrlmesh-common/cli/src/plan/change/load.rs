//! Says how many requests there are for what each shard owns before and after a root is applied.
//!
//! Pure.

use std::collections::BTreeSet;

use ctrlmesh_common::ownership::Ownership;

use super::{Change, Owned};
use crate::load;
use crate::load::{Load, Share};
use crate::status::shards::owned;
use crate::top::sample::Sample;

impl Change {
    /// Takes up the requests of the root's pods.
    ///
    /// # Errors
    /// Why there are none.
    pub(in crate::plan) fn measure(&mut self, sample: &Sample) -> Result<(), String> {
        if self.live.is_none() {
            return Err(format!("requests: root {}/{} is new, and nobody works for it yet", self.namespace, self.name));
        }
        let owners: BTreeSet<&String> = self.before.slots.values().chain(self.before.namespaces.values()).collect();
        let share = |owner: &String| {
            let (slots, namespaces) = owned(owner, &self.before);
            let (slots, namespaces) = (slots.into_iter().collect(), namespaces.into_iter().collect());
            let pods = self.pods_of(owner).into_iter().map(|pod| pod.name).collect();
            Share { pods, slots, namespaces }
        };
        let shares: Vec<Share> = owners.into_iter().map(share).collect();
        let load = Load::of(sample, &shares, self.hash, &self.namespace);
        if load.total() <= 0.0 {
            return Err(format!("requests: no pod of root {}/{} has asked for anything", self.namespace, self.name));
        }
        self.load = Some(load);
        Ok(())
    }

    /// The requests in a second for what the table gives a shard.
    pub(super) fn requests(&self, shard: &str, table: &Ownership) -> Option<f64> {
        let Load { namespaces, slots } = self.load.as_ref()?;
        let of_namespaces = namespaces.iter().map(|(name, count)| (self.hash.slot(name), Some(name.as_str()), count));
        let all = of_namespaces.chain(slots.iter().map(|(slot, count)| (*slot, None, count)));
        let its = all.filter(|(slot, namespace, _)| table.owner(*slot, *namespace) == Some(shard));
        Some(its.map(|(_, _, count)| count).sum())
    }
}

pub(super) fn thousandths(owned: &Owned) -> u64 {
    owned.requests_per_second.map(load::thousandths).unwrap_or_default()
}
