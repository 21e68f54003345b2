//! The guards of one pod at work: rules and their states, clock, metrics and file.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::policy::Guard;
use ctrlmesh_common::wire::{GuardState, MAX_GUARD_STATES};
use ctrlmesh_request::egress::Visible;
use ctrlmesh_request::guard::{Admitted, Guards, Moment, OpenRule, ProbeId, Refused};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::boot_clock;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_runtime::telemetry;
use ctrlmesh_runtime::unix_time;
use http::StatusCode;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task;
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::{Metrics, RuleMetrics};
use crate::policy::{Current, FollowedPolicy, PublishGuards, until_gone};

use self::refusals::Refusals;

mod file;
mod refusals;

pub use file::GuardFile;

/// Between two writes of the file: breakers may open and close often.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// How long a request is held. Many clients give one up after 30 s.
const HOLD: Duration = Duration::from_secs(20);

/// Requests of a pod that are held at a time.
const MAX_HELD: usize = 32;

/// Between two reports to the manager.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// The same, where only counts have changed: each report becomes a write to the API server.
const COUNTS_INTERVAL: Duration = Duration::from_secs(10);

/// The guards of one pod. Its connections share them.
#[derive(Debug)]
pub struct PodGuards {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
    kept: Option<GuardFile>,
    /// Notified when the file is to be written.
    unsaved: Notify,
    /// Notified when rules came, went, opened or closed.
    unreported: Notify,
    /// The same, for requests that are held.
    changed: watch::Sender<()>,
    /// For requests that are held.
    room: Arc<Semaphore>,
    /// Of the rules on other servers.
    refusals: Mutex<Refusals>,
}

#[derive(Debug)]
struct State {
    policy: FollowedPolicy,
    guards: Guards,
    /// Of each guard, in the same order.
    rules: Vec<RuleRecord>,
    /// [`Guards::changes`] when the metrics were last written.
    shown: u64,
    /// The breakers that are open, as the file is to have them.
    open: Vec<OpenRule>,
    is_saved: bool,
}

/// What a rule has done in this pod.
#[derive(Debug)]
struct RuleRecord {
    metrics: RuleMetrics,
    allowed: u64,
    refused: u64,
    changed_at: Option<SystemTime>,
}

/// A request that waits for an open breaker to close.
#[derive(Debug)]
pub(crate) struct Hold {
    until: Instant,
    changed: watch::Receiver<()>,
    _permit: OwnedSemaphorePermit,
}

/// A request that is to show whether breakers can close. Dropped without an answer after it was sent, it has failed.
#[derive(Debug)]
pub(crate) struct Probe {
    of: Arc<PodGuards>,
    id: ProbeId,
    is_sent: bool,
    succeeded: bool,
}

impl PodGuards {
    /// Follows the guards of `current`, and begins with the breakers that another process left open.
    pub fn new(current: Current, metrics: &Arc<Metrics>, kept: Option<GuardFile>) -> Arc<Self> {
        let open = kept.as_ref().map(GuardFile::read).unwrap_or_default();
        let guards = Guards::restored(open.clone(), now());
        let policy = FollowedPolicy::new(current);
        let state = State { policy, guards, rules: Vec::new(), shown: 0, open, is_saved: true };
        let (unsaved, unreported) = (Notify::new(), Notify::new());
        let (metrics, changed) = (metrics.clone(), watch::Sender::new(()));
        let room = Arc::new(Semaphore::new(MAX_HELD));
        let (state, refusals) = (Mutex::new(state), Mutex::default());
        let guards = Self { state, metrics, kept, unsaved, unreported, changed, room, refusals };
        // When another process opened a breaker is not known.
        guards.latest_state().rules.iter_mut().for_each(|rule| rule.changed_at = None);
        Arc::new(guards)
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Takes each change of the policy, writes the file, and reports to the manager, until shutdown or until the pod is
    /// `gone`. Requests take a change, too; so this is for what shows without a request: metrics, and resets that come
    /// and go. After shutdown has begun, the file is the next process's.
    pub async fn follow(self: Arc<Self>, publish: PublishGuards, drain: Drain, gone: Option<CancellationToken>) {
        let mut current = lock(&self.state).policy.changes();
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
            () = until_gone(gone.as_ref()) => return,
            () = following => {}
            () = saving => {}
            () = self.report(publish) => {}
        }
        self.clone().save_aside().await;
    }

    /// Publishes the states of the guards as they change.
    async fn report(&self, publish: PublishGuards) {
        loop {
            let states = self.states();
            let counts = if states.is_empty() { None } else { Some(COUNTS_INTERVAL) };
            publish.publish((!states.is_empty()).then(|| states.into()));
            time::sleep(REPORT_INTERVAL).await;
            let counted = async {
                match counts {
                    Some(interval) => time::sleep(interval).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.unreported.notified() => {}
                () = counted => {}
            }
        }
    }

    fn states(&self) -> Vec<GuardState> {
        let state = lock(&self.state);
        let states = state.guards.states().zip(&state.rules).take(MAX_GUARD_STATES);
        let mut states: Vec<GuardState> = states.map(|((guard, open), rule)| rule.state(guard, open)).collect();
        drop(state);
        states.extend(lock(&self.refusals).states());
        states.truncate(MAX_GUARD_STATES);
        states
    }

    /// Takes a note of what a rule on other servers has refused.
    pub(crate) fn egress_refused(&self, breaker: &str, rule: &str, visible: &Visible<'_>) {
        if lock(&self.refusals).note(breaker, rule, visible, SystemTime::now()) {
            self.unreported.notify_one();
        }
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

    /// Charges a request to the API server to every rule that matches it. It may pass as a probe. A refusal does not
    /// count where the request `may_hold` and the rules say that it is held.
    pub(crate) fn admit(self: &Arc<Self>, info: &RequestInfo<'_>, may_hold: bool) -> Result<Option<Probe>, Refused> {
        self.admit_by(|guards| guards.admit(info, now()), may_hold)
    }

    /// Does the same for a request, or a connection, to another server. None is held.
    pub(crate) fn admit_egress(self: &Arc<Self>, visible: &Visible<'_>) -> Result<Option<Probe>, Refused> {
        self.admit_by(|guards| guards.admit_egress(visible, now()), false)
    }

    fn admit_by(
        self: &Arc<Self>,
        admit: impl FnOnce(&mut Guards) -> Result<Admitted, (Refused, Vec<usize>)>,
        may_hold: bool,
    ) -> Result<Option<Probe>, Refused> {
        let mut state = self.latest_state();
        match admit(&mut state.guards) {
            Ok(admitted) => {
                for at in admitted.charged {
                    state.rules[at].allowed();
                }
                let probe = admitted.probe.map(|id| Probe { of: self.clone(), id, is_sent: false, succeeded: false });
                drop(state);
                Ok(probe)
            }
            Err((refused, refusing)) => {
                if !may_hold || !refused.holds {
                    for at in refusing {
                        state.rules[at].refused();
                    }
                }
                self.show(&mut state);
                drop(state);
                Err(refused)
            }
        }
    }

    /// For a request that may be held; none where too many are held already.
    pub(crate) fn hold(&self) -> Option<Hold> {
        let permit = self.room.clone().try_acquire_owned().ok()?;
        Some(Hold { until: Instant::now() + HOLD, changed: self.changed.subscribe(), _permit: permit })
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
        let State { policy, guards, rules, .. } = &mut *state;
        let mut is_other = false;
        policy.latest(|before, policy| {
            is_other = true;
            if before.is_none_or(|before| before.guards() != policy.guards()) {
                let former = guards.states().map(|(guard, _)| name(guard)).zip(rules.drain(..));
                let mut former: HashMap<String, RuleRecord> = former.collect();
                let of_rule = |name| {
                    let known = former.remove(&name);
                    known.unwrap_or_else(|| RuleRecord::new(self.metrics.guards.rule(name)))
                };
                rules.extend(policy.guards().iter().map(name).map(of_rule));
                guards.replace(policy.guards(), now());
                self.unreported.notify_one();
            }
        });
        if is_other {
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
        self.changed.send_replace(());
        let State { guards, rules, open, is_saved, .. } = state;
        for ((guard, is_open), rule) in guards.states().zip(rules) {
            if rule.metrics.set_open(is_open) {
                rule.changed_at = Some(SystemTime::now());
                self.unreported.notify_one();
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

impl RuleRecord {
    fn new(metrics: RuleMetrics) -> Self {
        Self { metrics, allowed: 0, refused: 0, changed_at: None }
    }

    /// As it is reported.
    fn state(&self, guard: &Guard, open: bool) -> GuardState {
        GuardState {
            breaker: guard.breaker.clone(),
            rule: guard.rule.clone(),
            open,
            changed_at: self.changed_at.map_or(0, unix_time::millis),
            allowed: self.allowed,
            refused: self.refused,
            last_refused: String::new(),
        }
    }

    fn allowed(&mut self) {
        self.allowed += 1;
        self.metrics.allowed.inc();
    }

    fn refused(&mut self) {
        self.refused += 1;
        self.metrics.refused.inc();
    }
}

impl Hold {
    /// Whether the request may be held for longer. What changes from here on ends the next wait.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.changed.mark_unchanged();
        Instant::now() < self.until
    }

    /// Waits until a rule changes, until the refusal's time has come, or until the hold is over.
    pub(crate) async fn wait(&mut self, refused: &Refused) {
        let next = refused.retry_after.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
        tokio::select! {
            () = time::sleep_until(next.map_or(self.until, |next| next.min(self.until))) => {}
            // The pod is served as long as its requests are.
            _ = self.changed.changed() => {}
        }
    }
}

impl Probe {
    /// From here on, no answer is a failure.
    pub(crate) fn sent(&mut self) {
        self.is_sent = true;
    }

    /// Takes the server's answer. Breakers close, unless it says that it is not well, or that too much is asked.
    pub(crate) fn answered(mut self, status: StatusCode) {
        self.succeeded = !status.is_server_error() && status != StatusCode::TOO_MANY_REQUESTS;
    }

    /// Breakers close: a server that speaks no HTTP has been reached.
    pub(crate) fn reached(mut self) {
        self.succeeded = true;
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.of.end_probe(self);
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
