//! Says how many requests there are for what each shard of a root owns.
//!
//! Pure.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::slots::{NamespaceHash, Slot};

use crate::top::sample::Sample;

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

/// Requests in a second.
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
            let mut rest = pod.requests() / pod.seconds();
            let busy = pod.by_namespace().filter(|(name, _)| *name != OTHER);
            for (name, count) in busy.map(|(name, count)| (name, count / pod.seconds())) {
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

    pub(crate) fn total(&self) -> f64 {
        self.namespaces.values().chain(self.slots.values()).sum()
    }
}

/// Requests in a second as whole thousandths: as whole numbers, few requests would be none.
pub(crate) fn thousandths(requests: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
    let rounded = (requests * 1e3).round() as u64;
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::traffic::PodTraffic;

    const HASH: NamespaceHash = NamespaceHash::Fnv1a;

    /// Of a shard that owns the slot of this namespace, and another one.
    fn share(pod: &str, namespace: &str, other: i64) -> Share {
        let slots = [HASH.slot(namespace), Slot::try_from(other).unwrap()].into();
        Share { pods: [pod.to_owned()].into(), slots, ..Share::default() }
    }

    fn of(pods: Vec<PodTraffic>, shares: &[Share]) -> Load {
        Load::of(&Sample { pods, not_read: Vec::new() }, shares, HASH, "ops")
    }

    #[test]
    fn what_is_for_no_busy_namespace_of_the_shard_is_spread_over_its_slots() {
        // Slot 9.
        let shares = [share("web-0", "shop", 30)];
        let pod = PodTraffic::of_namespaces("ops", "web-0", &[("shop", 8.0), ("foreign", 2.0), (OTHER, 2.0)]);
        let load = of(vec![pod], &shares);
        assert_eq!(load.namespaces, [("shop".to_owned(), 4.0)].into(), "in a second: of two");
        let slots: Vec<f64> = load.slots.values().copied().collect();
        assert_eq!((slots, load.total()), (vec![1.0, 1.0], 6.0));
    }

    #[test]
    fn a_pinned_namespace_counts_whatever_its_slot() {
        let pinned = Share { namespaces: ["shop".to_owned()].into(), ..share("web-0", "default", 31) };
        let pod = PodTraffic::of_namespaces("ops", "web-0", &[("shop", 8.0)]);
        assert_eq!(of(vec![pod.clone()], &[pinned]).namespaces.len(), 1);
        let without_slots = Share { pods: ["web-0".to_owned()].into(), ..Share::default() };
        assert_eq!(of(vec![pod.clone()], &[without_slots]), Load::default());
        assert_eq!(of(vec![pod], &[share("web-1", "shop", 30)]), Load::default(), "nobody knows the pod");
    }
}
