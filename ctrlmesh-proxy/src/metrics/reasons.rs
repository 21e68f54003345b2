//! By what are requests and failures told apart?

/// Kubernetes' verbs, as requests are counted by; whatever else a request says is counted as `other`.
pub(super) const VERBS: [&str; 11] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "post",
    "connect",
    "other",
];

/// What a request asks for, as requests are counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Verb(usize);

/// How a request ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The API server answered 1xx, 2xx or 3xx.
    Ok,
    /// The API server answered 4xx.
    ClientError,
    /// The API server answered 5xx.
    ServerError,
    /// The proxy answered in its place.
    Refused,
    /// The client went away, or the API server reset the stream.
    Aborted,
}

/// Why the API server could not be asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum UpstreamError {
    /// No connection within the deadline.
    Connect,
    /// Its certificate was refused, or TLS failed in another way.
    Tls,
    /// The connection broke before the response began.
    Broken,
    /// No response within the deadline.
    Timeout,
}

/// Why a client's connection was ended by us.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ClientError {
    /// As many connections as allowed are open.
    TooMany,
    /// It said nothing, or too little, within the deadline.
    Slow,
    /// TLS failed.
    Tls,
    /// Where it wanted to go, or whose it is, is not known.
    NoDestination,
    /// It is not TLS, and the policy could not be applied to it.
    NotTls,
    /// It broke HTTP, or one of its limits: header size, resets, floods of CONTINUATION or SETTINGS.
    Protocol,
    /// What it asked for or sent was not read on the other side, and more waited for its pod or the process than may.
    Unread,
}

/// In the order of [`Outcome`].
pub(super) const OUTCOMES: [&str; 5] = ["ok", "client_error", "server_error", "refused", "aborted"];

/// In the order of [`UpstreamError`].
pub(super) const UPSTREAM_ERRORS: [&str; 4] = ["connect", "tls", "broken", "timeout"];

/// In the order of [`ClientError`].
pub(super) const CLIENT_ERRORS: [&str; 7] =
    ["too_many", "slow", "tls", "no_destination", "not_tls", "protocol", "unread"];

// === impl Verb ===

impl Verb {
    /// Of Kubernetes' verb, lower case.
    pub fn of(verb: &str) -> Self {
        Self(VERBS.iter().position(|known| *known == verb).unwrap_or(VERBS.len() - 1))
    }

    /// Where it stands among the verbs.
    pub(super) fn at(self) -> usize {
        self.0
    }
}
