//! Sends heartbeats for pods from a thread of its own.
//!
//! The thread that accepts connections also attaches pods, and sometimes waits for other loaders. Heartbeats from there
//! would stop for all pods meanwhile. This thread stops them itself where the accepting thread hangs.

use std::collections::BTreeSet;
use std::io;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ctrlmesh_runtime::sync::lock;
use tokio::time;
use tracing::warn;

use crate::policy::file_poll::POLL_INTERVAL;
use ctrlmesh_intercept::Slot;
use ctrlmesh_runtime::drain::Drain;

/// The accepting thread counts as hanging when it is busy for longer.
const MAX_BUSY: Duration = Duration::from_secs(30);

/// Sends heartbeats until it is dropped.
pub(super) struct HeartbeatThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    slots: BTreeSet<Slot>,
    /// When the accepting thread last ran.
    last_run: Instant,
    over: bool,
}

impl HeartbeatThread {
    /// Starts the thread, without pods.
    pub(super) fn begin(mut beats: ctrlmesh_intercept::HeartbeatWriter, drain: &Drain) -> io::Result<Self> {
        let state = State { slots: BTreeSet::new(), last_run: Instant::now(), over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), ended: Condvar::new() });
        let beating = shared.clone();
        let thread = thread::Builder::new()
            .name("beat".to_owned())
            .spawn(move || beating.beat_until_over(|slot| beats.beat(u32::from(slot.get()))))?;
        drain.spawn(record_runs(shared.clone(), drain.clone()));
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Adds a pod.
    pub(super) fn join(&self, slot: Slot) {
        self.shared.state().slots.insert(slot);
    }

    /// Removes a pod.
    pub(super) fn leave(&self, slot: Slot) {
        self.shared.state().slots.remove(&slot);
    }

    /// Removes all pods.
    pub(super) fn stop(&self) {
        drop(mem::take(&mut self.shared.state().slots));
    }
}

impl Drop for HeartbeatThread {
    fn drop(&mut self) {
        self.shared.state().over = true;
        self.shared.ended.notify_all();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            warn!("the thread that beats panicked");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn beat_until_over(&self, mut beat: impl FnMut(Slot) -> Result<(), ctrlmesh_intercept::Error>) {
        while let Some(slots) = self.due() {
            for slot in slots {
                // A pod that is gone must not stop the heartbeats of others.
                if let Err(error) = beat(slot)
                    && self.state().slots.contains(&slot)
                {
                    warn!(error = &error as &dyn std::error::Error, %slot, "no beat for a pod");
                }
            }
            drop(self.ended.wait_timeout_while(self.state(), POLL_INTERVAL, |state| !state.over));
        }
    }

    /// The pods to beat for now; `None` when the thread is to end.
    fn due(&self) -> Option<BTreeSet<Slot>> {
        let state = self.state();
        let is_alive = state.last_run.elapsed() < MAX_BUSY;
        let slots = if is_alive { state.slots.clone() } else { BTreeSet::new() };
        (!state.over).then_some(slots)
    }
}

/// Records that the accepting thread runs, until shutdown.
async fn record_runs(shared: Arc<Shared>, drain: Drain) {
    let ticks = async {
        loop {
            shared.state().last_run = Instant::now();
            time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        // Shutdown: the pods are released.
        () = drain.started() => {}
        () = ticks => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_busy_too_long_counts_as_hanging() {
        let slots = BTreeSet::from([Slot::new(7)]);
        let since = |busy: Duration| {
            let last_run = Instant::now().checked_sub(busy).unwrap();
            let state = State { slots: slots.clone(), last_run, over: false };
            Shared { state: Mutex::new(state), ended: Condvar::new() }.due()
        };
        assert_eq!(since(Duration::ZERO), Some(slots.clone()));
        assert_eq!(since(MAX_BUSY), Some(BTreeSet::new()));
    }
}
