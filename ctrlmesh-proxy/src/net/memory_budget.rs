//! How much may wait for those who ask and do not read?
//!
//! What was read on one side and is not written on the other is bounded for each pod and for the process, and some is
//! left to each pod whatever the others do: a client that asks for much and reads nothing takes the memory of no other
//! pod. What is more is given up: a response, an upload, or a connection of the pod that has too much already.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::metrics::gauge::Gauge;
use thiserror::Error;

use crate::metrics::{ClientError, Metrics};

/// What a pod may let wait even where the others have taken all that there is: one response that nobody reads.
const FLOOR_BYTES: i64 = 2 << 20;

/// The part of what may wait that one pod may have, where the process serves many.
const PODS: i64 = 4;

/// The least memory with which a process works, in bytes.
const LEAST_BYTES: u64 = 16 << 20;

/// What may wait, and does.
#[derive(Clone, Debug)]
pub struct Backlog {
    most: i64,
    bytes: Gauge,
    /// What it is a part of.
    all: Option<Arc<Backlog>>,
    metrics: Arc<Metrics>,
}

/// A part of what waits, until it is dropped.
#[derive(Debug)]
pub struct Waiting {
    backlog: Arc<Backlog>,
    bytes: i64,
}

/// How much memory a process may use, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Memory(pub u64);

/// A text that is no amount of memory.
#[derive(Debug, Error)]
#[error(
    "`{seen}` is no amount of memory: give bytes, or a number with Ki, Mi or Gi behind it; at least 16Mi"
)]
pub struct MemoryError {
    seen: String,
}

// === impl Backlog ===

impl Backlog {
    /// Of a process that may use so much memory: half of that.
    pub fn of_process(memory: Memory, metrics: &Arc<Metrics>) -> Arc<Self> {
        let most = i64::try_from(memory.0 / 2).unwrap_or(i64::MAX);
        let bytes = metrics.unread.clone();
        Arc::new(Self { most, bytes, all: None, metrics: metrics.clone() })
    }

    /// Of a pod, where the process serves many: a quarter of what there is for all.
    pub fn of_pod(self: &Arc<Self>) -> Arc<Self> {
        let (most, metrics) = ((self.most / PODS).max(FLOOR_BYTES), self.metrics.clone());
        Arc::new(Self { most, bytes: Gauge::default(), all: Some(self.clone()), metrics })
    }

    /// A part of which nothing waits yet.
    pub fn nothing(self: &Arc<Self>) -> Waiting {
        Waiting { backlog: self.clone(), bytes: 0 }
    }

    /// Lets so much more wait; `None` where that is too much, which is counted.
    pub fn wait(self: &Arc<Self>, bytes: usize) -> Option<Waiting> {
        let mut waiting = self.nothing();
        waiting.set(bytes).then_some(waiting)
    }

    /// Whether so much more may wait now.
    pub fn has_room(&self, bytes: usize) -> bool {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let has_room = self.take(bytes);
        if has_room {
            self.give_back(bytes);
        }
        has_room
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.bytes.get() == 0
    }

    fn take(&self, bytes: i64) -> bool {
        let Some(before) = self.take_up_to(self.most, bytes) else { return false };
        let Some(all) = &self.all else { return true };
        let most = if before + bytes <= FLOOR_BYTES { i64::MAX } else { all.most };
        let fits = all.take_up_to(most, bytes).is_some();
        if !fits {
            self.bytes.dec_by(bytes);
        }
        fits
    }

    /// Takes so much where that is no more than `most` in all; how much there was before.
    fn take_up_to(&self, most: i64, bytes: i64) -> Option<i64> {
        let more = |before: i64| before.checked_add(bytes).filter(|all| *all <= most);
        self.bytes.inner().fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
    }

    fn give_back(&self, bytes: i64) {
        self.bytes.dec_by(bytes);
        if let Some(all) = &self.all {
            all.give_back(bytes);
        }
    }
}

// === impl Waiting ===

impl Waiting {
    /// Whether nothing of it waits.
    pub fn is_nothing(&self) -> bool {
        self.bytes == 0
    }

    /// Lets so much wait in its place; where that is too much, it stays as it is.
    #[must_use]
    pub fn set(&mut self, bytes: usize) -> bool {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let more = bytes - self.bytes;
        if more > 0 && !self.backlog.take(more) {
            self.backlog.metrics.client_error(ClientError::Unread);
            return false;
        }
        if more < 0 {
            self.backlog.give_back(-more);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_nothing() {
            self.backlog.give_back(self.bytes);
        }
    }
}

// === impl Memory ===

impl FromStr for Memory {
    type Err = MemoryError;

    fn from_str(text: &str) -> Result<Self, MemoryError> {
        let wrong = || MemoryError { seen: text.to_owned() };
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
        let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes >= LEAST_BYTES);
        bytes.map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn of_process(mebibytes: u64) -> (Arc<Backlog>, Arc<Metrics>) {
        let metrics = Metrics::new();
        (Backlog::of_process(Memory(mebibytes << 20), &metrics), metrics)
    }

    #[test]
    fn a_pod_that_reads_nothing_leaves_room_to_the_others() {
        let (all, metrics) = of_process(64);
        let (greedy, others) = (all.of_pod(), [all.of_pod(), all.of_pod(), all.of_pod()]);
        let held: Vec<_> = std::iter::from_fn(|| greedy.wait(MIB)).collect();
        assert_eq!(held.len(), 8);
        assert_eq!(metrics.unread.get(), 8 << 20);
        let theirs = others.each_ref().map(|other| other.wait(8 * MIB).unwrap());
        // The process has no more, but for what is left to each.
        let last = all.of_pod();
        let mut two = last.wait(2 * MIB).unwrap();
        assert!(!last.has_room(1) && last.wait(1).is_none() && !two.set(2 * MIB + 1));
        drop((held, two));
        assert!(greedy.wait(8 * MIB).is_some());
        drop(theirs);
        assert!(metrics.unread.get() == 0 && greedy.is_empty() && last.is_empty());
        let page = metrics.render().unwrap();
        let counted = "ctrlmesh_proxy_client_errors_total{reason=\"unread\"} 3";
        assert!(page.contains(counted), "{page}");
    }

    #[test]
    fn what_waits_may_become_more_and_less() {
        let (all, metrics) = of_process(16);
        let mut waiting = all.wait(MIB).unwrap();
        assert!(waiting.set(8 * MIB) && !waiting.set(8 * MIB + 1));
        assert_eq!(metrics.unread.get(), 8 << 20);
        assert!(waiting.set(1));
        assert_eq!(metrics.unread.get(), 1);
        drop(waiting);
        assert_eq!(metrics.unread.get(), 0);
    }

    #[test]
    fn memory_is_said_as_kubernetes_says_it() {
        for (text, bytes) in [("1073741824", 1 << 30), ("512Mi", 512 << 20), ("2Gi", 2 << 30)] {
            assert_eq!(text.parse::<Memory>().unwrap(), Memory(bytes));
        }
        for text in ["", "0", "1Ki", "15Mi", "Mi", "1M", "-1", "1.5Gi", "99999999999Gi"] {
            let error = text.parse::<Memory>().unwrap_err().to_string();
            assert!(error.contains("Ki, Mi or Gi"), "{text}: {error}");
        }
    }
}
