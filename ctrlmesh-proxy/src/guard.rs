//! The guards of one pod at work: rules and their states, clock, metrics and file.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_request::guard::{Guards, Moment, OpenRule, ProbeId, Refused};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_runtime::telemetry;
use http::StatusCode;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::{Metrics, RuleMetrics};
use crate::policy::pod_file::{FileKind, PodFile};
use crate::policy::{Current, PodName};

/// The guards of one pod. Its connections share them.
#[derive(Debug)]
pub struct PodGuards {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
    kept: Option<GuardFile>,
}

#[derive(Debug)]
struct State {
    current: Current,
    /// The policy whose guards these are.
    policy: Option<Arc<Policy>>,
    guards: Guards,
    /// Of each guard, in the same order.
    metrics: Vec<RuleMetrics>,
    /// [`Guards::changes`] when metrics and file were last written.
    shown: u64,
    stored: Vec<OpenRule>,
}

/// A request that is to show whether breakers can close. Dropped without an answer, it has failed.
#[derive(Debug)]
pub(crate) struct Probe {
    of: Arc<PodGuards>,
    id: ProbeId,
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
        let stored = kept.as_ref().map(GuardFile::read).unwrap_or_default();
        let guards = Guards::restored(stored.clone(), now());
        let state = State { current, policy: None, guards, metrics: Vec::new(), shown: 0, stored };
        let guards = Self { state: Mutex::new(state), metrics: metrics.clone(), kept };
        drop(guards.state());
        Arc::new(guards)
    }

    /// Takes each change of the policy, until shutdown or until the pod is `gone`. Requests take it, too; so this is
    /// for what shows without a request: metrics, and resets that come and go.
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
                drop(self.state());
            }
        };
        tokio::select! {
            () = drain.started() => {}
            () = gone => {}
            () = following => {}
        }
    }

    /// Charges a request to every rule that matches it. It may pass as a probe.
    pub(crate) fn admit(self: &Arc<Self>, info: &RequestInfo<'_>) -> Result<Option<Probe>, Refused> {
        let mut state = self.state();
        match state.guards.admit(info, now()) {
            Ok(admitted) => {
                for at in admitted.charged {
                    state.metrics[at].allowed.inc();
                }
                let probe = admitted.probe.map(|id| Probe { of: self.clone(), id, succeeded: false });
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

    fn end_probe(&self, probe: ProbeId, succeeded: bool) {
        let mut state = self.state();
        state.guards.probe_ended(probe, succeeded, now());
        self.show(&mut state);
        drop(state);
    }

    /// The state, under the policy that is in force.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        if let Some(policy) = state.latest() {
            let is_same = state.policy.as_ref().is_some_and(|before| before.guards() == policy.guards());
            if !is_same {
                let names = policy.guards().iter().map(|guard| format!("{}/{}", guard.breaker, guard.rule));
                // Before the former ones are dropped, so that the series of rules that stay are not removed.
                let metrics = names.map(|name| self.metrics.guards.rule(name)).collect();
                state.metrics = metrics;
                state.guards.replace(policy.guards());
            }
            state.policy = Some(policy);
            self.show(&mut state);
        }
        state
    }

    /// Writes metrics and file, where rules came, went, opened or closed.
    fn show(&self, state: &mut State) {
        let changes = state.guards.changes();
        if std::mem::replace(&mut state.shown, changes) == changes {
            return;
        }
        let State { guards, metrics, stored, .. } = state;
        for ((guard, is_open), metrics) in guards.states().zip(metrics) {
            if metrics.set_open(is_open) {
                let (breaker, rule) = (&guard.breaker, &guard.rule);
                info!(breaker, rule, open = is_open, "circuit breaker changed");
            }
        }
        let open = guards.open();
        if *stored != open {
            if let Some(kept) = &self.kept {
                kept.write(&open);
            }
            *stored = open;
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
    /// Takes the API server's answer. Breakers close, unless it says that it is not well, or that too much is asked.
    pub(crate) fn answered(mut self, status: StatusCode) {
        self.succeeded = !status.is_server_error() && status != StatusCode::TOO_MANY_REQUESTS;
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.of.end_probe(self.id, self.succeeded);
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

/// The same for every process, until the machine starts anew; nobody can set it back.
fn now() -> Moment {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(std::time::Duration::from).unwrap_or_default();
    Moment(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
