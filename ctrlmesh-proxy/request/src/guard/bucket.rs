//! A token bucket by the generic cell rate algorithm (GCRA), in integers.
//!
//! The bucket counts time in units of 1/`limit` nanosecond. A request costs `interval` of these units. So nothing is
//! rounded, also where `limit` does not divide the interval.

use ctrlmesh_common::policy::guard::Bucket;
use serde::{Deserialize, Serialize};

/// Nanoseconds since some fixed moment, by a clock that never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(pub u64);

/// What a bucket holds. The default is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenBucket {
    /// When the bucket is full again, in units of 1/`limit` nanosecond.
    full_at: u128,
}

impl Moment {
    /// This moment, `nanoseconds` later.
    #[must_use]
    pub fn after(self, nanoseconds: u64) -> Self {
        Self(self.0.saturating_add(nanoseconds))
    }
}

impl TokenBucket {
    /// One that holds nothing yet.
    pub fn empty(bucket: &Bucket, now: Moment) -> Self {
        Self { full_at: units(bucket, now) + size(bucket) }
    }

    /// What it holds, in a bucket of another size: no more than fits. Less than a request may be lost, and nothing is
    /// won.
    #[must_use]
    pub fn resized(self, from: &Bucket, to: &Bucket, now: Moment) -> Self {
        if from == to {
            return self;
        }
        let missing = self.full_at.saturating_sub(units(from, now));
        let holds = size(from).saturating_sub(missing);
        let (one, of_new) = (u128::from(from.interval_nanoseconds), u128::from(to.interval_nanoseconds));
        let holds = (holds / one).saturating_mul(of_new).saturating_add(holds % one * of_new / one);
        Self { full_at: units(to, now) + (size(to) - holds.min(size(to))) }
    }

    /// When a request may pass: `now`, later, or never.
    pub fn next(&self, bucket: &Bucket, now: Moment) -> Option<Moment> {
        if bucket.burst == 0 {
            return None;
        }
        let (limit, cost) = (u128::from(bucket.limit), u128::from(bucket.interval_nanoseconds));
        let earliest = (self.full_at + cost).saturating_sub(size(bucket));
        if earliest <= units(bucket, now) {
            return Some(now);
        }
        let nanoseconds = if limit == 0 { None } else { Some(earliest.div_ceil(limit)) };
        nanoseconds.and_then(|nanoseconds| u64::try_from(nanoseconds).ok()).map(Moment)
    }

    /// Takes what one request costs. The caller has asked [`Self::next`].
    pub fn take(&mut self, bucket: &Bucket, now: Moment) {
        self.full_at = self.full_at.max(units(bucket, now)) + u128::from(bucket.interval_nanoseconds);
    }
}

/// What a full bucket holds: at most 96 bits.
fn size(bucket: &Bucket) -> u128 {
    u128::from(bucket.burst) * u128::from(bucket.interval_nanoseconds)
}

/// At most 96 bits. Without a limit no time passes for the bucket, so nothing flows in.
fn units(bucket: &Bucket, now: Moment) -> u128 {
    u128::from(now.0) * u128::from(bucket.limit)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn bucket(burst: u32, limit: u32, interval_nanoseconds: u64) -> Bucket {
        Bucket { burst, limit, interval_nanoseconds }
    }

    /// Whether a request passes at `now`; takes what it costs.
    fn passes(tokens: &mut TokenBucket, bucket: &Bucket, now: Moment) -> bool {
        let passes = tokens.next(bucket, now) == Some(now);
        if passes {
            tokens.take(bucket, now);
        }
        passes
    }

    #[test]
    fn a_burst_passes_and_then_what_flows_in() {
        let (size, mut tokens) = (bucket(5, 2, SECOND), TokenBucket::default());
        let begin = Moment(7 * SECOND);
        for _ in 0..5 {
            assert!(passes(&mut tokens, &size, begin));
        }
        assert_eq!(tokens.next(&size, begin), Some(begin.after(SECOND / 2)));
        assert!(!passes(&mut tokens, &size, begin.after(SECOND / 2 - 1)));
        assert!(passes(&mut tokens, &size, begin.after(SECOND / 2)));
        assert!(!passes(&mut tokens, &size, begin.after(SECOND / 2)));
    }

    #[test]
    fn nothing_flows_in_without_a_limit() {
        let (size, mut tokens) = (bucket(2, 0, SECOND), TokenBucket::default());
        assert!(passes(&mut tokens, &size, Moment(0)) && passes(&mut tokens, &size, Moment(u64::MAX)));
        assert_eq!(tokens.next(&size, Moment(u64::MAX)), None);
    }

    #[test]
    fn a_limit_that_does_not_divide_the_interval_is_exact() {
        // Three in ten nanoseconds, so that the tokens come at 10/3, 20/3 and 10.
        let (size, mut tokens) = (bucket(1, 3, 10), TokenBucket::default());
        let passed: Vec<u64> = (0..=30).filter(|now| passes(&mut tokens, &size, Moment(*now))).collect();
        assert_eq!(passed.len(), 8);
        let (size, mut tokens) = (bucket(4, 3, 10), TokenBucket::default());
        while passes(&mut tokens, &size, Moment(0)) {}
        let flowed_in = (1..=3000).map(|now| {
            let mut passed = 0;
            while passes(&mut tokens, &size, Moment(now)) {
                passed += 1;
            }
            passed
        });
        assert_eq!(flowed_in.sum::<u32>(), 900);
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let (size, mut tokens) = (bucket(u32::MAX, u32::MAX, u64::MAX), TokenBucket::default());
        for _ in 0..1000 {
            assert!(passes(&mut tokens, &size, Moment(u64::MAX)));
        }
        let (size, mut tokens) = (bucket(1, 1, u64::MAX), TokenBucket::default());
        assert!(passes(&mut tokens, &size, Moment(u64::MAX)));
        assert_eq!(tokens.next(&size, Moment(u64::MAX)), None, "later than any moment");
    }

    /// A bucket as people describe it: tokens in exact fractions, with `interval` as the denominator.
    pub(crate) struct NaiveBucket {
        size: Bucket,
        numerator: u128,
        at: u64,
    }

    impl NaiveBucket {
        pub(crate) fn full(size: Bucket, at: u64) -> Self {
            Self { size, numerator: u128::from(size.burst) * u128::from(size.interval_nanoseconds), at }
        }

        /// Whether it holds a token at `now`.
        pub(crate) fn has_token(&mut self, now: u64) -> bool {
            let one = u128::from(self.size.interval_nanoseconds);
            let flowed_in = u128::from(now - self.at) * u128::from(self.size.limit);
            self.numerator = (self.numerator + flowed_in).min(u128::from(self.size.burst) * one);
            self.at = now;
            self.numerator >= one
        }

        pub(crate) fn take(&mut self) {
            self.numerator -= u128::from(self.size.interval_nanoseconds);
        }
    }

    #[test]
    fn an_empty_bucket_fills_as_time_goes() {
        let size = bucket(3, 2, SECOND);
        let mut tokens = TokenBucket::empty(&size, Moment(SECOND));
        assert_eq!(tokens.next(&size, Moment(SECOND)), Some(Moment(SECOND + SECOND / 2)));
        let later = Moment(100 * SECOND);
        assert_eq!((0..9).filter(|_| passes(&mut tokens, &size, later)).count(), 3);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// As exactly as whole requests show.
        #[test]
        fn what_a_bucket_holds_stays_with_another_size(
            bursts in (1..20_u32, 0..20_u32),
            intervals in (1..1000_u64, 1..1000_u64),
            limit in 1..50_u32,
            taken in 0..20_u32,
            now in 0..u64::from(u32::MAX),
        ) {
            let (from, to) = (bucket(bursts.0, limit, intervals.0), bucket(bursts.1, limit, intervals.1));
            prop_assume!(from != to);
            let mut tokens = TokenBucket::default();
            let left = bursts.0.saturating_sub(taken);
            for _ in 0..taken {
                passes(&mut tokens, &from, Moment(now));
            }
            let mut resized = tokens.resized(&from, &to, Moment(now));
            let passed = (0..50).filter(|_| passes(&mut resized, &to, Moment(now))).count();
            prop_assert_eq!(passed, usize::try_from(left.min(bursts.1)).unwrap());
            let back = tokens.resized(&from, &to, Moment(now)).resized(&to, &from, Moment(now));
            prop_assert!(back.full_at >= tokens.full_at.max(units(&from, Moment(now))));
        }

        #[test]
        fn it_does_what_a_bucket_of_fractions_does(
            burst in 1..20_u32,
            limit in 0..50_u32,
            interval in 1..1000_u64,
            begin in 0..u64::from(u32::MAX),
            steps in prop::collection::vec(0..40_u64, 1..300),
        ) {
            let size = bucket(burst, limit, interval);
            let mut naive = NaiveBucket::full(size, begin);
            let (mut tokens, mut now) = (TokenBucket::default(), begin);
            for step in steps {
                now += step;
                let next = tokens.next(&size, Moment(now));
                let has_token = naive.has_token(now);
                prop_assert_eq!(passes(&mut tokens, &size, Moment(now)), has_token);
                if has_token {
                    naive.take();
                }
                // A request passes at the moment that is named, and not before.
                if let Some(Moment(next)) = next.filter(|next| next.0 > now) {
                    let mut later = tokens;
                    prop_assert!(!passes(&mut later.clone(), &size, Moment(next - 1)));
                    prop_assert!(passes(&mut later, &size, Moment(next)));
                }
            }
        }
    }
}
