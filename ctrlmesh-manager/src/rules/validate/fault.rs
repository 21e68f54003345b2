//! Validates fault injections.

use ctrlmesh_common::api::{EffectiveTime, FaultInjectionSpec, FaultMatch, HttpFault, HttpMatch, TextMatch};

use super::{Report, positive_duration, regular_expression, required_selector};

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
}

fn check_fault(field: &str, fault: &HttpFault, report: &mut Report) {
    if fault.delay.is_none() && fault.abort.is_none() {
        report
            .error(format!("{field}.delay"), "at least one of delay and abort is required; the fault would do nothing");
    }
    if let Some(delay) = &fault.delay {
        positive_duration(&format!("{field}.delay.fixedDelay"), &delay.fixed_delay, report);
    }
    if let Some(matches) = &fault.matches {
        check_match(&format!("{field}.match"), matches, report);
    }
    if let Some(time) = &fault.effective_time {
        check_time(&format!("{field}.effectiveTime"), time, report);
    }
}

fn check_match(field: &str, matches: &FaultMatch, report: &mut Report) {
    for (at, one) in matches.http_match.iter().enumerate() {
        let HttpMatch { host, path, .. } = one;
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
        regular_expression(&format!("{field}.regex"), regex, report);
    }
}

fn check_time(field: &str, time: &EffectiveTime, report: &mut Report) {
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
