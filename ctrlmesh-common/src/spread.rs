//! How are those kept apart who would come together?

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

/// A time of up to `most`, in milliseconds, at random: ten thousand who wait so long do not come together.
pub fn random(most: Duration) -> Duration {
    let random = u128::from(RandomState::new().hash_one(0_u8)) % most.as_millis().max(1);
    Duration::from_millis(u64::try_from(random).unwrap_or_default())
}
