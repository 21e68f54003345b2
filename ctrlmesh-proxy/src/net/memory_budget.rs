//! Bounds the bytes that were read from one side and are not yet written to the other.
//!
//! Each pod and the whole process have a budget, and a small part is left to each pod whatever the others use. So a
//! client that asks for much and reads nothing takes no other pod's memory. Whatever exceeds the budget is given up: a
//! response, an upload, or a connection.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use ctrlmesh_runtime::allocator;
use prometheus_client::metrics::gauge::Gauge;
use thiserror::Error;
use tokio::sync::Notify;
use tokio::{task, time};

use crate::metrics::{ClientError, Metrics};

/// Left to each pod when the process has used its budget: enough for one response that nobody reads.
const FLOOR_BYTES: i64 = 2 << 20;

/// In node mode, one pod may use this fraction of the process's budget: a quarter.
const POD_DIVISOR: i64 = 4;

/// A process with less memory does not work.
const MIN_LIMIT_BYTES: u64 = 16 << 20;

/// Once so much of what was reserved is released, the allocator is asked to give it back to the system.
const WORTH_GIVING_BACK: i64 = 8 << 20;

/// Between two times that the allocator is asked: it holds others up meanwhile.
const GIVE_BACK_INTERVAL: Duration = Duration::from_secs(10);

/// Who released much frees it within this time.
const FREEING: Duration = Duration::from_millis(500);

/// A limit, and what is reserved of it.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: i64,
    reserved: Gauge,
    /// The most that was reserved since `fell` was notified last, where there is no parent.
    highest: AtomicI64,
    /// Notified when much was released. Shared by all budgets of the process.
    fell: Arc<Notify>,
    /// The process's budget, where this one is a pod's.
    parent: Option<Arc<MemoryBudget>>,
    metrics: Arc<Metrics>,
}

/// Bytes of a budget, released on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<MemoryBudget>,
    bytes: i64,
}

/// The memory that the process may use, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemoryLimit(pub u64);

#[derive(Debug, Error)]
#[error("`{seen}` is no amount of memory: give bytes, or a number with Ki, Mi or Gi behind it; at least 16Mi")]
pub struct MemoryLimitError {
    seen: String,
}

impl MemoryBudget {
    /// Half of the process's memory.
    pub fn for_process(memory: MemoryLimit, metrics: &Arc<Metrics>) -> Arc<Self> {
        let limit = i64::try_from(memory.0 / 2).unwrap_or(i64::MAX);
        let reserved = metrics.unread.clone();
        let (highest, fell) = <(AtomicI64, Arc<Notify>)>::default();
        Arc::new(Self { limit, reserved, highest, fell, parent: None, metrics: metrics.clone() })
    }

    /// A budget beside the process's, for what callers from outside send: an eighth of the process's memory.
    pub fn for_callers(self: &Arc<Self>) -> Arc<Self> {
        self.of_its_own(self.limit / POD_DIVISOR, None)
    }

    /// A pod's budget, within the process's.
    pub fn for_pod(self: &Arc<Self>) -> Arc<Self> {
        self.of_its_own((self.limit / POD_DIVISOR).max(FLOOR_BYTES), Some(self.clone()))
    }

    fn of_its_own(&self, limit: i64, parent: Option<Arc<Self>>) -> Arc<Self> {
        let (reserved, highest) = <(Gauge, AtomicI64)>::default();
        Arc::new(Self { limit, reserved, highest, fell: self.fell.clone(), parent, metrics: self.metrics.clone() })
    }

    /// Has the allocator give memory back to the system whenever much was released.
    pub async fn give_back(self: Arc<Self>) {
        loop {
            self.fell.notified().await;
            time::sleep(FREEING).await;
            if let Err(panicked) = task::spawn_blocking(allocator::give_back).await {
                tracing::warn!(error = &panicked as &dyn std::error::Error, "freed memory is kept");
            }
            time::sleep(GIVE_BACK_INTERVAL).await;
        }
    }

    pub fn empty_reservation(self: &Arc<Self>) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0 }
    }

    /// `None` where that exceeds the budget, which the metrics count.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<Reservation> {
        let mut reservation = self.empty_reservation();
        reservation.resize(bytes).then_some(reservation)
    }

    pub fn has_room(&self, bytes: usize) -> bool {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let has_room = self.acquire(bytes);
        if has_room {
            self.release(bytes);
        }
        has_room
    }

    pub fn is_empty(&self) -> bool {
        self.reserved.get() == 0
    }

    fn acquire(&self, bytes: i64) -> bool {
        let Some(before) = self.acquire_up_to(self.limit, bytes) else { return false };
        let Some(parent) = &self.parent else {
            self.highest.fetch_max(before + bytes, Ordering::Relaxed);
            return true;
        };
        let limit = if before + bytes <= FLOOR_BYTES { i64::MAX } else { parent.limit };
        let Some(before) = parent.acquire_up_to(limit, bytes) else {
            self.reserved.dec_by(bytes);
            return false;
        };
        parent.highest.fetch_max(before + bytes, Ordering::Relaxed);
        true
    }

    /// The bytes that were reserved before, or `None` where the new total would exceed `limit`.
    fn acquire_up_to(&self, limit: i64, bytes: i64) -> Option<i64> {
        let more = |before: i64| before.checked_add(bytes).filter(|total| *total <= limit);
        self.reserved.inner().fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
    }

    fn release(&self, bytes: i64) {
        let left = self.reserved.dec_by(bytes) - bytes;
        if let Some(parent) = &self.parent {
            parent.release(bytes);
        } else if self.highest.load(Ordering::Relaxed) - left >= WORTH_GIVING_BACK {
            self.highest.store(left, Ordering::Relaxed);
            self.fell.notify_one();
        }
    }
}

impl Reservation {
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Stays as it is, and returns false, where `bytes` exceeds the budget.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let more = bytes - self.bytes;
        if more > 0 && !self.budget.acquire(more) {
            self.budget.metrics.client_error(ClientError::Unread);
            return false;
        }
        if more < 0 {
            self.budget.release(-more);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.is_empty() {
            self.budget.release(self.bytes);
        }
    }
}

impl FromStr for MemoryLimit {
    type Err = MemoryLimitError;

    fn from_str(text: &str) -> Result<Self, MemoryLimitError> {
        let wrong = || MemoryLimitError { seen: text.to_owned() };
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift = match unit {
            "" => 0,
            "Ki" => 10,
            "Mi" => 20,
            "Gi" => 30,
            _ => return Err(wrong()),
        };
        let number: u64 = number.parse().map_err(|_unfit| wrong())?;
        let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes >= MIN_LIMIT_BYTES);
        bytes.map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const MIB: usize = 1 << 20;

    fn for_process(mebibytes: u64) -> (Arc<MemoryBudget>, Arc<Metrics>) {
        let metrics = Metrics::new();
        (MemoryBudget::for_process(MemoryLimit(mebibytes << 20), &metrics), metrics)
    }

    #[test]
    fn a_pod_leaves_its_neighbours_their_budgets() {
        let (all, metrics) = for_process(64);
        let (greedy, others) = (all.for_pod(), [all.for_pod(), all.for_pod(), all.for_pod()]);
        let held: Vec<_> = std::iter::from_fn(|| greedy.reserve(MIB)).collect();
        assert_eq!(held.len(), 8);
        assert_eq!(metrics.unread.get(), 8 << 20);
        let reserved = others.each_ref().map(|other| other.reserve(8 * MIB).unwrap());
        // The process's budget is used up, but for each pod's floor.
        let last = all.for_pod();
        let mut two = last.reserve(2 * MIB).unwrap();
        assert!(!last.has_room(1) && last.reserve(1).is_none() && !two.resize(2 * MIB + 1));
        drop((held, two));
        assert!(greedy.reserve(8 * MIB).is_some());
        drop(reserved);
        assert!(metrics.unread.get() == 0 && greedy.is_empty() && last.is_empty());
        let page = metrics.render().unwrap();
        let counted = "ctrlmesh_proxy_client_errors_total{reason=\"unread\"} 3";
        assert!(page.contains(counted), "{page}");
    }

    #[test]
    fn a_reservation_grows_and_shrinks() {
        let (all, metrics) = for_process(16);
        let mut reservation = all.reserve(MIB).unwrap();
        assert!(reservation.resize(8 * MIB) && !reservation.resize(8 * MIB + 1));
        assert_eq!(metrics.unread.get(), 8 << 20);
        assert!(reservation.resize(1));
        assert_eq!(metrics.unread.get(), 1);
        drop(reservation);
        assert_eq!(metrics.unread.get(), 0);
    }

    #[test]
    fn memory_is_given_back_once_much_of_it_was_released() {
        let (all, _metrics) = for_process(64);
        let fell = || all.fell.notified().now_or_never().is_some();
        for budget in [all.clone(), all.for_pod(), all.for_callers()] {
            let mut reservation = budget.reserve(8 * MIB).unwrap();
            assert!(!fell());
            assert!(reservation.resize(1) && !fell());
            drop(reservation);
            assert!(fell() && !fell());
            drop(budget.reserve(8 * MIB - 1));
            assert!(!fell(), "little was released");
        }
    }

    #[test]
    fn memory_limits_parse_as_kubernetes_quantities() {
        for (text, bytes) in [("1073741824", 1 << 30), ("512Mi", 512 << 20), ("2Gi", 2 << 30)] {
            assert_eq!(text.parse::<MemoryLimit>().unwrap(), MemoryLimit(bytes));
        }
        for text in ["", "0", "1Ki", "15Mi", "Mi", "1M", "-1", "1.5Gi", "99999999999Gi"] {
            let error = text.parse::<MemoryLimit>().unwrap_err().to_string();
            assert!(error.contains("Ki, Mi or Gi"), "{text}: {error}");
        }
    }
}
