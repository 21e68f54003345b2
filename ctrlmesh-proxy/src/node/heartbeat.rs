//! Sends heartbeats for pods from a thread of its own.
//!
//! A thread of its own: the one that accepts connections attaches pods too, and waits for other loaders at times, which
//! would silence it for all pods. It beats only for as long as that thread comes round, so that one that hangs is found
//! out all the same.

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

/// For how long the thread that accepts may be busy before it counts as hanging.
const LEASH: Duration = Duration::from_secs(30);

/// Beats for pods until it is dropped.
pub(super) struct HeartbeatThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    /// For whom.
    slots: BTreeSet<Slot>,
    /// When the thread that accepts came round at last.
    round: Instant,
    over: bool,
}

impl HeartbeatThread {
    /// Begins, for nobody yet.
    pub(super) fn begin(
        mut beats: ctrlmesh_intercept::HeartbeatWriter,
        drain: &Drain,
    ) -> io::Result<Self> {
        let state = State { slots: BTreeSet::new(), round: Instant::now(), over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), ended: Condvar::new() });
        let told = shared.clone();
        let thread = thread::Builder::new()
            .name("beat".to_owned())
            .spawn(move || told.beat_until_over(|slot| beats.beat(u32::from(slot.get()))))?;
        drain.spawn(come_round(shared.clone(), drain.clone()));
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Beats for a pod from now on.
    pub(super) fn join(&self, slot: Slot) {
        self.shared.state().slots.insert(slot);
    }

    /// Beats for a pod no more.
    pub(super) fn leave(&self, slot: Slot) {
        self.shared.state().slots.remove(&slot);
    }

    /// Beats for nobody.
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
                // One that is gone already must not silence the others.
                if let Err(error) = beat(slot)
                    && self.state().slots.contains(&slot)
                {
                    warn!(error = &error as &dyn std::error::Error, %slot, "no beat for a pod");
                }
            }
            drop(self.ended.wait_timeout_while(self.state(), POLL_INTERVAL, |state| !state.over));
        }
    }

    /// For whom to beat now; nothing when it is over.
    fn due(&self) -> Option<BTreeSet<Slot>> {
        let state = self.state();
        let comes_round = state.round.elapsed() < LEASH;
        let slots = if comes_round { state.slots.clone() } else { BTreeSet::new() };
        (!state.over).then_some(slots)
    }
}

/// Says that this thread comes round, until shutdown.
async fn come_round(shared: Arc<Shared>, drain: Drain) {
    let ticks = async {
        loop {
            shared.state().round = Instant::now();
            time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        // The pods are let go of.
        () = drain.started() => {}
        () = ticks => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_come_round_counts_as_hanging() {
        let slots = BTreeSet::from([Slot::new(7)]);
        let since = |busy: Duration| {
            let round = Instant::now().checked_sub(busy).unwrap();
            let state = State { slots: slots.clone(), round, over: false };
            Shared { state: Mutex::new(state), ended: Condvar::new() }.due()
        };
        assert_eq!(since(Duration::ZERO), Some(slots.clone()));
        assert_eq!(since(LEASH), Some(BTreeSet::new()));
    }
}
