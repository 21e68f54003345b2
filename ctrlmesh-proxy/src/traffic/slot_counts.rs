//! Counts the requests of a pod by the slot of their objects.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

use ctrlmesh_common::slots::{COUNT, Slot};
use ctrlmesh_common::wire::SlotLoad;

/// One count for each slot. They only grow.
#[derive(Debug)]
pub(super) struct SlotCounts([AtomicU64; COUNT as usize]);

impl Default for SlotCounts {
    fn default() -> Self {
        Self(array::from_fn(|_slot| AtomicU64::default()))
    }
}

impl SlotCounts {
    pub(super) fn add(&self, slot: Slot) {
        if let Some(count) = self.0.get(usize::from(slot.number())) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The counts of slots with any request.
    pub(super) fn report(&self) -> Vec<SlotLoad> {
        let loads = (0..).zip(&self.0).map(|(slot, count)| SlotLoad { slot, requests: count.load(Ordering::Relaxed) });
        loads.filter(|load| load.requests > 0).collect()
    }
}
