//! Says which rules of CircuitBreakers a request meets, and whether one of them refuses it.
//!
//! Pure. What a bucket holds is known to the proxy alone. Whether a breaker is open stands in the status.

use ctrlmesh_common::api::{BreakerState, CircuitBreaker};
use ctrlmesh_common::policy::guard::{Guard, Trigger};
use ctrlmesh_request::decide::Refusal;
use ctrlmesh_request::guard::{Cause, Refused, matches};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite::status::Status;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::Serialize;

const NANOSECONDS: u64 = 1_000_000_000;

/// A rule that matches a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BreakerRule {
    /// `NAMESPACE/NAME`.
    pub(super) breaker: String,
    pub(super) rule: String,
    pub(super) state: RuleState,
    /// Whether a request that it refuses waits for the breaker to close first, for up to 20 s.
    pub(super) holds: bool,
    #[serde(skip)]
    pub(super) refused: Option<Refused>,
}

/// Whether the rule lets a request pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum RuleState {
    /// The spec says that it refuses everything.
    ForceOpened,
    /// The spec says that it refuses nothing.
    ForceClosed,
    /// By the status of the CircuitBreaker.
    Open,
    /// It was open for its time. One request passes as a probe.
    HalfOpen,
    /// By the status. The request passes while the bucket holds one, which only the proxy knows.
    Closed,
    /// The status says nothing of this pod.
    NotReported,
}

/// The rules among `guards` that match, in order.
pub(super) fn rules(
    guards: &[Guard],
    info: &RequestInfo<'_>,
    (pod, breakers): (&str, &[CircuitBreaker]),
    now: Timestamp,
) -> Vec<BreakerRule> {
    let matching = guards.iter().filter(|guard| matches(&guard.requests, info));
    matching.map(|guard| BreakerRule::of(guard, pod, breakers, now)).collect()
}

/// What the pod is answered, where a rule refuses for certain.
pub(super) fn answer(rules: &[BreakerRule]) -> Option<Status> {
    let refused = rules.iter().find_map(|rule| rule.refused.clone())?;
    Some(Status::from(&Refusal::Guarded(Box::new(refused))))
}

impl BreakerRule {
    fn of(guard: &Guard, pod: &str, breakers: &[CircuitBreaker], now: Timestamp) -> Self {
        let reported = reported(guard, pod, breakers);
        let since = reported.and_then(|(_, since)| since);
        let left = since.and_then(|since| Some(since.as_second() + window(guard)? - now.as_second()));
        let (state, cause) = match (guard.trigger, reported.map(|(state, _)| state), left) {
            (Trigger::ForceOpened, ..) => (RuleState::ForceOpened, Some(Cause::ForceOpened)),
            (Trigger::ForceClosed, ..) => (RuleState::ForceClosed, None),
            (_, Some(BreakerState::Opened), Some(left)) if left <= 0 => (RuleState::HalfOpen, None),
            (_, Some(BreakerState::Opened), Some(_)) => (RuleState::Open, Some(Cause::Open)),
            (_, Some(BreakerState::Opened), None) => (RuleState::Open, Some(Cause::OpenUntilReset)),
            (_, Some(BreakerState::Closed), _) => (RuleState::Closed, None),
            (_, None, _) => (RuleState::NotReported, None),
        };
        let (breaker, rule) = (guard.breaker.clone(), guard.rule.clone());
        let retry_after = left.and_then(|left| u32::try_from(left).ok()).filter(|_| cause == Some(Cause::Open));
        let refused = cause.map(|cause| {
            let (breaker, rule) = (breaker.clone(), rule.clone());
            Refused { breaker, rule, cause, retry_after, holds: guard.holds }
        });
        Self { breaker, rule, state, holds: guard.holds, refused }
    }

    /// In one sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { breaker, rule, state, holds, .. } = self;
        let said = match state {
            RuleState::ForceOpened => "refuses everything: its triggerPolicy is ForceOpened",
            RuleState::ForceClosed => "refuses nothing: its triggerPolicy is ForceClosed",
            RuleState::Open => "is open in this pod, and refuses the request",
            RuleState::HalfOpen => "is half-open: one request at a time passes as a probe",
            RuleState::Closed => {
                "is closed in this pod: the request passes while its bucket holds one, which only the proxy knows"
            }
            RuleState::NotReported => {
                "has no state in the status: whether its bucket holds a request is known to the proxy alone"
            }
        };
        let waits =
            if *holds { " Before it is refused for an open breaker, the request waits for up to 20 s." } else { "" };
        format!("Rule {rule:?} of CircuitBreaker {breaker} {said}.{waits}")
    }
}

/// The window for which a breaker stays open, in seconds. `None`: until it is reset.
fn window(guard: &Guard) -> Option<i64> {
    i64::try_from(guard.sleeping_window_nanoseconds?.div_ceil(NANOSECONDS)).ok()
}

/// The state of the rule in the pod by the status, and since when. `None`: the status does not say.
fn reported(guard: &Guard, pod: &str, breakers: &[CircuitBreaker]) -> Option<(BreakerState, Option<Timestamp>)> {
    let is_it = |one: &&CircuitBreaker| {
        guard.breaker.split_once('/') == Some((&one.namespace().unwrap_or_default(), &one.name_any()))
    };
    let status = breakers.iter().find(is_it)?.status.as_ref()?;
    let target = status.target_status.iter().find(|one| one.target.pod_name.as_deref() == Some(pod))?;
    let limit = target.limiting_snapshots.iter().find(|one| one.name == guard.rule)?;
    Some((limit.state, limit.last_transition_time.as_ref().map(|time| time.0)))
}

#[cfg(test)]
mod tests;
