//! The faults that a pod's requests meet.

use std::ops::RangeInclusive;

use jiff::tz::TimeZone;
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

use super::guard::RequestMatch;

/// The most regular expressions in the faults of one pod: each takes up to [`MAX_REGEX_BYTES`] of the proxy's memory.
pub const MAX_REGEXES: usize = 16;

/// The most memory that a compiled regular expression takes, in bytes.
pub const MAX_REGEX_BYTES: usize = 1 << 20;

/// The ages, in nanoseconds, that the state may have which a list is answered from: 1 s to 1 min. An API server keeps
/// 75 s of events, whatever happens.
pub const STATE_AGES: RangeInclusive<u64> = 1_000_000_000..=60_000_000_000;

/// All of a share.
pub const WHOLE: u32 = 1_000_000_000;

/// One fault of a `FaultInjection`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fault {
    /// The `FaultInjection`, as `NAMESPACE/NAME`.
    pub injection: String,
    /// The fault's name in it, or its number.
    pub fault: String,
    /// Makes requests wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,
    /// Answers requests with an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abort: Option<Abort>,
    /// Does what an API server does at times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_fault: Option<ApiFault>,
    /// Requests for resources, of which any must match. Empty: every request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestMatch>,
    /// Requests by their HTTP form, of which any must match. Empty: every request to the API server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub http: Vec<HttpMatch>,
    /// When. Absent: always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<Times>,
    /// Whether requests for the leader-election lock meet it, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub includes_lock: bool,
}

/// How many requests, in parts of [`WHOLE`].
pub type Share = u32;

/// A delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Delay {
    /// In nanoseconds.
    pub nanoseconds: u64,
    /// A random part of so many nanoseconds comes on top.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub jitter_nanoseconds: u64,
    /// How many requests.
    pub share: Share,
}

/// An error as the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Abort {
    /// The HTTP status, 200 to 599.
    pub status: u16,
    /// How many requests.
    pub share: Share,
}

/// What an API server does at times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ApiFault {
    /// What.
    pub kind: ApiFaultKind,
    /// How many requests.
    pub share: Share,
}

/// What an API server does at times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ApiFaultKind {
    /// The request is carried out, and the answer is lost.
    AnswerLost,
    /// A watch ends with 410.
    ExpireWatch,
    /// A watch breaks in the middle of an event.
    CutWatch {
        /// How long it lives before, in nanoseconds.
        after_nanoseconds: u64,
    },
    /// Each event of a watch arrives late.
    DelayEvents {
        /// In nanoseconds.
        nanoseconds: u64,
    },
    /// A list is answered from an older state.
    Stale {
        /// How old the state is at least, in nanoseconds.
        age_nanoseconds: u64,
    },
    /// An update or patch is answered 409.
    Conflict,
    /// The answer arrives slowly.
    SlowBody {
        /// How fast.
        bytes_per_second: u32,
    },
    /// The answer is 429.
    TooManyRequests {
        /// When to come again.
        retry_after_seconds: u32,
    },
    /// The client is told to open another connection.
    GoAway,
}

/// Requests by their HTTP form. What is absent matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpMatch {
    /// The host that is talked to, without its port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<TextMatch>,
    /// The path, without its query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<TextMatch>,
    /// The method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Headers that must all be there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<HeaderMatch>,
    /// TCP ports of other servers. Empty: requests to the API server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
}

/// A text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TextMatch {
    /// The whole text.
    Exact(String),
    /// A regular expression that the whole text matches, as the crate `regex` reads it.
    Regex(String),
}

/// A header with just this value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeaderMatch {
    /// In any case.
    pub name: String,
    /// The whole value.
    pub value: String,
}

/// Times at which a fault is done. What is absent or empty restricts nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Times {
    /// A name of the IANA database.
    pub zone: String,
    /// The first second of the day. After `until`: the time reaches over midnight, and its day is the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u32>,
    /// The second of the day at which it is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u32>,
    /// Days of the week, from 0, which is Sunday.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weekdays: Vec<u8>,
    /// Days of the month, from 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub days: Vec<u8>,
    /// Months, from 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub months: Vec<u8>,
}

/// A fault that no proxy can do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// A regular expression that is none.
    #[error("http: {text:?} is no regular expression: {reason}")]
    Regex {
        /// As it was given.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// Too many of them would take too much memory.
    #[error("http: the faults of a pod may have {MAX_REGEXES} regular expressions")]
    Regexes,
    /// A status that no answer has.
    #[error("abort.status: {status} is not allowed; 200 to 599 are")]
    Status {
        /// As it was given.
        status: u16,
    },
    /// A time zone that is not known.
    #[error("times.zone: {zone:?} is not in the IANA time zone database")]
    Zone {
        /// As it was given.
        zone: String,
    },
    /// What is said of the API server's resources and answers means nothing elsewhere.
    #[error("http.ports: are not allowed beside requests and apiFault, which are for the API server")]
    Ports,
    /// Such a state may be gone already, or be the newest.
    #[error("apiFault.stale.ageNanoseconds: {nanoseconds} is not allowed; allowed are 1000000000 to 60000000000")]
    Age {
        /// The policy's.
        nanoseconds: u64,
    },
    /// Nothing would ever arrive.
    #[error("apiFault.slowBody.bytesPerSecond: must be at least 1")]
    Speed,
}

impl Fault {
    /// Its name in logs, metrics and messages.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.injection, self.fault)
    }

    /// The regular expressions in it.
    pub fn regexes(&self) -> impl Iterator<Item = &str> {
        let texts = self.http.iter().flat_map(|one| [&one.host, &one.path]).flatten();
        texts.filter_map(|text| match text {
            TextMatch::Regex(regex) => Some(regex.as_str()),
            TextMatch::Exact(_) => None,
        })
    }

    /// The same for requests to the API server only; `None` if it hits none.
    pub fn on_api_server(&self) -> Option<Self> {
        let http: Vec<HttpMatch> = self.http.iter().filter(|one| one.ports.is_empty()).cloned().collect();
        // Without any match it would hit every request.
        let hits_none = http.is_empty() && !self.http.is_empty();
        (!hits_none).then(|| Self { http, ..self.clone() })
    }

    /// Whether a proxy can do it, but for its regular expressions.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), FaultError> {
        if let Some(Abort { status, .. }) = self.abort.filter(|abort| !(200..600).contains(&abort.status)) {
            return Err(FaultError::Status { status });
        }
        if let Some(times) = self.times.as_ref().filter(|times| TimeZone::get(&times.zone).is_err()) {
            return Err(FaultError::Zone { zone: times.zone.clone() });
        }
        let is_for_api_server = self.api_fault.is_some() || !self.requests.is_empty();
        if is_for_api_server && self.http.iter().any(|one| !one.ports.is_empty()) {
            return Err(FaultError::Ports);
        }
        match self.api_fault.map(|fault| fault.kind) {
            Some(ApiFaultKind::SlowBody { bytes_per_second: 0 }) => Err(FaultError::Speed),
            Some(ApiFaultKind::Stale { age_nanoseconds }) if !STATE_AGES.contains(&age_nanoseconds) => {
                Err(FaultError::Age { nanoseconds: age_nanoseconds })
            }
            _ => Ok(()),
        }
    }
}

/// A regular expression that the whole text must match.
///
/// # Errors
/// If it is none, or takes too much memory.
pub fn whole_match(text: &str) -> Result<Regex, FaultError> {
    let built = RegexBuilder::new(&format!(r"\A(?:{text})\z"))
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES / 16)
        .build();
    built.map_err(|error| FaultError::Regex { text: text.to_owned(), reason: error.to_string() })
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(http: &[HttpMatch]) -> Fault {
        Fault {
            injection: "ops/storm".to_owned(),
            fault: "one".to_owned(),
            delay: None,
            abort: Some(Abort { status: 503, share: WHOLE }),
            api_fault: None,
            requests: Vec::new(),
            http: http.to_vec(),
            times: None,
            includes_lock: false,
        }
    }

    fn at(ports: &[u16]) -> HttpMatch {
        HttpMatch { ports: ports.to_vec(), ..HttpMatch::default() }
    }

    #[test]
    fn what_is_left_for_the_api_server_never_grows() {
        for (http, left) in
            [(vec![], Some(0)), (vec![at(&[])], Some(1)), (vec![at(&[]), at(&[80])], Some(1)), (vec![at(&[80])], None)]
        {
            let fault = fault(&http);
            assert_eq!(fault.on_api_server().map(|fault| fault.http.len()), left, "{http:?}");
        }
    }

    #[test]
    fn ports_beside_what_only_the_api_server_has_are_refused() {
        let elsewhere = fault(&[at(&[]), at(&[80])]);
        let every = || vec!["*".to_owned()];
        let request = RequestMatch {
            api_groups: every(),
            resources: every(),
            verbs: every(),
            namespaces: every(),
            clusters: Vec::new(),
        };
        let lost = ApiFault { kind: ApiFaultKind::AnswerLost, share: WHOLE };
        assert_eq!(elsewhere.check(), Ok(()));
        assert_eq!(Fault { requests: vec![request], ..elsewhere.clone() }.check(), Err(FaultError::Ports));
        assert_eq!(Fault { api_fault: Some(lost), ..elsewhere }.check(), Err(FaultError::Ports));
        assert_eq!(Fault { api_fault: Some(lost), ..fault(&[at(&[])]) }.check(), Ok(()));
    }

    #[test]
    fn a_state_is_neither_the_newest_nor_gone() {
        for (nanoseconds, is_allowed) in
            [(0, false), (999_999_999, false), (1_000_000_000, true), (60_000_000_000, true), (60_000_000_001, false)]
        {
            let kind = ApiFaultKind::Stale { age_nanoseconds: nanoseconds };
            let stale = Fault { api_fault: Some(ApiFault { kind, share: WHOLE }), ..fault(&[]) };
            let expected = if is_allowed { Ok(()) } else { Err(FaultError::Age { nanoseconds }) };
            assert_eq!(stale.check(), expected);
        }
    }

    #[test]
    fn a_regular_expression_matches_the_whole_text() {
        for (text, matched, others) in
            [("/api/v1|/apis", "/apis", "/apis/apps"), ("a.c", "abc", "xabc"), ("^/healthz$", "/healthz", "/healthz/")]
        {
            let regex = whole_match(text).unwrap();
            assert!(regex.is_match(matched) && !regex.is_match(others), "{text}");
        }
        let wrong = whole_match("(").unwrap_err().to_string();
        assert!(wrong.starts_with("http: \"(\" is no regular expression"), "{wrong}");
    }
}
