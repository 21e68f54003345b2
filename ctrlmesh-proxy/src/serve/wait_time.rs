//! Measures the part of a request's time that the proxy waits for others.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(super) struct WaitTime(Cell<Duration>);

impl WaitTime {
    pub(super) async fn measure<T>(&self, others: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let done = others.await;
        self.0.set(self.0.get() + begun.elapsed());
        done
    }

    pub(super) fn total(&self) -> Duration {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_measured_futures_count() {
        let waits = WaitTime::default();
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            time::sleep(second).await;
            waits.measure(time::sleep(second)).await;
        }
        assert_eq!(waits.total(), 2 * second);
    }
}
