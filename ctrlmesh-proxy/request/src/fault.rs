//! Decides which faults a request meets.
//!
//! Pure: the time and the dice are values. Faults are done in order of their list. Delays add up; the first that
//! answers the request ends.

use ctrlmesh_common::policy::Fault;
use ctrlmesh_common::policy::fault::{self, ApiFaultKind, FaultError, Share, TextMatch, WHOLE};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use regex::Regex;

use crate::decide;
use crate::egress::Target;
use crate::guard::matches;
use crate::request::RequestInfo;
use crate::rewrite::status::Status;

mod answer;
mod times;
mod egress;

pub use egress::EgressRequest;
use egress::EgressRule;

/// The faults of one pod.
#[derive(Debug, Default)]
pub struct Faults {
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    fault: Fault,
    /// Those of requests to the API server.
    http: Vec<HttpRule>,
    egress: Vec<EgressRule>,
    /// Of the times, where there are any.
    zone: TimeZone,
}

#[derive(Debug)]
struct HttpRule {
    host: Option<TextRule>,
    path: Option<TextRule>,
    method: Option<String>,
    headers: Vec<fault::HeaderMatch>,
}

#[derive(Debug)]
enum TextRule {
    Exact(String),
    Regex(Regex),
}

/// A request to the API server, as faults match it.
#[derive(Clone, Copy)]
pub struct FaultyRequest<'a> {
    pub info: &'a RequestInfo<'a>,
    pub method: &'a str,
    /// Without its port.
    pub host: &'a str,
    pub path: &'a str,
    /// Whether the request has this header with this value.
    pub has_header: &'a dyn Fn(&str, &str) -> bool,
    pub is_for_lock: bool,
}

/// What is done to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// How long it waits, in nanoseconds.
    pub delay: u64,
    /// The answer, where the server does not see the request.
    pub answer: Option<Box<Status>>,
    /// What is done to the API server's answer.
    pub on_answer: Vec<ApiFaultKind>,
    /// What is done, in order.
    pub hits: Vec<Hit>,
}

/// What a fault does to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Which of the faults.
    pub rule: usize,
    pub what: What,
}

/// A part of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Delay,
    Abort,
    Api(ApiFaultKind),
}

impl Faults {
    /// # Errors
    /// The first fault that cannot be done.
    pub fn new(faults: &[Fault]) -> Result<Self, FaultError> {
        Ok(Self { rules: faults.iter().map(Rule::new).collect::<Result<_, _>>()? })
    }

    /// Its name: `NAMESPACE/INJECTION/FAULT`.
    pub fn name(&self, rule: usize) -> Option<String> {
        Some(self.rules.get(rule)?.fault.full_name())
    }

    /// Whether `other` has everything that hits a request here, and all of it is still done `now`.
    pub fn still_hit(&self, effects: &Effects, other: &Self, now: Timestamp) -> bool {
        let is_there = |hit: &Hit| {
            let ours = self.rules.get(hit.rule).filter(|ours| ours.is_time(now));
            ours.is_some_and(|ours| other.rules.iter().any(|theirs| theirs.fault == ours.fault))
        };
        effects.hits.iter().all(is_there)
    }

    /// Whether time alone may end what hits a request.
    pub fn have_times(&self, effects: &Effects) -> bool {
        let mut rules = effects.hits.iter().filter_map(|hit| self.rules.get(hit.rule));
        rules.any(|rule| rule.fault.times.is_some())
    }

    /// What a request to the API server meets `now`; `dice` gives a number below [`WHOLE`].
    pub fn effects(&self, request: FaultyRequest<'_>, now: Timestamp, dice: &mut dyn FnMut() -> Share) -> Effects {
        let mut effects = Effects::default();
        for (at, rule) in self.rules.iter().enumerate().filter(|(_, rule)| rule.is_met(request, now)) {
            if effects.delay_or_abort(at, &rule.fault, request.info.verb(), dice) {
                break;
            }
            let fault = rule.fault.api_fault.filter(|fault| can_meet(fault.kind, request.info));
            let Some(kind) = fault.filter(|fault| is_hit(fault.share, dice)).map(|fault| fault.kind) else { continue };
            if let Some(answer) = answer::of_api(&rule.fault, kind, request.info) {
                effects.answer_with(at, What::Api(kind), answer);
                break;
            }
            effects.on_answer.push(kind);
            effects.hits.push(Hit { rule: at, what: What::Api(kind) });
        }
        effects
    }

    /// What goes to another server meets `now`: delays and aborts.
    pub fn egress_effects(
        &self,
        request: EgressRequest<'_>,
        now: Timestamp,
        dice: &mut dyn FnMut() -> Share,
    ) -> Effects {
        let mut effects = Effects::default();
        if self.rules.iter().all(|rule| rule.egress.is_empty()) {
            return effects;
        }
        let target = Target::new(&request.visible);
        let matches = |rule: &Rule| rule.egress.iter().any(|egress| egress.matches(&target, request.has_header));
        let met = self.rules.iter().enumerate().filter(|(_, rule)| matches(rule) && rule.is_time(now));
        for (at, rule) in met {
            if effects.delay_or_abort(at, &rule.fault, "", dice) {
                break;
            }
        }
        effects
    }
}

impl Effects {
    /// Adds what a fault does before any server sees the request, and says whether the fault ends it. `verb` is that of
    /// the API.
    fn delay_or_abort(&mut self, rule: usize, fault: &Fault, verb: &str, dice: &mut dyn FnMut() -> Share) -> bool {
        if let Some(delay) = fault.delay.filter(|delay| is_hit(delay.share, dice)) {
            let jitter = u128::from(delay.jitter_nanoseconds) * u128::from(dice()) / u128::from(WHOLE);
            let jitter = u64::try_from(jitter).unwrap_or(u64::MAX);
            self.delay = self.delay.saturating_add(delay.nanoseconds).saturating_add(jitter);
            self.hits.push(Hit { rule, what: What::Delay });
        }
        let Some(abort) = fault.abort.filter(|abort| is_hit(abort.share, dice)) else { return false };
        self.answer_with(rule, What::Abort, answer::aborted(fault, abort.status, verb));
        true
    }

    /// There is no answer of the API server then.
    fn answer_with(&mut self, rule: usize, what: What, answer: Status) {
        self.on_answer.clear();
        self.hits.retain(|hit| hit.what == What::Delay);
        self.hits.push(Hit { rule, what });
        self.answer = Some(Box::new(answer));
    }
}

impl What {
    /// As metrics have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Delay => "delay",
            Self::Abort => "abort",
            Self::Api(ApiFaultKind::AnswerLost) => "answer_lost",
            Self::Api(ApiFaultKind::ExpireWatch) => "expire_watch",
            Self::Api(ApiFaultKind::CutWatch { .. }) => "cut_watch",
            Self::Api(ApiFaultKind::DelayEvents { .. }) => "delay_events",
            Self::Api(ApiFaultKind::Stale { .. }) => "stale",
            Self::Api(ApiFaultKind::Conflict) => "conflict",
            Self::Api(ApiFaultKind::SlowBody { .. }) => "slow_body",
            Self::Api(ApiFaultKind::TooManyRequests { .. }) => "too_many_requests",
            Self::Api(ApiFaultKind::GoAway) => "go_away",
        }
    }
}

fn is_hit(share: Share, dice: &mut dyn FnMut() -> Share) -> bool {
    share >= WHOLE || dice() < share
}

/// Whether an API server does that to such requests.
fn can_meet(kind: ApiFaultKind, info: &RequestInfo<'_>) -> bool {
    match kind {
        ApiFaultKind::ExpireWatch | ApiFaultKind::CutWatch { .. } | ApiFaultKind::DelayEvents { .. } => info.is_watch(),
        ApiFaultKind::AnswerLost => !info.is_long_running(),
        ApiFaultKind::Stale { .. } => decide::oldest_wanted(info).is_some(),
        ApiFaultKind::Conflict => info.is_resource_request() && matches!(info.verb(), "update" | "patch"),
        // The bytes of an upgraded connection are no body.
        ApiFaultKind::SlowBody { .. } => info.is_watch() || !info.is_long_running(),
        ApiFaultKind::TooManyRequests { .. } | ApiFaultKind::GoAway => true,
    }
}

impl Rule {
    fn new(fault: &Fault) -> Result<Self, FaultError> {
        fault.check()?;
        let (of_api, elsewhere) = fault.http.iter().partition::<Vec<_>, _>(|one| one.ports.is_empty());
        let http = of_api.into_iter().map(HttpRule::new).collect::<Result<_, _>>()?;
        let egress = elsewhere.into_iter().map(EgressRule::new).collect::<Result<_, _>>()?;
        let zone = fault.times.as_ref().and_then(|times| TimeZone::get(&times.zone).ok());
        Ok(Self { fault: fault.clone(), http, egress, zone: zone.unwrap_or(TimeZone::UTC) })
    }

    fn is_met(&self, request: FaultyRequest<'_>, now: Timestamp) -> bool {
        let Fault { requests, http, includes_lock, .. } = &self.fault;
        (*includes_lock || !request.is_for_lock)
            && (requests.is_empty() || matches(requests, request.info))
            && (http.is_empty() || self.http.iter().any(|http| http.matches(request)))
            && self.is_time(now)
    }

    fn is_time(&self, now: Timestamp) -> bool {
        let times = self.fault.times.as_ref();
        times.is_none_or(|times| times::hold(times, &now.to_zoned(self.zone.clone())))
    }
}

impl HttpRule {
    fn new(spec: &fault::HttpMatch) -> Result<Self, FaultError> {
        let text = |text: &Option<TextMatch>| text.as_ref().map(TextRule::new).transpose();
        Ok(Self {
            host: text(&spec.host)?,
            path: text(&spec.path)?,
            method: spec.method.clone(),
            headers: spec.headers.clone(),
        })
    }

    fn matches(&self, request: FaultyRequest<'_>) -> bool {
        self.method.as_ref().is_none_or(|method| method == request.method)
            && self.host.as_ref().is_none_or(|host| host.matches_host(request.host))
            && self.path.as_ref().is_none_or(|path| path.matches(request.path))
            && self.headers.iter().all(|header| (request.has_header)(&header.name, &header.value))
    }
}

impl TextRule {
    fn new(spec: &TextMatch) -> Result<Self, FaultError> {
        Ok(match spec {
            TextMatch::Exact(text) => Self::Exact(text.clone()),
            TextMatch::Regex(regex) => Self::Regex(fault::whole_match(regex)?),
        })
    }

    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(exact) => exact == text,
            Self::Regex(regex) => regex.is_match(text),
        }
    }

    /// Case does not count in the names of hosts.
    fn matches_host(&self, host: &str) -> bool {
        match self {
            Self::Exact(exact) => exact.eq_ignore_ascii_case(host),
            Self::Regex(regex) => regex.is_match(&host.to_ascii_lowercase()),
        }
    }
}

#[cfg(test)]
mod tests;
