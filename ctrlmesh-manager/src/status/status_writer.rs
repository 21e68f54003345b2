//! Who writes the status of the `ManagerState` next, and when?
//!
//! Two tasks of the leader write it: who leads, and how objects are labelled. Each reads it, changes its part and writes it
//! while it has the status_writer, so that neither meets the other's write, and both together write no more than once a second.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{self, Instant};

/// How long what was written stands before it is written again.
const PERIOD: Duration = Duration::from_secs(1);

/// The one status_writer, for whoever holds a copy.
#[derive(Clone, Debug, Default)]
pub struct StatusWriter(Arc<Mutex<Option<Instant>>>);

/// The status_writer in somebody's hand, until it is dropped.
#[derive(Debug)]
pub struct StatusPermit<'a> {
    last: MutexGuard<'a, Option<Instant>>,
    writes: bool,
}

// === impl StatusWriter ===

impl StatusWriter {
    /// Waits until nobody else has it, and until it may be written again.
    pub async fn take(&self) -> StatusPermit<'_> {
        let last = self.0.lock().await;
        if let Some(last) = *last {
            time::sleep_until(last + PERIOD).await;
        }
        StatusPermit { last, writes: false }
    }
}

// === impl StatusPermit ===

impl StatusPermit<'_> {
    /// Says that it is being written; it may be again a second after this is dropped, when that has ended.
    pub fn writes(&mut self) {
        self.writes = true;
    }
}

impl Drop for StatusPermit<'_> {
    fn drop(&mut self) {
        if self.writes {
            *self.last = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn those_who_share_it_write_once_a_second_and_who_wrote_nothing_holds_nobody_up() {
        let (status_writer, start) = (StatusWriter::default(), Instant::now());
        status_writer.take().await.writes();
        drop(status_writer.clone().take().await);
        assert_eq!(start.elapsed(), PERIOD);
        status_writer.take().await.writes();
        assert_eq!(start.elapsed(), PERIOD);
        status_writer.take().await.writes();
        assert_eq!(start.elapsed(), PERIOD * 2);
    }
}
