//! Is the manager ready to be asked, and what is it still waiting for?

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// What the process still waits for before it serves.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    waiting_for: Arc<Mutex<BTreeSet<&'static str>>>,
}

/// Blocks readiness until it is dropped.
#[derive(Debug)]
pub struct BlockReady {
    what: &'static str,
    readiness: Readiness,
}

// === impl Readiness ===

impl Readiness {
    /// Not ready until what is returned has been dropped.
    pub fn block(&self, what: &'static str) -> BlockReady {
        self.waiting_for.lock().unwrap_or_else(PoisonError::into_inner).insert(what);
        BlockReady { what, readiness: self.clone() }
    }

    /// What is still awaited, in order of name; nothing when ready.
    pub fn waiting_for(&self) -> Vec<&'static str> {
        self.waiting_for.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }
}

// === impl BlockReady ===

impl Drop for BlockReady {
    fn drop(&mut self) {
        self.readiness.waiting_for.lock().unwrap_or_else(PoisonError::into_inner).remove(self.what);
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
