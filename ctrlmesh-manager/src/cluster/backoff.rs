//! Limits repeated work to a share of one processor, however large the cluster is.
//!
//! The pause after the work is proportional to how long the work took.

use std::time::Duration;

use tokio::time::Instant;

/// Longest pause: a machine that was suspended during the work did not work for all that time.
const MOST: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff(Option<Instant>);

impl Backoff {
    /// A pause of `times` the duration of the work, from `begun` until `now`.
    pub fn after(begun: Instant, now: Instant, times: u32) -> Self {
        let rest = now.saturating_duration_since(begun).saturating_mul(times);
        Self(Some(now + rest.min(MOST)))
    }

    pub fn is_over(self, now: Instant) -> bool {
        self.0.is_none_or(|until| now >= until)
    }

    /// The end of the pause, or `now` if there is none.
    pub fn until(self, now: Instant) -> Instant {
        self.0.map_or(now, |until| until.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_a_multiple_of_the_work_and_bounded() {
        let begun = Instant::now();
        assert!(Backoff::default().is_over(begun) && Backoff::default().until(begun) == begun);
        for (worked, rests) in [(0, 0), (10, 40), (1000, 4000), (1500, 5000), (3_600_000, 5000)] {
            let now = begun + Duration::from_millis(worked);
            let (rest, end) = (Backoff::after(begun, now, 4), now + Duration::from_millis(rests));
            assert_eq!(rest.until(now), end, "{worked}");
            assert!(rests == 0 || !rest.is_over(end - Duration::from_millis(1)));
            assert!(rest.is_over(end));
            let later = end + Duration::from_secs(1);
            assert_eq!(rest.until(later), later);
        }
    }
}
