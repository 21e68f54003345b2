//! Conditions of statuses.

use std::borrow::Cow;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Names in one message; more are counted.
const LISTED: usize = 5;

/// Whether something holds, and why.
pub(super) struct Finding {
    pub(super) holds: bool,
    /// One word.
    pub(super) reason: Cow<'static, str>,
    pub(super) message: String,
}

pub(super) fn finding(holds: bool, reason: &'static str, message: impl Into<String>) -> Finding {
    Finding { holds, reason: reason.into(), message: message.into() }
}

/// Keeps the time of `before` where nothing changed.
pub(super) fn condition(
    kind: &str,
    finding: Finding,
    generation: Option<i64>,
    before: &[Condition],
    now: Timestamp,
) -> Condition {
    let status = if finding.holds { "True" } else { "False" };
    let same = before.iter().find(|one| one.type_ == kind && one.status == status);
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: finding.reason.into_owned(),
        message: finding.message,
        observed_generation: generation,
        last_transition_time: same.map_or_else(|| Time(seconds(now)), |same| same.last_transition_time.clone()),
    }
}

pub(super) fn listed(names: &[String], separator: &str) -> String {
    let more = names.len().saturating_sub(LISTED);
    let shown = names[..names.len() - more].join(separator);
    if more == 0 { shown } else { format!("{shown}{separator}and {more} more") }
}

/// Times in the API have no fractions; with one, the value would differ from what is read back.
pub(super) fn seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
