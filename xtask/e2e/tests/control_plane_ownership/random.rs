//! Numbers that look random, and are the same for the same seed.

use std::ops::Range;
use std::time::Duration;

/// A generator (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn of(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A number of this range, both ends included.
    pub(crate) fn between(&mut self, least: i64, most: i64) -> i64 {
        least.saturating_add_unsigned(self.below(least.abs_diff(most) + 1))
    }

    /// One of these many.
    pub(crate) fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(u64::try_from(count).unwrap_or(u64::MAX))).unwrap_or_default()
    }

    /// So many milliseconds.
    pub(crate) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(range.start + self.below(range.end - range.start))
    }
}
