//! A histogram of times, whose buckets double in width. It is lock-free where it has no exemplars.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::TraceId;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::{MetricType, TypedMetric};

use super::exemplar::{self, TraceLabel};

/// The last one is for all longer times.
const BUCKETS: usize = 16;

/// Of the time that the proxy adds to a request or to a call of a webhook: up to 4 µs, 8 µs, and so on to 65.536 ms.
pub(super) type AddedTime = TimeHistogram<4_000>;

/// Of the time until a request is answered: up to 1 ms, 2 ms, and so on to 16.384 s.
pub(super) type AnswerTime = TimeHistogram<1_000_000>;

/// `FIRST` is the upper end of the first bucket, in nanoseconds; each bucket is twice as wide as the one before.
#[derive(Clone, Debug, Default)]
pub(super) struct TimeHistogram<const FIRST: u64> {
    counts: Arc<Counts>,
    /// The same with exemplars: only this type of prometheus-client makes them.
    traced: Option<HistogramWithExemplars<TraceLabel>>,
}

#[derive(Debug, Default)]
struct Counts {
    buckets: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
}

impl<const FIRST: u64> TimeHistogram<FIRST> {
    /// With exemplars where `traced`.
    pub(super) fn new(traced: bool) -> Self {
        let ends = || (0..BUCKETS - 1).map(|at| upper_end(at, FIRST));
        Self { counts: Arc::default(), traced: traced.then(|| HistogramWithExemplars::new(ends())) }
    }

    /// `trace` is that of the request that took the time, if it is recorded.
    pub(super) fn observe(&self, time: Duration, trace: Option<TraceId>) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts.buckets[bucket(nanoseconds, FIRST)].fetch_add(1, Ordering::Relaxed);
        self.counts.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        if let Some(traced) = &self.traced {
            traced.observe(time.as_secs_f64(), trace.map(exemplar::label), trace.map(|_| SystemTime::now()));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counts.buckets.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }
}

impl<const FIRST: u64> TypedMetric for TimeHistogram<FIRST> {
    const TYPE: MetricType = MetricType::Histogram;
}

impl<const FIRST: u64> EncodeMetric for TimeHistogram<FIRST> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        if let Some(traced) = &self.traced {
            return traced.encode(encoder);
        }
        let counts = self.counts.buckets.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = counts.enumerate().map(|(at, count)| (upper_end(at, FIRST), count)).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let total = Duration::from_nanos(self.counts.nanoseconds.load(Ordering::Relaxed));
        encoder.encode_histogram::<NoLabelSet>(total.as_secs_f64(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// The first bucket whose upper end is not below a time.
fn bucket(nanoseconds: u64, first: u64) -> usize {
    let doublings = u64::BITS - (nanoseconds.saturating_sub(1) / first).leading_zeros();
    BUCKETS.min(doublings as usize + 1) - 1
}

/// A bucket's upper end in seconds.
fn upper_end(at: usize, first: u64) -> f64 {
    if at + 1 == BUCKETS { f64::INFINITY } else { Duration::from_nanos(first << at).as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_falls_into_the_first_bucket_that_holds_it() {
        let ends = [(0, 0), (1, 0), (4_000, 0), (4_001, 1), (8_000, 1), (8_001, 2), (65_536_000, 14)];
        for (nanoseconds, expected) in ends {
            assert_eq!(bucket(nanoseconds, 4_000), expected, "{nanoseconds}");
        }
        assert_eq!(bucket(65_536_001, 4_000), BUCKETS - 1);
        assert_eq!(bucket(u64::MAX, 1_000_000), BUCKETS - 1);
    }
}
