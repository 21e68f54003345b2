//! Reads a FaultInjection as the faults that it gives to pods.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{
    self, ApiFaultType, EffectiveTime, FaultInjection, FaultResources, HttpFault, HttpMatch, TextMatch,
};
use ctrlmesh_common::names::label;
use ctrlmesh_common::policy::Fault;
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_common::policy::fault::{self, Abort, ApiFault, ApiFaultKind, Delay, HeaderMatch, Share, Times, WHOLE};
use ctrlmesh_common::policy::guard::RequestMatch;
use ctrlmesh_common::resource::WILDCARD;

use super::breaker;
use super::pod_selection::PodSelection;
use super::validate;

/// What a FaultInjection asks of the proxies.
#[derive(Clone, Debug, PartialEq)]
pub struct Injection {
    pub selection: PodSelection,
    pub faults: Vec<Fault>,
    /// What they take as JSON.
    pub bytes: usize,
    /// How many regular expressions they have.
    pub regexes: usize,
    /// TCP ports of other servers that they hit requests to.
    pub ports: BTreeSet<u16>,
    /// The names of the faults with a path, a method or a header that TLS may hide.
    pub hidden: Vec<String>,
}

impl From<&FaultInjection> for Injection {
    fn from(injection: &FaultInjection) -> Self {
        let spec = &injection.spec;
        let switch = (label::DISABLE_FAULT_INJECTION, spec.disabled);
        let selection = PodSelection::read(injection, switch, &spec.selector, validate::fault_injection);
        let faults = spec.http_fault.iter().enumerate().filter(|_| selection.selector.is_some());
        let faults: Vec<Fault> = faults.map(|(at, one)| fault(&selection.name, at, one)).collect();
        // Strings and numbers always serialise.
        let bytes = faults.iter().map(|fault| serde_json::to_vec(fault).unwrap_or_default().len() + 1).sum();
        let regexes = faults.iter().map(|fault| fault.regexes().count()).sum();
        let ports = faults.iter().flat_map(|fault| &fault.http).flat_map(|http| &http.ports).copied().collect();
        let hidden = faults.iter().filter(|fault| fault.http.iter().any(has_hidden_part));
        let hidden = hidden.map(|fault| fault.fault.clone()).collect();
        Self { selection, faults, bytes, regexes, ports, hidden }
    }
}

/// A fault of a valid injection.
fn fault(injection: &str, at: usize, spec: &HttpFault) -> Fault {
    let matches = spec.matches.clone().unwrap_or_default();
    Fault {
        injection: injection.to_owned(),
        fault: spec.name.clone().unwrap_or_else(|| at.to_string()),
        delay: spec.delay.as_ref().map(|delay| Delay {
            nanoseconds: nanoseconds(&delay.fixed_delay),
            jitter_nanoseconds: delay.jitter.as_deref().map(nanoseconds).unwrap_or_default(),
            share: share(delay.percent.as_deref()),
        }),
        abort: spec.abort.as_ref().map(|abort| Abort {
            status: u16::try_from(abort.http_status).unwrap_or_default(),
            share: share(abort.percent.as_deref()),
        }),
        api_fault: spec.api_fault.as_ref().map(api_fault),
        requests: matches.resources.iter().map(requests).collect(),
        http: matches.http_match.iter().map(http).collect(),
        times: spec.effective_time.as_ref().map(times),
        includes_lock: spec.include_lock,
    }
}

fn api_fault(spec: &api::ApiFault) -> ApiFault {
    let duration = |text: &Option<String>| text.as_deref().map(nanoseconds).unwrap_or_default();
    let kind = match spec.kind {
        ApiFaultType::AnswerLost => ApiFaultKind::AnswerLost,
        ApiFaultType::ExpireWatch => ApiFaultKind::ExpireWatch,
        ApiFaultType::CutWatch => ApiFaultKind::CutWatch { after_nanoseconds: duration(&spec.after) },
        ApiFaultType::DelayEvents => ApiFaultKind::DelayEvents { nanoseconds: duration(&spec.delay) },
        ApiFaultType::Stale => ApiFaultKind::Stale { age_nanoseconds: duration(&spec.age) },
        ApiFaultType::Conflict => ApiFaultKind::Conflict,
        ApiFaultType::SlowBody => {
            ApiFaultKind::SlowBody { bytes_per_second: spec.bytes_per_second.unwrap_or_default() }
        }
        ApiFaultType::TooManyRequests => {
            ApiFaultKind::TooManyRequests { retry_after_seconds: spec.retry_after_seconds.unwrap_or(1) }
        }
        ApiFaultType::GoAway => ApiFaultKind::GoAway,
    };
    ApiFault { kind, share: share(spec.percent.as_deref()) }
}

/// No list at all is every request.
fn requests(spec: &FaultResources) -> RequestMatch {
    let every = |list: &[String]| if list.is_empty() { vec![WILDCARD.to_owned()] } else { list.to_vec() };
    RequestMatch {
        api_groups: every(&spec.api_groups),
        resources: every(&spec.resources),
        verbs: every(&spec.verbs),
        namespaces: every(&spec.namespaces),
        clusters: spec.clusters.clone(),
    }
}

fn http(spec: &HttpMatch) -> fault::HttpMatch {
    let header = |one: &api::HeaderMatch| HeaderMatch { name: one.name.clone(), value: one.value.clone() };
    fault::HttpMatch {
        host: spec.host.as_ref().and_then(text),
        path: spec.path.as_ref().and_then(text),
        method: spec.method.clone().filter(|method| method != WILDCARD),
        headers: spec.headers.iter().map(header).collect(),
        ports: spec.ports.clone(),
    }
}

/// Whether a request over TLS has a part that is asked for, and nobody sees. The port of HTTP in the clear has no TLS.
fn has_hidden_part(http: &fault::HttpMatch) -> bool {
    let asks = http.path.is_some() || http.method.is_some() || !http.headers.is_empty();
    asks && http.ports.iter().any(|port| *port != Scheme::Http.default_port())
}

fn text(spec: &TextMatch) -> Option<fault::TextMatch> {
    let regex = || Some(fault::TextMatch::Regex(validate::translated(spec.regex.as_deref()?)?));
    spec.exact.clone().map(fault::TextMatch::Exact).or_else(regex)
}

fn times(spec: &EffectiveTime) -> Times {
    let numbers = |list: &[i32]| list.iter().filter_map(|number| u8::try_from(*number).ok()).collect();
    Times {
        zone: spec.time_zone.clone().unwrap_or_else(|| "UTC".to_owned()),
        from: spec.start_time.as_deref().map(second_of_day),
        until: spec.end_time.as_deref().map(second_of_day),
        weekdays: numbers(&spec.days_of_week),
        days: numbers(&spec.days_of_month),
        months: numbers(&spec.months),
    }
}

/// Of a valid time `HH:MM:SS`.
fn second_of_day(text: &str) -> u32 {
    text.split(':').fold(0, |seconds, part| seconds * 60 + part.parse::<u32>().unwrap_or_default())
}

/// Of a valid percentage. What is not zero stays so.
fn share(percent: Option<&str>) -> Share {
    let Some(percent) = percent else { return WHOLE };
    let (whole, decimals) = percent.split_once('.').unwrap_or((percent, ""));
    // Seven decimals of a hundredth are the parts of a share; what comes behind them rounds up.
    let digits = format!("{whole}{decimals:0<7}");
    let (kept, rest) = digits.split_at(whole.len() + 7);
    let parts: Share = kept.parse().unwrap_or(WHOLE);
    let more = rest.bytes().any(|digit| digit != b'0');
    (parts + u32::from(more)).min(WHOLE)
}

fn nanoseconds(text: &str) -> u64 {
    breaker::nanoseconds(text).unwrap_or_default()
}

#[cfg(test)]
mod tests;
