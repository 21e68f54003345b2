//! The label values of requests and failures.

/// Kubernetes' verbs; every other is counted as `other`.
pub(super) const VERBS: [&str; 11] =
    ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "post", "connect", "other"];

/// An index into `VERBS`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Verb(usize);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The API server answered 1xx, 2xx or 3xx.
    Ok,
    /// The API server answered 4xx.
    ClientError,
    /// The API server answered 5xx.
    ServerError,
    /// The proxy answered instead of the API server.
    Refused,
    /// The client went away, or the API server reset the stream.
    Aborted,
}

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

/// Why the proxy ended a client's connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ClientError {
    /// As many connections as allowed are open.
    TooMany,
    /// The client sent nothing, or too little, within the deadline.
    Slow,
    Tls,
    /// The connection's destination or pod is not known.
    NoDestination,
    /// A connection without TLS, to which the policy cannot be applied.
    NotTls,
    /// Broken HTTP, or a limit exceeded: header size, resets, floods of CONTINUATION or SETTINGS.
    Protocol,
    /// Unread bytes exceeded the memory budget of the pod or the process.
    Unread,
}

/// In the order of [`Outcome`].
pub(super) const OUTCOMES: [&str; 5] = ["ok", "client_error", "server_error", "refused", "aborted"];

/// In the order of [`UpstreamError`].
pub(super) const UPSTREAM_ERRORS: [&str; 4] = ["connect", "tls", "broken", "timeout"];

/// In the order of [`ClientError`].
pub(super) const CLIENT_ERRORS: [&str; 7] =
    ["too_many", "slow", "tls", "no_destination", "not_tls", "protocol", "unread"];

impl Outcome {
    /// As the label `outcome` has it.
    pub fn name(self) -> &'static str {
        OUTCOMES[self as usize]
    }
}

impl Verb {
    /// `verb` in lower case.
    pub fn of(verb: &str) -> Self {
        Self(VERBS.iter().position(|known| *known == verb).unwrap_or(VERBS.len() - 1))
    }

    pub(super) fn at(self) -> usize {
        self.0
    }
}
