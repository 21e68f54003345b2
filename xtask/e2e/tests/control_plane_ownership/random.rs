//! Numbers that look random, and are the same for the same seed.

use std::ops::Range;
use std::time::Duration;

#[allow(clippy::unwrap_used, reason = "the tests that it is of may")]
#[path = "../../../../ctrlmesh-proxy/request/tests/harness/random.rs"]
mod generator;

/// A generator of what the torture needs.
pub(crate) struct Random(generator::Random);

impl Random {
    pub(crate) fn of(seed: u64) -> Self {
        Self(generator::Random(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
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
