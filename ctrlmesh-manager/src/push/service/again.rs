//! When is the token of a proxy that follows reviewed again?

use std::time::{Duration, SystemTime};

use ctrlmesh_runtime::jitter::random;

/// How often tokens are reviewed again.
#[derive(Clone, Copy, Debug)]
pub struct Again {
    /// After how long, at least; up to half as long more, so that ten thousand are not reviewed together.
    pub after: Duration,
}

impl Default for Again {
    fn default() -> Self {
        Self { after: Duration::from_mins(4) }
    }
}

// === impl Again ===

impl Again {
    /// How long until who was `reviewed` then is reviewed again. Who should have been while it was away, within half of
    /// `after`: others come back at the same time.
    pub(super) fn due(self, reviewed: SystemTime) -> Duration {
        let ago = SystemTime::now().duration_since(reviewed).unwrap_or_default();
        let rest = (self.after + random(self.after / 2)).saturating_sub(ago);
        if rest.is_zero() { random(self.after / 2) } else { rest }
    }

    /// How long until it is tried again where the API server did not answer.
    pub(super) fn retry(self) -> Duration {
        self.after + random(self.after / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_review_is_due_when_it_would_have_been_and_of_many_that_are_overdue_not_at_once() {
        let (again, now) = (Again::default(), SystemTime::now());
        let (least, most) = (again.after, again.after * 3 / 2);
        let due = |ago| (0..50).map(move |_| again.due(now - ago));
        assert!(due(Duration::ZERO).all(|due| due + Duration::from_mins(1) > least && due <= most));
        let half = least / 2;
        assert!(due(half).all(|due| due + half <= most));
        let overdue: Vec<_> = due(most).collect();
        assert!(overdue.iter().all(|due| *due < half));
        let longest = overdue.iter().max().unwrap();
        assert!(*longest > half / 2, "they are spread: {longest:?}");
        assert!((0..50).all(|_| again.retry() >= least));
    }
}
