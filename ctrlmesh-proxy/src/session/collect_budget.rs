//! Bounds the memory for bodies that are read whole, such as leader-election locks.
//!
//! Each connection, pod and thread has a limit, so a client that does not finish its body blocks nobody else.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use crate::net::accept::PodSlot;

/// Two of the longest bodies, and small ones beside them.
const MAX_CONNECTION_BYTES: usize = 8 << 20;

/// For each pod on a thread, in node mode.
const MAX_POD_BYTES: usize = 16 << 20;

const MAX_THREAD_BYTES: usize = 64 << 20;

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

#[derive(Default)]
struct Thread {
    bytes: usize,
    /// The bytes of each pod, in node mode.
    pods: HashMap<PodSlot, usize>,
}

/// The budget of one client connection.
#[derive(Debug)]
pub(crate) struct CollectBudget {
    pod: Option<PodSlot>,
    bytes: Cell<usize>,
}

/// Bytes of a budget, released on drop.
#[derive(Debug)]
pub(crate) struct CollectedBytes<'b> {
    budget: &'b CollectBudget,
    bytes: usize,
}

impl CollectBudget {
    /// `pod` is `None` in a sidecar.
    pub(crate) fn new(pod: Option<PodSlot>) -> Self {
        Self { pod, bytes: Cell::default() }
    }

    pub(crate) fn start(&self) -> CollectedBytes<'_> {
        CollectedBytes { budget: self, bytes: 0 }
    }

    fn acquire(&self, bytes: usize) -> bool {
        THREAD.with_borrow_mut(|thread| {
            let connection = self.bytes.get() + bytes;
            let pod = self.pod.map(|pod| thread.pods.get(&pod).copied().unwrap_or_default() + bytes);
            let all = thread.bytes + bytes;
            let fits = connection <= MAX_CONNECTION_BYTES
                && pod.is_none_or(|pod| pod <= MAX_POD_BYTES)
                && all <= MAX_THREAD_BYTES;
            if fits {
                self.bytes.set(connection);
                thread.bytes = all;
                if let Some((slot, bytes)) = self.pod.zip(pod) {
                    thread.pods.insert(slot, bytes);
                }
            }
            fits
        })
    }

    fn release(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() - bytes);
        THREAD.with_borrow_mut(|thread| {
            thread.bytes -= bytes;
            if let Some(slot) = self.pod
                && let Some(pod) = thread.pods.get_mut(&slot)
            {
                *pod -= bytes;
                if *pod == 0 {
                    thread.pods.remove(&slot);
                }
            }
        });
    }
}

impl CollectedBytes<'_> {
    /// Changes nothing, and returns false, where `bytes` more exceed a limit.
    #[must_use]
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        let fits = self.budget.acquire(bytes);
        self.bytes += if fits { bytes } else { 0 };
        fits
    }
}

impl Drop for CollectedBytes<'_> {
    fn drop(&mut self) {
        self.budget.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_connection_is_held_to_its_limit() {
        let (one, other) = (CollectBudget::new(None), CollectBudget::new(None));
        let mut held = one.start();
        assert!(held.grow(MAX_CONNECTION_BYTES) && !held.grow(1));
        assert!(!one.start().grow(1));
        assert!(other.start().grow(3 * MIB));
        drop(held);
        assert!(one.start().grow(3 * MIB));
    }

    #[test]
    fn a_pod_is_held_to_its_limit() {
        let budgets: Vec<CollectBudget> = (0..8).map(|_| CollectBudget::new(Some(PodSlot(1)))).collect();
        let mut held: Vec<_> = budgets.iter().map(CollectBudget::start).collect();
        let taken = held.iter_mut().filter_map(|held| held.grow(4 * MIB).then_some(())).count();
        assert_eq!(taken, MAX_POD_BYTES / (4 * MIB));
        let other = CollectBudget::new(Some(PodSlot(2)));
        assert!(other.start().grow(3 * MIB));
        drop(held);
        assert!(budgets[7].start().grow(3 * MIB));
        THREAD.with_borrow(|thread| assert!(thread.bytes == 0 && thread.pods.is_empty()));
    }

    #[test]
    fn a_thread_is_held_to_its_limit() {
        let budgets: Vec<CollectBudget> = (0..20).map(|slot| CollectBudget::new(Some(PodSlot(slot)))).collect();
        let mut held: Vec<_> = budgets.iter().map(CollectBudget::start).collect();
        let taken = held.iter_mut().filter_map(|held| held.grow(8 * MIB).then_some(())).count();
        assert_eq!(taken, MAX_THREAD_BYTES / (8 * MIB));
    }
}
