//! Who writes the status of the `ManagerState` next, and when?
//!
//! Two tasks of the leader write it: who leads, and how objects are labelled. Each reads it, changes its part and writes it
//! while it has the pen, so that neither meets the other's write, and both together write no more than once a second.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{self, Instant};

/// How long what was written stands before it is written again.
const PERIOD: Duration = Duration::from_secs(1);

/// The one pen, for whoever holds a copy.
#[derive(Clone, Debug, Default)]
pub struct Pen(Arc<Mutex<Option<Instant>>>);

/// The pen in somebody's hand, until it is dropped.
#[derive(Debug)]
pub struct Held<'a> {
    last: MutexGuard<'a, Option<Instant>>,
    writes: bool,
}

// === impl Pen ===

impl Pen {
    /// Waits until nobody else has it, and until it may be written again.
    pub async fn take(&self) -> Held<'_> {
        let last = self.0.lock().await;
        if let Some(last) = *last {
            time::sleep_until(last + PERIOD).await;
        }
        Held { last, writes: false }
    }
}

// === impl Held ===

impl Held<'_> {
    /// Says that it is being written; it may be again a second after this is dropped, when that has ended.
    pub fn writes(&mut self) {
        self.writes = true;
    }
}

impl Drop for Held<'_> {
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
        let (pen, start) = (Pen::default(), Instant::now());
        pen.take().await.writes();
        drop(pen.clone().take().await);
        assert_eq!(start.elapsed(), PERIOD);
        pen.take().await.writes();
        assert_eq!(start.elapsed(), PERIOD);
        pen.take().await.writes();
        assert_eq!(start.elapsed(), PERIOD * 2);
    }
}
