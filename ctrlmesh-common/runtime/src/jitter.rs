//! Spreads over time what many processes would do at once.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

/// A random time shorter than `limit`, in whole milliseconds.
pub fn random(limit: Duration) -> Duration {
    let random = u128::from(RandomState::new().hash_one(0_u8)) % limit.as_millis().max(1);
    Duration::from_millis(u64::try_from(random).unwrap_or_default())
}
