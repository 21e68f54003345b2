//! Serialises the writes to the status of the `ManagerState`, at most one a second.
//!
//! Two tasks of the leader write it: the replica list and the label migration. Each reads, changes its part
//! and writes while it holds the permit.

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::{ManagerState, ManagerStateSpec};
use ctrlmesh_common::names::MANAGER_STATE;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{self, Instant};

/// Least time between two writes.
const PERIOD: Duration = Duration::from_secs(1);

/// Clones share one permit.
#[derive(Clone, Debug, Default)]
pub struct StatusWriter(Arc<Mutex<Option<Instant>>>);

#[derive(Debug)]
pub struct StatusPermit<'a> {
    last: MutexGuard<'a, Option<Instant>>,
    writes: bool,
}

impl StatusWriter {
    /// Waits until no other task has the permit and the last write is a second ago.
    pub async fn take(&self) -> StatusPermit<'_> {
        let last = self.0.lock().await;
        if let Some(last) = *last {
            time::sleep_until(last + PERIOD).await;
        }
        StatusPermit { last, writes: false }
    }
}

impl StatusPermit<'_> {
    /// Marks that a write follows. The next one may come a second after this permit is dropped.
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

/// The `ManagerState`. Where there is none, one is created if `may_create`; else nothing.
pub async fn read_or_create(
    states: &Api<ManagerState>,
    may_create: impl FnOnce() -> bool,
) -> kube::Result<Option<ManagerState>> {
    match states.get_opt(MANAGER_STATE).await? {
        None if may_create() => {
            let state = ManagerState::new(MANAGER_STATE, ManagerStateSpec::default());
            states.create(&PostParams::default(), &state).await.map(Some)
        }
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writers_share_one_write_a_second_and_idle_ones_do_not_block() {
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
