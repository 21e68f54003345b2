//! Decides when the token of a connected proxy is reviewed again.

use std::time::{Duration, SystemTime};

use ctrlmesh_runtime::jitter::random;

#[derive(Clone, Copy, Debug)]
pub struct ReviewSchedule {
    /// Least interval. Up to half of it is added, so that ten thousand reviews do not come together.
    pub interval: Duration,
}

impl Default for ReviewSchedule {
    fn default() -> Self {
        Self { interval: Duration::from_mins(4) }
    }
}

impl ReviewSchedule {
    /// Time until the next review. One that is overdue comes within half of `interval`: other proxies come back at the
    /// same time.
    pub(super) fn due(self, reviewed: SystemTime) -> Duration {
        let ago = SystemTime::now().duration_since(reviewed).unwrap_or_default();
        let rest = (self.interval + random(self.interval / 2)).saturating_sub(ago);
        if rest.is_zero() { random(self.interval / 2) } else { rest }
    }

    /// Time until the next review after one without an answer.
    pub(super) fn retry(self) -> Duration {
        self.interval + random(self.interval / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reviews_keep_their_schedule_and_overdue_ones_are_spread() {
        let (schedule, now) = (ReviewSchedule::default(), SystemTime::now());
        let (least, most) = (schedule.interval, schedule.interval * 3 / 2);
        let due = |ago| (0..50).map(move |_| schedule.due(now - ago));
        assert!(due(Duration::ZERO).all(|due| due + Duration::from_mins(1) > least && due <= most));
        let half = least / 2;
        assert!(due(half).all(|due| due + half <= most));
        let overdue: Vec<_> = due(most).collect();
        assert!(overdue.iter().all(|due| *due < half));
        let longest = overdue.iter().max().unwrap();
        assert!(*longest > half / 2, "they are spread: {longest:?}");
        assert!((0..50).all(|_| schedule.retry() >= least));
    }
}
