//! The guards of one pod at work: rules and their states, clock, metrics and file.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ctrlmesh_common::policy::{Guard, Policy};
use ctrlmesh_request::guard::{Guards, Moment, OpenRule, ProbeId, Refused};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::boot_clock;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_runtime::telemetry;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::task;
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::{Metrics, RuleMetrics};
use crate::policy::pod_file::{FileKind, PodFile};
use crate::policy::{Current, PodName};

/// Between two writes of the file: breakers may open and close often.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// The guards of one pod. Its connections share them.
#[derive(Debug)]
pub struct PodGuards {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
    kept: Option<GuardFile>,
    /// Notified when the file is to be written.
    unsaved: Notify,
}

#[derive(Debug)]
struct State {
    current: Current,
    /// The policy whose guards these are.
    policy: Option<Arc<Policy>>,
    guards: Guards,
    /// Of each guard, in the same order.
    metrics: Vec<RuleMetrics>,
    /// [`Guards::changes`] when the metrics were last written.
    shown: u64,
    /// The breakers that are open, as the file is to have them.
    open: Vec<OpenRule>,
    is_saved: bool,
}

/// A request that is to show whether breakers can close. Dropped without an answer after it was sent, it has failed.
#[derive(Debug)]
pub(crate) struct Probe {
    of: Arc<PodGuards>,
    id: ProbeId,
    is_sent: bool,
    succeeded: bool,
}

/// Where a pod's open breakers are kept for the next process. Tokens are not kept.
#[derive(Clone, Debug)]
pub struct GuardFile {
    file: PodFile,
    /// The pod's UID, or empty: the breakers of another pod of the same name do not count.
    uid: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredGuards {
    uid: String,
    open: Vec<OpenRule>,
}

impl PodGuards {
    /// Follows the guards of `current`, and begins with the breakers that another process left open.
    pub fn new(current: Current, metrics: &Arc<Metrics>, kept: Option<GuardFile>) -> Arc<Self> {
        let open = kept.as_ref().map(GuardFile::read).unwrap_or_default();
        let guards = Guards::restored(open.clone(), now());
        let state = State { current, policy: None, guards, metrics: Vec::new(), shown: 0, open, is_saved: true };
        let guards = Self { state: Mutex::new(state), metrics: metrics.clone(), kept, unsaved: Notify::new() };
        drop(guards.latest_state());
        Arc::new(guards)
    }

    /// Takes each change of the policy, and writes the file, until shutdown or until the pod is `gone`. Requests take a
    /// change, too; so this is for what shows without a request: metrics, and resets that come and go. After shutdown
    /// has begun, the file is the next process's.
    pub async fn follow(self: Arc<Self>, drain: Drain, gone: Option<CancellationToken>) {
        let mut current = lock(&self.state).current.clone();
        let gone = async {
            match &gone {
                Some(gone) => gone.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let following = async {
            while current.changed().await.is_ok() {
                drop(self.latest_state());
            }
        };
        let saving = async {
            loop {
                self.unsaved.notified().await;
                let next = Instant::now() + SAVE_INTERVAL;
                self.clone().save_aside().await;
                time::sleep_until(next).await;
            }
        };
        tokio::select! {
            () = drain.started() => {}
            () = gone => return,
            () = following => {}
            () = saving => {}
        }
        self.clone().save_aside().await;
    }

    /// Writes the file in another thread.
    async fn save_aside(self: Arc<Self>) {
        if let Err(error) = task::spawn_blocking(move || self.save()).await {
            let error = telemetry::chain(&error);
            warn!(error, "circuit breakers not written");
        }
    }

    /// Writes the file, if it is to change.
    fn save(&self) {
        let mut state = lock(&self.state);
        let is_saved = std::mem::replace(&mut state.is_saved, true);
        let open = state.open.clone();
        drop(state);
        if let Some(kept) = self.kept.as_ref().filter(|_| !is_saved) {
            kept.write(&open);
        }
    }

    /// Charges a request to every rule that matches it. It may pass as a probe.
    pub(crate) fn admit(self: &Arc<Self>, info: &RequestInfo<'_>) -> Result<Option<Probe>, Refused> {
        let mut state = self.latest_state();
        match state.guards.admit(info, now()) {
            Ok(admitted) => {
                for at in admitted.charged {
                    state.metrics[at].allowed.inc();
                }
                let probe = admitted.probe.map(|id| Probe { of: self.clone(), id, is_sent: false, succeeded: false });
                drop(state);
                Ok(probe)
            }
            Err((refused, refusing)) => {
                for at in refusing {
                    state.metrics[at].refused.inc();
                }
                self.show(&mut state);
                drop(state);
                Err(refused)
            }
        }
    }

    fn end_probe(&self, &Probe { id, is_sent, succeeded, .. }: &Probe) {
        let mut state = self.latest_state();
        if is_sent {
            state.guards.probe_ended(id, succeeded, now());
        } else {
            state.guards.probe_unsent(id);
        }
        self.show(&mut state);
        drop(state);
    }

    /// The state, once it follows the policy that is in force.
    fn latest_state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        if let Some(policy) = state.latest() {
            let is_same = state.policy.as_ref().is_some_and(|before| before.guards() == policy.guards());
            if !is_same {
                let State { guards, metrics, .. } = &mut *state;
                let former = guards.states().map(|(guard, _)| name(guard)).zip(metrics.drain(..));
                let mut former: HashMap<String, RuleMetrics> = former.collect();
                let of_rule = |name| former.remove(&name).unwrap_or_else(|| self.metrics.guards.rule(name));
                metrics.extend(policy.guards().iter().map(name).map(of_rule));
                guards.replace(policy.guards());
            }
            state.policy = Some(policy);
            self.show(&mut state);
        }
        state
    }

    /// Writes metrics, and has the file written, where rules came, went, opened or closed.
    fn show(&self, state: &mut State) {
        let changes = state.guards.changes();
        if std::mem::replace(&mut state.shown, changes) == changes {
            return;
        }
        let State { guards, metrics, open, is_saved, .. } = state;
        for ((guard, is_open), metrics) in guards.states().zip(metrics) {
            if metrics.set_open(is_open) {
                let (breaker, rule) = (&guard.breaker, &guard.rule);
                info!(breaker, rule, open = is_open, "circuit breaker changed");
            }
        }
        let opened = guards.open();
        if *open != opened {
            (*open, *is_saved) = (opened, false);
            self.unsaved.notify_one();
        }
    }
}

impl State {
    /// The policy in force, if it is another.
    fn latest(&mut self) -> Option<Arc<Policy>> {
        let latest = self.current.borrow_and_update();
        let is_known = self.policy.as_ref().is_some_and(|policy| Arc::ptr_eq(policy, &latest));
        (!is_known).then(|| latest.clone())
    }
}

impl Probe {
    /// From here on, no answer is a failure.
    pub(crate) fn sent(&mut self) {
        self.is_sent = true;
    }

    /// Takes the API server's answer. Breakers close, unless it says that it is not well, or that too much is asked.
    pub(crate) fn answered(mut self, status: StatusCode) {
        self.succeeded = !status.is_server_error() && status != StatusCode::TOO_MANY_REQUESTS;
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.of.end_probe(self);
    }
}

impl GuardFile {
    /// `state` is the state folder.
    pub fn of(state: &Path, pod: Option<&PodName>, uid: &str) -> Self {
        Self { file: PodFile::of(FileKind::Guards, state, pod), uid: uid.to_owned() }
    }

    /// Where the file cannot be read, every breaker begins closed.
    fn read(&self) -> Vec<OpenRule> {
        let stored = self.file.read::<StoredGuards>().unwrap_or_else(|error| {
            let error = telemetry::chain(&error);
            warn!(error, file = %self.file.path().display(), "circuit breakers begin closed");
            None
        });
        stored.filter(|stored| stored.uid == self.uid).map(|stored| stored.open).unwrap_or_default()
    }

    fn write(&self, open: &[OpenRule]) {
        let stored = StoredGuards { uid: self.uid.clone(), open: open.to_vec() };
        if let Err(error) = self.file.replace(&stored) {
            let error = telemetry::chain(&error);
            warn!(error, file = %self.file.path().display(), "a restart has the circuit breakers from before");
        }
    }
}

/// By the clock that is the same for every process until the machine starts anew.
fn now() -> Moment {
    Moment(u64::try_from(boot_clock::now().as_nanos()).unwrap_or(u64::MAX))
}

fn name(guard: &Guard) -> String {
    format!("{}/{}", guard.breaker, guard.rule)
}

#[cfg(test)]
mod tests;
