//! The lines that a trace consists of: one JSON object each, or nothing.

use serde::{Deserialize, Serialize};

/// One line. A line without anything says that the proxy is still there.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum TraceLine {
    /// A request is answered, or ended without an answer.
    Request(Box<TracedRequest>),
    /// So many more requests since the last such line were not shown: there were too many of them.
    Omitted(u64),
    /// The trace cannot begin, for this reason.
    Error(String),
}

/// A request, up to the head of its answer.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TracedRequest {
    /// When the proxy had the request's head, as RFC 3339 has it.
    pub time: String,
    /// `NAMESPACE/NAME` of the operator's pod. Empty where the proxy does not know it.
    pub pod: String,
    /// The pod's shard. `None`: it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// Of HTTP.
    pub method: String,
    /// As the API server names it.
    pub verb: String,
    /// What the operator asked for: path and query. A value that may be secret is shown as "…".
    pub target: String,
    /// What the API server was asked for in its place. `None`: the same, or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent: Option<String>,
    /// Whether the name of the leader-election lock was changed in the body.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lock_renamed: bool,
    /// What the proxy did: `passed`, `rewritten`, `refused`, `breaker`, `fault` or `failed`.
    pub decision: String,
    /// Of the answer that the operator got. `None`: it got none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Why the proxy did not let the request pass, or why there is no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// From the request's head to that of its answer.
    pub milliseconds: f64,
}
