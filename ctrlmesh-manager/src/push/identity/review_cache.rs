//! A bounded cache of review results, by the digest of the token.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256, SHA256_OUTPUT_LEN};
use ctrlmesh_runtime::sync::lock;
use tokio::time::Instant;

/// SHA-256 of a token; the token itself is not kept.
pub(super) type TokenDigest = [u8; SHA256_OUTPUT_LEN];

#[derive(Debug)]
pub(super) struct ReviewCache<T> {
    entries: Mutex<HashMap<TokenDigest, Entry<T>>>,
    capacity: usize,
    lifetime: Duration,
}

#[derive(Debug)]
struct Entry<T> {
    result: T,
    at: Instant,
}

impl<T: Clone> ReviewCache<T> {
    pub(super) fn new(capacity: usize, lifetime: Duration) -> Self {
        Self { entries: Mutex::default(), capacity, lifetime }
    }

    /// The result for a token, if it is younger than `age`.
    pub(super) fn get(&self, token: &TokenDigest, age: Duration) -> Option<T> {
        let is_young = |entry: &&Entry<T>| entry.at.elapsed() < age;
        lock(&self.entries).get(token).filter(is_young).map(|entry| entry.result.clone())
    }

    pub(super) fn insert(&self, token: TokenDigest, result: T) {
        let mut entries = lock(&self.entries);
        if entries.len() >= self.capacity {
            entries.retain(|_, entry| entry.at.elapsed() < self.lifetime);
        }
        if entries.len() >= self.capacity {
            entries.clear();
        }
        entries.insert(token, Entry { result, at: Instant::now() });
    }

    pub(super) fn remove(&self, token: &TokenDigest) {
        lock(&self.entries).remove(token);
    }
}

pub(super) fn token_digest(token: &str) -> TokenDigest {
    let mut digest = TokenDigest::default();
    digest.copy_from_slice(digest::digest(&SHA256, token.as_bytes()).as_ref());
    digest
}

#[cfg(test)]
mod tests {
    use tokio::time;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_result_is_used_for_a_minute_and_no_longer() {
        let minute = Duration::from_mins(1);
        let (cache, token) = (ReviewCache::new(10, minute), [7; SHA256_OUTPUT_LEN]);
        cache.insert(token, "somebody");
        assert_eq!(cache.get(&token, minute), Some("somebody"));
        time::advance(Duration::from_secs(59)).await;
        assert_eq!(cache.get(&token, minute), Some("somebody"));
        time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&token, minute), None);
        assert_eq!(cache.get(&[8; SHA256_OUTPUT_LEN], minute), None);
    }
}
