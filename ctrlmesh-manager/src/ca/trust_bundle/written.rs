//! Was the `ConfigMap` written there just now?
//!
//! The watch may not have seen it yet. What was written longer ago is forgotten: it is the watch's to say, and namespaces come
//! and go.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// For how long what was written is taken to stand: a namespace may be removed, and made anew without it.
pub(super) const STANDS: Duration = Duration::from_secs(5);

/// By namespace, the digest of what was written there, and when.
#[derive(Debug, Default)]
pub(super) struct Written(Mutex<HashMap<String, (u64, Instant)>>);

// === impl Written ===

impl Written {
    /// Whether just that was written there a moment ago.
    pub(super) fn stands(&self, namespace: &str, digest: u64) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(namespace).copied();
        known.is_some_and(|(known, at)| known == digest && at.elapsed() < STANDS)
    }

    /// It was written there now.
    pub(super) fn remember(&self, namespace: &str, digest: u64) {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|_, (_, at)| at.elapsed() < STANDS);
        written.insert(namespace.to_owned(), (digest, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use tokio::time;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_written_stands_for_a_moment_and_is_forgotten_then() {
        let written = Written::default();
        written.remember("a", 1);
        assert!(written.stands("a", 1) && !written.stands("a", 2) && !written.stands("b", 1));
        time::advance(STANDS).await;
        assert!(!written.stands("a", 1));
        written.remember("b", 1);
        assert_eq!(written.0.lock().unwrap().len(), 1);
    }
}
