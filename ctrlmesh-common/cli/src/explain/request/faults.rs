//! Says which faults of FaultInjections a request meets.
//!
//! Pure. Chance decides about a part of them, and the clock and what only the request itself has about others.

use ctrlmesh_common::policy::Fault;
use ctrlmesh_common::policy::fault::{Share, WHOLE};
use ctrlmesh_request::fault::{Effects, Faults, FaultyRequest};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite::status::Status;
use jiff::Timestamp;
use serde::Serialize;

/// A request, as far as faults go by what is known of it.
#[derive(Clone, Copy)]
pub(super) struct KnownRequest<'a> {
    pub(super) info: &'a RequestInfo<'a>,
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) is_for_lock: bool,
}

/// A fault that may hit a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MatchingFault {
    /// `NAMESPACE/INJECTION/FAULT`.
    pub(super) name: String,
    /// What is done: `delay`, `abort`, or the fault of an API server.
    pub(super) effects: Vec<String>,
    /// How many of such requests it hits at least, in percent.
    pub(super) percent: f64,
    /// Whether it goes by the host or by headers of the request, which are not known here.
    pub(super) depends_on_headers: bool,
}

/// The faults that may hit the request now, in order.
pub(super) fn matching(faults: &[Fault], request: KnownRequest<'_>, now: Timestamp) -> Vec<MatchingFault> {
    faults.iter().filter_map(|fault| MatchingFault::of(fault, request, now)).collect()
}

/// What the pod is answered, where a fault hits every such request.
pub(super) fn answer(faults: &[Fault], request: KnownRequest<'_>, now: Timestamp) -> Option<Status> {
    // The greatest number that dice give: only what hits all is hit.
    let effects = effects(faults, request, now, WHOLE - 1)?;
    effects.answer.map(|status| *status)
}

impl MatchingFault {
    fn of(fault: &Fault, request: KnownRequest<'_>, now: Timestamp) -> Option<Self> {
        let whatever = without_headers(fault);
        let depends_on_headers = fault.http != whatever.http;
        let met = effects(&[whatever], request, now, 0)?;
        let effects: Vec<String> = met.hits.iter().map(|hit| hit.what.name().to_owned()).collect();
        let shares =
            [fault.delay.map(|one| one.share), fault.abort.map(|one| one.share), fault.api_fault.map(|one| one.share)];
        let least = shares.into_iter().flatten().min().unwrap_or_default();
        let name = fault.full_name();
        (!effects.is_empty()).then(|| Self { name, effects, percent: percent(least), depends_on_headers })
    }

    /// In one sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { name, effects, percent, depends_on_headers } = self;
        let only = if *depends_on_headers { ", if host and headers of the request are as it says" } else { "" };
        let share = match effects.len() {
            _ if *percent >= 100.0 => "every such request".to_owned(),
            0 | 1 => format!("{percent}% of such requests"),
            // Each effect has a share of its own, and the least one is known.
            _ => format!("{percent}% of such requests or more"),
        };
        format!("Fault {name} hits {share}{only}: {}.", effects.join(" and "))
    }
}

/// The same fault for requests with any host and header.
fn without_headers(fault: &Fault) -> Fault {
    let mut whatever = fault.clone();
    for http in &mut whatever.http {
        http.host = None;
        http.headers.clear();
    }
    whatever
}

/// `None` where a fault cannot be done: then the proxy does none.
fn effects(faults: &[Fault], request: KnownRequest<'_>, now: Timestamp, dice: Share) -> Option<Effects> {
    let KnownRequest { info, method, path, is_for_lock } = request;
    let has_header = |_: &str, _: &str| false;
    let request = FaultyRequest { info, method, host: "", path, has_header: &has_header, is_for_lock };
    Some(Faults::new(faults).ok()?.effects(request, now, &mut || dice))
}

fn percent(share: Share) -> f64 {
    f64::from(share) * 100.0 / f64::from(WHOLE)
}

#[cfg(test)]
mod tests;
