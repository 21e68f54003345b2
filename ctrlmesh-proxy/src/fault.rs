//! The faults of one pod at work: what of the policy is in force, dice, clock and metrics.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::policy::fault::{ApiFaultKind, WHOLE};
use ctrlmesh_request::egress::Visible;
use ctrlmesh_request::fault::{Effects, EgressRequest, Faults, FaultyRequest, Hit, What};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite::status::Status;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::sync::lock;
use http::{HeaderMap, Request, header};
use jiff::Timestamp;
use tokio::time;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::metrics::Metrics;
use crate::policy::{Current, FollowedPolicy, ReadResource};

mod past;

use past::PastVersions;
pub(crate) use past::{Recorded, Recording};

/// The longest wait that a timer takes: about a year.
pub(crate) const MAX_DELAY: Duration = Duration::from_hours(24 * 365);

/// Between two looks at the clock, where a fault has times.
const CLOCK_INTERVAL: Duration = Duration::from_secs(1);

/// The faults of one pod. Its connections share them.
#[derive(Debug)]
pub struct PodFaults {
    state: Mutex<State>,
    /// For lists that are answered from an older state.
    past: Arc<PastVersions>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct State {
    policy: FollowedPolicy,
    faults: Arc<Faults>,
}

/// What one request meets.
#[derive(Clone, Debug)]
pub(crate) struct MetFaults {
    of: Arc<PodFaults>,
    /// The policy with the faults.
    policy: Arc<Policy>,
    faults: Arc<Faults>,
    effects: Effects,
}

/// A fault that ends what goes to another server than the API server.
#[derive(Debug)]
pub(crate) struct AbortingFault {
    /// `NAMESPACE/INJECTION/FAULT`.
    pub(crate) name: String,
    /// With its code and message.
    pub(crate) status: Box<Status>,
}

impl PodFaults {
    /// Follows the faults of `current`.
    pub fn new(current: Current, metrics: &Arc<Metrics>) -> Arc<Self> {
        let state = State { policy: FollowedPolicy::new(current), faults: Arc::default() };
        Arc::new(Self { state: Mutex::new(state), past: Arc::default(), metrics: metrics.clone() })
    }

    /// What a request to the API server for `path` meets now.
    pub(crate) fn met<B>(
        self: &Arc<Self>,
        request: &Request<B>,
        info: &RequestInfo<'_>,
        path: &str,
        is_for_lock: bool,
    ) -> MetFaults {
        let (policy, faults) = self.latest();
        let has_header = |name: &str, value: &str| has_header(request.headers(), name, value);
        let (method, host) = (request.method().as_str(), host(request));
        let request = FaultyRequest { info, method, host, path, has_header: &has_header, is_for_lock };
        let effects = faults.effects(request, Timestamp::now(), &mut || fastrand::u32(..WHOLE));
        self.count(&faults, &effects, path);
        MetFaults { of: self.clone(), policy, faults, effects }
    }

    /// Has what goes to another server than the API server meet its faults, and says whether it waited. `headers` are
    /// those of its request, where one is seen.
    ///
    /// # Errors
    /// The fault that ends it.
    pub(crate) async fn meet_egress(
        self: &Arc<Self>,
        visible: &Visible<'_>,
        headers: Option<&HeaderMap>,
        drain: &Drain,
    ) -> Result<bool, AbortingFault> {
        let (policy, faults) = self.latest();
        let has_header = |name: &str, value: &str| headers.is_some_and(|headers| has_header(headers, name, value));
        let request = EgressRequest { visible: *visible, has_header: &has_header };
        let effects = faults.egress_effects(request, Timestamp::now(), &mut || fastrand::u32(..WHOLE));
        self.count(&faults, &effects, visible.host);
        let mut met = MetFaults { of: self.clone(), policy, faults, effects };
        let waits = met.is_delayed();
        if waits {
            met.wait(drain).await;
        }
        met.aborting().map_or(Ok(waits), Err)
    }

    /// Counts what is done to a request for `subject`, a path or a host.
    fn count(&self, faults: &Faults, effects: &Effects, subject: &str) {
        // An older state may not be known.
        for hit in effects.hits.iter().filter(|hit| !is_stale(hit)) {
            self.count_hit(faults, *hit, subject);
        }
    }

    fn count_hit(&self, faults: &Faults, hit: Hit, subject: &str) {
        let name = faults.name(hit.rule).unwrap_or_default();
        debug!(fault = name, effect = hit.what.name(), subject, "fault injected");
        self.metrics.faults.injected(&name, hit.what.name());
    }

    /// The policy that is in force, and its faults.
    fn latest(&self) -> (Arc<Policy>, Arc<Faults>) {
        let mut state = lock(&self.state);
        let State { policy, faults } = &mut *state;
        let latest = policy.latest(|before, latest| {
            if before.map_or(&[][..], Policy::faults) != latest.faults() {
                *faults = Arc::new(Faults::new(latest.faults()).unwrap_or_else(|error| {
                    // A policy is checked before it is in force.
                    warn!(error = &error as &dyn std::error::Error, "no fault is injected");
                    Faults::default()
                }));
            }
        });
        let both = (latest.clone(), faults.clone());
        drop(state);
        both
    }
}

impl MetFaults {
    /// Whether the request is to wait.
    pub(crate) fn is_delayed(&self) -> bool {
        self.effects.delay > 0
    }

    /// Waits for as long as the faults say and hold, or until shutdown begins.
    pub(crate) async fn wait(&mut self, drain: &Drain) {
        let delay = Duration::from_nanos(std::mem::take(&mut self.effects.delay));
        let until = Instant::now() + delay.min(MAX_DELAY);
        tokio::select! {
            () = time::sleep_until(until) => {}
            () = drain.started() => {}
            () = self.lifted(|_policy| false) => self.effects = Effects::default(),
        }
    }

    /// Ready once the policy has the faults no more, once their time is over, or once it `ends` them otherwise.
    async fn lifted(&self, ends: impl Fn(&Policy) -> bool) {
        let mut current = lock(&self.of.state).policy.changes();
        let have_times = self.faults.have_times(&self.effects);
        loop {
            let (policy, faults) = self.of.latest();
            if !self.faults.still_hit(&self.effects, &faults, Timestamp::now()) || ends(&policy) {
                return;
            }
            let changed = async {
                if current.changed().await.is_err() {
                    // The policy's source has ended.
                    std::future::pending::<()>().await;
                }
            };
            if have_times {
                drop(time::timeout(CLOCK_INTERVAL, changed).await);
            } else {
                changed.await;
            }
        }
    }

    /// The answer that takes the place of the API server's, if there is one.
    pub(crate) fn answer(&mut self) -> Option<Box<Status>> {
        self.effects.answer.take()
    }

    /// The fault that ends the request, if one does: the last one.
    fn aborting(&mut self) -> Option<AbortingFault> {
        let status = self.effects.answer.take()?;
        let name = self.faults.name(self.effects.hits.last()?.rule)?;
        Some(AbortingFault { name, status })
    }

    /// What is done to the API server's answer.
    pub(crate) fn on_answer(&self) -> &[ApiFaultKind] {
        &self.effects.on_answer
    }

    /// The collection of a list that is to be answered from an older state.
    pub(crate) fn recorded(&self, info: &RequestInfo<'_>) -> Option<Recorded> {
        let age = self.ages().max()?;
        Some(Recorded { of: ReadResource::new(info.resource_key()), age })
    }

    /// Whether it is a list that is to be answered from an older state.
    pub(crate) fn is_stale_list(&self) -> bool {
        self.ages().next().is_some()
    }

    /// How old the state is to be, of each fault that says so.
    fn ages(&self) -> impl Iterator<Item = Duration> {
        self.on_answer().iter().filter_map(|kind| match kind {
            ApiFaultKind::Stale { age_nanoseconds } => Some(Duration::from_nanos(*age_nanoseconds)),
            _ => None,
        })
    }

    /// The version that the collection had at that time, where it is known.
    pub(crate) fn past_version(&self, of: &Recorded) -> Option<u64> {
        self.of.past.version(of, Instant::now())
    }

    /// Begins to record the versions of a collection; `None` where that is done already.
    pub(crate) fn record(&self, what: Recorded) -> Option<Recording> {
        self.of.past.record(what)
    }

    /// Counts a list of `path` that was answered from an older state.
    pub(crate) fn count_stale(&self, path: &str) {
        for hit in self.effects.hits.iter().filter(|hit| is_stale(hit)) {
            self.of.count_hit(&self.faults, *hit, path);
        }
    }

    /// Ready once that is done no more: also once shutdown begins, and once another policy changes what the client
    /// sees. What it may see no more is to reach it without a delay.
    pub(crate) fn into_lifted(self, drain: Drain) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(async move {
            tokio::select! {
                () = self.lifted(|policy| !policy.means_the_same(&self.policy)) => {}
                () = drain.started() => {}
            }
        })
    }
}

fn is_stale(hit: &Hit) -> bool {
    matches!(hit.what, What::Api(ApiFaultKind::Stale { .. }))
}

fn has_header(headers: &HeaderMap, name: &str, value: &str) -> bool {
    headers.get_all(name).iter().any(|one| one.as_bytes() == value.as_bytes())
}

/// Whom the client talks to, without the port.
fn host<B>(request: &Request<B>) -> &str {
    let header = || request.headers().get(header::HOST)?.to_str().ok();
    let host = request.uri().authority().map(http::uri::Authority::as_str).or_else(header).unwrap_or_default();
    match host.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_read_without_its_port() {
        for (host_and_port, expected) in [
            ("a.b:443", "a.b"),
            ("a.b", "a.b"),
            ("[::1]:443", "[::1]"),
            ("[::1]", "[::1]"),
            ("10.0.0.1:6443", "10.0.0.1"),
        ] {
            let request = Request::builder().header("host", host_and_port).body(()).unwrap();
            assert_eq!(host(&request), expected, "{host_and_port}");
            let request = Request::builder().uri(format!("https://{host_and_port}/api")).body(()).unwrap();
            assert_eq!(host(&request), expected, "{host_and_port}");
        }
    }
}
