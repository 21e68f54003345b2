//! Limits how many certificates one pod gets.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use tokio::time::Instant;

/// Per pod and [`PERIOD`]. A proxy needs one a day, and one each time it starts without its state.
const MOST: u32 = 20;

const PERIOD: Duration = Duration::from_mins(10);

#[derive(Debug, Default)]
pub struct SigningQuota {
    periods: Mutex<HashMap<String, Period>>,
}

#[derive(Debug)]
struct Period {
    began: Instant,
    count: u32,
}

impl SigningQuota {
    /// Counts one certificate. False where the pod has had too many.
    pub(super) fn take(&self, uid: &str) -> bool {
        let now = Instant::now();
        let mut periods = lock(&self.periods);
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
        let quota = SigningQuota::default();
        for _ in 0..MOST {
            assert!(quota.take("one"));
        }
        assert!(!quota.take("one"));
        assert!(quota.take("other"));
        time::advance(PERIOD).await;
        assert!(quota.take("one"));
        assert_eq!(quota.periods.lock().unwrap().len(), 1, "what is over is forgotten");
    }
}
