//! The states of guards, on their way to the manager.
//!
//! Each pod's guards publish theirs here. The stream to the manager sends what changed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ctrlmesh_common::wire::GuardState;
use tokio::sync::watch;

use super::PodName;

/// The newest states of each pod that is served and has guards.
pub(crate) type StatesByPod = HashMap<PodName, PodStates>;

/// The states of the guards of one pod.
#[derive(Clone, Debug)]
pub(crate) struct PodStates {
    number: u64,
    pub(crate) states: Arc<[GuardState]>,
}

/// The states of the guards of all pods.
#[derive(Clone, Debug)]
pub struct GuardReports(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    by_pod: watch::Sender<StatesByPod>,
    publishers: AtomicU64,
}

/// Where the guards of one pod publish their states, until it is dropped. The default publishes them nowhere.
#[derive(Debug, Default)]
pub struct PublishGuards(Option<Publisher>);

#[derive(Debug)]
struct Publisher {
    to: GuardReports,
    pod: PodName,
    number: u64,
}

impl Default for GuardReports {
    fn default() -> Self {
        let by_pod = watch::Sender::new(HashMap::new());
        Self(Arc::new(Shared { by_pod, publishers: AtomicU64::new(0) }))
    }
}

impl GuardReports {
    /// For the guards of a pod that is about to be served.
    pub fn begin(&self, pod: PodName) -> PublishGuards {
        let number = self.0.publishers.fetch_add(1, Ordering::Relaxed);
        PublishGuards(Some(Publisher { to: self.clone(), pod, number }))
    }

    pub(crate) fn changes(&self) -> watch::Receiver<StatesByPod> {
        self.0.by_pod.subscribe()
    }
}

impl PublishGuards {
    /// Replaces the states. A pod without guards has none.
    pub(crate) fn publish(&self, states: Vec<GuardState>) {
        let Some(Publisher { to, pod, number }) = &self.0 else { return };
        to.0.by_pod.send_if_modified(|all| {
            if states.is_empty() {
                return all.remove(pod).is_some();
            }
            let is_new = all.get(pod).is_none_or(|before| *before.states != *states);
            if is_new {
                all.insert(pod.clone(), PodStates { number: *number, states: states.into() });
            }
            is_new
        });
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let Self { to, pod, number } = self;
        to.0.by_pod.send_if_modified(|all| {
            // The pod may be served anew already.
            let is_ours = all.get(pod).is_some_and(|one| one.number == *number);
            is_ours && all.remove(pod).is_some()
        });
    }
}
