//! Tracks what the process still waits for before it can serve.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

#[derive(Clone, Debug, Default)]
pub struct Readiness {
    waiting_for: Arc<Mutex<BTreeSet<&'static str>>>,
}

/// Blocks readiness until it is dropped.
#[derive(Debug)]
pub struct BlockReady {
    reason: &'static str,
    readiness: Readiness,
}

impl Readiness {
    /// Not ready until the returned guard has been dropped.
    pub fn block(&self, reason: &'static str) -> BlockReady {
        lock(&self.waiting_for).insert(reason);
        BlockReady { reason, readiness: self.clone() }
    }

    /// What is still awaited, sorted; empty when ready.
    pub fn waiting_for(&self) -> Vec<&'static str> {
        lock(&self.waiting_for).iter().copied().collect()
    }
}

impl Drop for BlockReady {
    fn drop(&mut self) {
        lock(&self.readiness.waiting_for).remove(self.reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_ready_when_nothing_blocks_it_any_more() {
        let readiness = Readiness::default();
        let listener = readiness.block("listener");
        let policy = readiness.block("policy");
        assert_eq!(readiness.waiting_for(), ["listener", "policy"]);
        drop(listener);
        assert_eq!(readiness.waiting_for(), ["policy"]);
        drop(policy);
        assert!(readiness.waiting_for().is_empty());
    }
}
