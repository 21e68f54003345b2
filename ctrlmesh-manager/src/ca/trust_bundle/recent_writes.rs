//! Remembers recent writes that the watch may not have seen yet.
//!
//! Older entries are dropped: the watch knows better, and namespaces come and go.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use tokio::time::Instant;

/// Not longer: a namespace may be deleted and created again without the ConfigMap.
pub(super) const VALIDITY: Duration = Duration::from_secs(5);

/// By namespace: digest and time of the write.
#[derive(Debug, Default)]
pub(super) struct RecentWrites(Mutex<HashMap<String, (u64, Instant)>>);

impl RecentWrites {
    /// Whether this content was written a moment ago.
    pub(super) fn has(&self, namespace: &str, digest: u64) -> bool {
        let known = lock(&self.0).get(namespace).copied();
        known.is_some_and(|(known, at)| known == digest && at.elapsed() < VALIDITY)
    }

    pub(super) fn remember(&self, namespace: &str, digest: u64) {
        let mut written = lock(&self.0);
        written.retain(|_, (_, at)| at.elapsed() < VALIDITY);
        written.insert(namespace.to_owned(), (digest, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use tokio::time;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_written_stands_for_a_moment_and_is_forgotten_then() {
        let written = RecentWrites::default();
        written.remember("a", 1);
        assert!(written.has("a", 1) && !written.has("a", 2) && !written.has("b", 1));
        time::advance(VALIDITY).await;
        assert!(!written.has("a", 1));
        written.remember("b", 1);
        assert_eq!(written.0.lock().unwrap().len(), 1);
    }
}
