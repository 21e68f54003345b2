//! Limits how many objects are labelled per second.

use std::sync::Mutex;
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use tokio::time::{self, Instant};

#[derive(Debug)]
pub struct RateLimit {
    period: Duration,
    next: Mutex<Option<Instant>>,
}

impl RateLimit {
    /// 0 is taken for 1.
    pub fn per_second(rate: u32) -> Self {
        Self { period: Duration::from_secs(1) / rate.max(1), next: Mutex::new(None) }
    }

    /// Waits for a slot. Slots are given in order of the calls, and unused ones are lost.
    pub(super) async fn wait(&self) {
        let turn = {
            let mut next = lock(&self.next);
            let turn = next.unwrap_or_else(Instant::now).max(Instant::now());
            *next = Some(turn + self.period);
            turn
        };
        time::sleep_until(turn).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slots_are_given_at_the_rate_and_in_order() {
        let rate_limit = RateLimit::per_second(10);
        let start = Instant::now();
        let turn = |number: u8| {
            let rate_limit = &rate_limit;
            async move {
                rate_limit.wait().await;
                (number, start.elapsed().as_millis())
            }
        };
        let (one, two, three) = tokio::join!(turn(1), turn(2), turn(3));
        assert_eq!([one, two, three], [(1, 0), (2, 100), (3, 200)]);
        time::sleep(Duration::from_secs(5)).await;
        assert_eq!(turn(4).await.1, 5200, "what was not used is not saved up");
    }
}
