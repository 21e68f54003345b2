//! How much of a request's time was spent waiting for others?

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

/// Time that the proxy did not spend itself.
#[derive(Debug, Default)]
pub(super) struct Waits(Cell<Duration>);

impl Waits {
    /// Waits for what somebody else does.
    pub(super) async fn on<T>(&self, others: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let done = others.await;
        self.0.set(self.0.get() + begun.elapsed());
        done
    }

    /// How long that took altogether.
    pub(super) fn total(&self) -> Duration {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_what_others_do_counts() {
        let waits = Waits::default();
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            time::sleep(second).await;
            assert_eq!(
                waits
                    .on(async {
                        time::sleep(second).await;
                        7
                    })
                    .await,
                7
            );
        }
        assert_eq!(waits.total(), 2 * second);
    }
}
