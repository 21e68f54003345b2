//! Validates fault injections.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{
    ApiFault, ApiFaultType, EffectiveTime, FaultInjectionSpec, FaultMatch, HttpFault, HttpMatch, TextMatch,
};
use ctrlmesh_common::policy::egress::MAX_PORTS;
use ctrlmesh_common::policy::fault::{MAX_REGEXES, STATE_AGES, whole_match};
use jiff::tz::TimeZone;

use super::access::check_ports;
use super::{Report, clusters, positive_duration, regular_expression, required_selector};
use crate::rules::breaker::nanoseconds;

/// In a leap year.
const DAYS: [i32; 12] = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

pub(super) fn check(spec: &FaultInjectionSpec, report: &mut Report) {
    required_selector("spec.selector", &spec.selector, report);
    if spec.http_fault.is_empty() {
        report.warning("spec.httpFault", "is empty: nothing is done");
    }
    for (at, fault) in spec.http_fault.iter().enumerate() {
        check_fault(&format!("spec.httpFault[{at}]"), fault, report);
    }
    let matches = spec.http_fault.iter().filter_map(|fault| fault.matches.as_ref());
    let http: Vec<&HttpMatch> = matches.flat_map(|one| &one.http_match).collect();
    let texts = http.iter().flat_map(|one| [&one.host, &one.path]).flatten();
    let regexes = texts.filter(|text| text.regex.is_some()).count();
    if regexes > MAX_REGEXES {
        report.error("spec.httpFault", format!("has {regexes} regular expressions; at most {MAX_REGEXES} are allowed"));
    }
    let ports = http.iter().flat_map(|one| &one.ports).collect::<BTreeSet<_>>().len();
    if ports > MAX_PORTS {
        report.error("spec.httpFault", format!("names {ports} ports; at most {MAX_PORTS} are allowed in all together"));
    }
}

fn check_fault(field: &str, fault: &HttpFault, report: &mut Report) {
    if fault.delay.is_none() && fault.abort.is_none() && fault.api_fault.is_none() {
        report.error(
            format!("{field}.delay"),
            "at least one of delay, abort and apiFault is required; the fault would do nothing",
        );
    }
    if let Some(delay) = &fault.delay {
        positive_duration(&format!("{field}.delay.fixedDelay"), &delay.fixed_delay, report);
        if let Some(jitter) = &delay.jitter {
            positive_duration(&format!("{field}.delay.jitter"), jitter, report);
        }
    }
    if let Some(fault) = &fault.api_fault {
        check_api_fault(&format!("{field}.apiFault"), fault, report);
    }
    if let Some(matches) = &fault.matches {
        check_match(&format!("{field}.match"), matches, report);
        for (at, one) in matches.resources.iter().enumerate() {
            clusters::check_names(&format!("{field}.match.resources[{at}].clusters"), &one.clusters, report);
        }
        check_elsewhere(field, fault, matches, report);
    }
    if let Some(time) = &fault.effective_time {
        check_time(&format!("{field}.effectiveTime"), time, report);
    }
}

/// Each detail belongs to one type.
fn check_api_fault(field: &str, fault: &ApiFault, report: &mut Report) {
    let mut detail = |name: &str, of: ApiFaultType, is_there: bool, is_required: bool| {
        if is_required && is_there != (fault.kind == of) {
            let message = format!("is required with the type {of:?}, and allowed with no other");
            report.error(format!("{field}.{name}"), message);
        } else if !is_required && is_there && fault.kind != of {
            report.error(format!("{field}.{name}"), format!("is allowed with the type {of:?} only"));
        }
    };
    detail("delay", ApiFaultType::DelayEvents, fault.delay.is_some(), true);
    detail("bytesPerSecond", ApiFaultType::SlowBody, fault.bytes_per_second.is_some(), true);
    detail("age", ApiFaultType::Stale, fault.age.is_some(), true);
    detail("after", ApiFaultType::CutWatch, fault.after.is_some(), false);
    detail("retryAfterSeconds", ApiFaultType::TooManyRequests, fault.retry_after_seconds.is_some(), false);
    for (name, duration) in [("delay", &fault.delay), ("after", &fault.after)] {
        if let Some(duration) = duration {
            positive_duration(&format!("{field}.{name}"), duration, report);
        }
    }
    let is_allowed = |age: &String| nanoseconds(age).is_some_and(|age| STATE_AGES.contains(&age));
    if let Some(age) = fault.age.as_ref().filter(|age| !is_allowed(age)) {
        report.error(format!("{field}.age"), format!("{age:?} must be a duration from 1s to 1m"));
    }
}

/// Checks what cannot stand beside the ports of other servers.
fn check_elsewhere(field: &str, fault: &HttpFault, matches: &FaultMatch, report: &mut Report) {
    let is_elsewhere = |one: &HttpMatch| !one.ports.is_empty();
    if !matches.http_match.iter().any(is_elsewhere) {
        return;
    }
    if fault.api_fault.is_some() {
        let message = "is for the API server, and cannot be beside ports in match.httpMatch, which are for others";
        report.error(format!("{field}.apiFault"), message);
    }
    if !matches.resources.is_empty() {
        let message = "are those of the API server, and cannot be beside ports in httpMatch, which are for others";
        report.error(format!("{field}.match.resources"), message);
    }
    if fault.include_lock && matches.http_match.iter().all(is_elsewhere) {
        let message = "is not used: the lock is on the API server, and every httpMatch names ports of other servers";
        report.warning(format!("{field}.includeLock"), message);
    }
}

fn check_match(field: &str, matches: &FaultMatch, report: &mut Report) {
    for (at, one) in matches.http_match.iter().enumerate() {
        let HttpMatch { host, path, ports, .. } = one;
        check_ports(&format!("{field}.httpMatch[{at}].ports"), ports, report);
        for (name, text) in [("host", host), ("path", path)] {
            if let Some(text) = text {
                check_text(&format!("{field}.httpMatch[{at}].{name}"), text, report);
            }
        }
    }
}

fn check_text(field: &str, text: &TextMatch, report: &mut Report) {
    if text.exact.is_some() == text.regex.is_some() {
        report.error(format!("{field}.exact"), "exactly one of exact and regex is required");
    }
    if let Some(regex) = &text.regex {
        let compiled = regular_expression(&format!("{field}.regex"), regex, report);
        // As the proxies compile it: they refuse the whole policy otherwise.
        if let Some(Err(error)) = compiled.map(|regex| whole_match(regex.as_str())) {
            report.error(format!("{field}.regex"), format!("is too large or too deep for the proxies: {error}"));
        }
    }
}

fn check_time(field: &str, time: &EffectiveTime, report: &mut Report) {
    if let Some(zone) = time.time_zone.as_ref().filter(|zone| TimeZone::get(zone).is_err()) {
        let message = format!("{zone:?} is not in the IANA time zone database; Europe/Berlin is one of its names");
        report.error(format!("{field}.timeZone"), message);
    }
    if time.start_time.is_some() && time.start_time == time.end_time {
        report.error(format!("{field}.endTime"), "is the same as startTime; leave both out for the whole day");
    }
    let possible = |day: &i32| {
        let months = time.months.iter().filter_map(|month| usize::try_from(month - 1).ok());
        months.filter_map(|month| DAYS.get(month)).any(|days| day <= days)
    };
    let restricted = !time.months.is_empty() && !time.days_of_month.is_empty();
    if restricted && !time.days_of_month.iter().any(possible) {
        report.error(
            format!("{field}.daysOfMonth"),
            "none of these days is in any of the months; the fault would never be done",
        );
    }
}
