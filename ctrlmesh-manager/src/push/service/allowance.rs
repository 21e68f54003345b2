//! How many certificates may one pod have?

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Certificates of one pod within [`PERIOD`]: a proxy needs one a day, and one each time it starts without its folder.
const MOST: u32 = 20;

/// Over which time they are counted.
const PERIOD: Duration = Duration::from_mins(10);

/// Counts by UID of the pod.
#[derive(Debug, Default)]
pub struct Allowance {
    periods: Mutex<HashMap<String, Period>>,
}

#[derive(Debug)]
struct Period {
    began: Instant,
    count: u32,
}

// === impl Allowance ===

impl Allowance {
    /// Whether the pod may have another one, which it is taken to have then.
    pub(super) fn take(&self, uid: &str) -> bool {
        let now = Instant::now();
        let mut periods = self.periods.lock().unwrap_or_else(PoisonError::into_inner);
        periods.retain(|_, period| now.duration_since(period.began) < PERIOD);
        let period = periods.entry(uid.to_owned()).or_insert(Period { began: now, count: 0 });
        period.count = period.count.saturating_add(1);
        let allowed = period.count <= MOST;
        drop(periods);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use tokio::time;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_pod_has_so_many_in_a_while_and_another_its_own() {
        let allowance = Allowance::default();
        for _ in 0..MOST {
            assert!(allowance.take("one"));
        }
        assert!(!allowance.take("one"));
        assert!(allowance.take("other"));
        time::advance(PERIOD).await;
        assert!(allowance.take("one"));
        assert_eq!(allowance.periods.lock().unwrap().len(), 1, "what is over is forgotten");
    }
}
