//! A lock-free histogram of the time that the proxy adds to a request, or to a call of a webhook.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// The upper end of the first bucket; each bucket is twice as wide as the one before.
const FIRST_NANOSECONDS: u64 = 4_000;

/// 4 µs to 65.536 ms, and one for longer times.
const BUCKETS: usize = 16;

#[derive(Clone, Debug, Default)]
pub(super) struct AddedTime(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    buckets: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
}

impl AddedTime {
    pub(super) fn observe(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.buckets[bucket(nanoseconds)].fetch_add(1, Ordering::Relaxed);
        self.0.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

impl TypedMetric for AddedTime {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for AddedTime {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let buckets: Vec<(f64, u64)> = self.0.buckets.iter().enumerate().map(upper_end).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let total = Duration::from_nanos(self.0.nanoseconds.load(Ordering::Relaxed));
        encoder.encode_histogram::<NoLabelSet>(total.as_secs_f64(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// The first bucket whose upper end is not below a time.
fn bucket(nanoseconds: u64) -> usize {
    let doublings = u64::BITS - (nanoseconds.saturating_sub(1) / FIRST_NANOSECONDS).leading_zeros();
    BUCKETS.min(doublings as usize + 1) - 1
}

/// A bucket's upper end in seconds, and its count.
fn upper_end((number, count): (usize, &AtomicU64)) -> (f64, u64) {
    let end = if number + 1 == BUCKETS {
        f64::INFINITY
    } else {
        Duration::from_nanos(FIRST_NANOSECONDS << number).as_secs_f64()
    };
    (end, count.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_falls_into_the_first_bucket_that_holds_it() {
        let ends = [(0, 0), (1, 0), (4_000, 0), (4_001, 1), (8_000, 1), (8_001, 2), (65_536_000, 14)];
        for (nanoseconds, expected) in ends {
            assert_eq!(bucket(nanoseconds), expected, "{nanoseconds}");
        }
        assert_eq!(bucket(65_536_001), BUCKETS - 1);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }
}
