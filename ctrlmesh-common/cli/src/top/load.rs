//! Says how many requests there are for what each shard of a root owns.
//!
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ctrlmesh_common::slots::{NamespaceHash, Slot};

use super::sample::Sample;

/// How proxies count the requests for namespaces that are not busy.
const OTHER: &str = "_other";

/// What one shard owns, and the pods that work on it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Share {
    /// Names, in the root's namespace.
    pub(crate) pods: BTreeSet<String>,
    pub(crate) slots: BTreeSet<Slot>,
    /// Whatever their slot.
    pub(crate) namespaces: BTreeSet<String>,
}

/// Counts of requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// For busy namespaces that their pod's shard owns.
    pub(crate) namespaces: BTreeMap<String, f64>,
    /// For all else.
    pub(crate) slots: BTreeMap<Slot, f64>,
}

impl Load {
    /// Of the pods in a root's namespace. All requests of a pod that are for no busy namespace of its shard are spread
    /// evenly over the slots of the shard: for namespaces that are not busy, or are no share, and for objects of
    /// cluster scope. A shard without slots has none of these.
    pub(crate) fn of(sample: &Sample, shares: &[Share], hash: NamespaceHash, namespace: &str) -> Self {
        let mut load = Self::default();
        for pod in sample.pods.iter().filter(|pod| pod.key.namespace == namespace) {
            let Some(share) = shares.iter().find(|share| share.pods.contains(&pod.key.pod)) else { continue };
            let mut rest = pod.requests();
            for (name, count) in pod.by_namespace().filter(|(name, _)| *name != OTHER) {
                if share.namespaces.contains(name) || share.slots.contains(&hash.slot(name)) {
                    *load.namespaces.entry(name.to_owned()).or_default() += count;
                    rest -= count;
                }
            }
            let number = f64::from(u32::try_from(share.slots.len()).unwrap_or(u32::MAX));
            share.slots.iter().for_each(|slot| *load.slots.entry(*slot).or_default() += rest.max(0.0) / number);
        }
        load
    }

    /// Counts of this time, for a second.
    pub(crate) fn per_second(mut self, time: Duration) -> Self {
        let counts = self.namespaces.values_mut().chain(self.slots.values_mut());
        counts.for_each(|count| *count /= time.as_secs_f64());
        self
    }

    pub(crate) fn total(&self) -> f64 {
        self.namespaces.values().chain(self.slots.values()).sum()
    }
}
