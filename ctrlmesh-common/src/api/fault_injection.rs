//! `FaultInjection`: makes requests of an operator fail or wait, for tests.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{LabelSelector, TargetStatus, rules};

/// Delays or fails some requests of the selected pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[expect(clippy::duplicated_attributes, reason = "several columns have one type")]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "ctrlmesh.kusionstack.io",
    version = "v1alpha1",
    kind = "FaultInjection",
    shortname = "fj",
    category = "ctrlmesh",
    namespaced,
    status = "FaultInjectionStatus",
    derive = "PartialEq",
    doc = "Delays or fails some requests of the selected pods.",
    printcolumn(name = "Disabled", type_ = "boolean", json_path = ".spec.disabled"),
    printcolumn(name = "Selector", type_ = "string", json_path = ".spec.selector.matchLabels"),
    printcolumn(
        name = "Programmed",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Programmed\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct FaultInjectionSpec {
    /// Which pods, of this namespace, meet the faults. Required, with at least one requirement: a fault that is left
    /// without a selector is refused and does not hit every pod of the namespace. To mean every one, ask for the label
    /// `ctrlmesh.kusionstack.io/enable-proxy`, with the operator Exists.
    #[x_kube(validation = Rule::new(rules::HAS_REQUIREMENT)
        .message(rules::HAS_REQUIREMENT_MESSAGE))]
    pub selector: LabelSelector,
    /// Switches all faults off. Default false.
    #[serde(default)]
    pub disabled: bool,
    /// The faults. Each that matches a request is done to it, in this order; the first abort ends. Absent or empty:
    /// none. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub http_fault: Vec<HttpFault>,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.delay) || has(self.abort) || has(self.apiFault)")
    .message("delay: at least one of delay, abort and apiFault is required; the fault would do nothing"),
    validation = Rule::new("!has(self.apiFault) || !has(self.match) || !has(self.match.httpMatch) \
        || self.match.httpMatch.all(one, !has(one.ports) || size(one.ports) == 0)")
        .message("apiFault: is for the API server, and cannot be beside ports in match.httpMatch, which are for others"))]
pub struct HttpFault {
    /// The fault's name, for logs and metrics. Absent: it is called by its number, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub name: Option<String>,
    /// Delays the request. Absent: no delay. At least one of `delay`, `abort` and `apiFault` is required; with several,
    /// the request is delayed first. The delays of several faults add up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,
    /// Answers the request with an error, and the server never sees it. A connection to another server over TLS is
    /// reset instead. Absent: the request goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abort: Option<Abort>,
    /// Does to the request what an API server does at times. Not beside `ports` in `match.httpMatch`. Absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_fault: Option<ApiFault>,
    /// Which requests: those that any of `resources` and any of `httpMatch` match. Absent: all to the API server.
    #[serde(default, rename = "match", skip_serializing_if = "Option::is_none")]
    pub matches: Option<FaultMatch>,
    /// When; all fields that are there must agree. Absent: always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effective_time: Option<EffectiveTime>,
    /// Whether the fault may hit requests for the leader-election lock, too. An operator that cannot renew its lock
    /// restarts. Default false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub include_lock: bool,
}

/// A delay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Delay {
    /// For how long: a duration such as 500ms or 5s, greater than zero.
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::POSITIVE_DURATION)
        .message(rules::POSITIVE_DURATION_MESSAGE))]
    pub fixed_delay: String,
    /// Each request waits for a random part of this duration more. Absent: all wait equally long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::POSITIVE_DURATION)
        .message(rules::POSITIVE_DURATION_MESSAGE))]
    pub jitter: Option<String>,
    /// How many of a hundred requests are delayed, "0" to "100", with decimals. Default "100"; "0" is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::PERCENT))]
    pub percent: Option<String>,
}

/// An error that no server made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Abort {
    /// The HTTP status of the answer, 200 to 599.
    #[schemars(range(min = 200, max = 599))]
    pub http_status: i32,
    /// How many of a hundred requests are answered so, "0" to "100", with decimals. Default "100"; "0" is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::PERCENT))]
    pub percent: Option<String>,
}

/// What an API server does at times, and every client has to survive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.delay) == (self.type == 'DelayEvents')")
        .message("delay: is required with the type DelayEvents, and allowed with no other"),
    validation = Rule::new("has(self.bytesPerSecond) == (self.type == 'SlowBody')")
        .message("bytesPerSecond: is required with the type SlowBody, and allowed with no other"),
    validation = Rule::new("has(self.age) == (self.type == 'Stale')")
        .message("age: is required with the type Stale, and allowed with no other"),
    validation = Rule::new("!has(self.after) || self.type == 'CutWatch'")
        .message("after: is allowed with the type CutWatch only"),
    validation = Rule::new("!has(self.retryAfterSeconds) || self.type == 'TooManyRequests'")
        .message("retryAfterSeconds: is allowed with the type TooManyRequests only")
)]
pub struct ApiFault {
    /// What is done.
    #[serde(rename = "type")]
    pub kind: ApiFaultType,
    /// How many of a hundred requests it is done to, "0" to "100", with decimals. Default "100"; "0" is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::PERCENT))]
    pub percent: Option<String>,
    /// How much later each event arrives. Required with the type `DelayEvents`, absent with every other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::POSITIVE_DURATION)
        .message(rules::POSITIVE_DURATION_MESSAGE))]
    pub delay: Option<String>,
    /// How long a watch lives before it is cut, with the type `CutWatch`. Absent: it is cut in its first event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::POSITIVE_DURATION)
        .message(rules::POSITIVE_DURATION_MESSAGE))]
    pub after: Option<String>,
    /// How fast the answer arrives, in bytes: 1 to 1000000000 (1 GB). Required with the type `SlowBody`, absent with
    /// every other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000), extend("format" = "int64"))]
    pub bytes_per_second: Option<u32>,
    /// How old the state is that a list is answered from: 1s to 1m. Required with the type `Stale`, absent with every
    /// other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::STATE_AGE).message(rules::STATE_AGE_MESSAGE))]
    pub age: Option<String>,
    /// When the client may come again, with the type `TooManyRequests`: 1 to 86400 (a day). Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400), extend("format" = "int64"))]
    pub retry_after_seconds: Option<u32>,
}

/// What an API server does at times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiFaultType {
    /// The request is carried out, and its connection breaks before the answer. Not for watches.
    AnswerLost,
    /// A watch ends with 410: its version is too old, and the client lists again.
    ExpireWatch,
    /// A watch breaks in the middle of an event.
    CutWatch,
    /// Each event of a watch arrives late, in order.
    DelayEvents,
    /// A list is answered from an older state, as by an API server that lags behind.
    Stale,
    /// An update or patch is answered 409: the object has changed meanwhile.
    Conflict,
    /// The answer arrives slowly.
    SlowBody,
    /// The answer is 429 with `Retry-After`.
    TooManyRequests,
    /// The client is told to open another connection (GOAWAY of HTTP/2).
    GoAway,
}

/// Which requests meet a fault: one that any of `resources` and any of `httpMatch` match; an empty list matches all to
/// the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.resources) || size(self.resources) == 0 || !has(self.httpMatch) \
    || self.httpMatch.all(one, !has(one.ports) || size(one.ports) == 0)")
    .message("resources: are those of the API server, and cannot be beside ports in httpMatch, which are for others"))]
pub struct FaultMatch {
    /// Requests to the API server, of which any must match. Not beside `ports` in `httpMatch`. Absent or empty: every
    /// request. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub resources: Vec<FaultResources>,
    /// Requests by their HTTP form, of which any must match. Those without `ports` match requests to the API server,
    /// and those with `ports` match requests to other servers. Absent or empty: every request to the API server. At
    /// most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub http_match: Vec<HttpMatch>,
}

/// Requests to the API server; an absent list matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultResources {
    /// API groups; `""` is the core group, `"*"` is every group. Absent or empty: every group. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub api_groups: Vec<String>,
    /// Namespaces; `"*"` is every namespace, and what is in none. Absent or empty: the same as `"*"`. At most 1024.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub namespaces: Vec<String>,
    /// Resources, `resource/subresource` included; `"*"` is every resource. Absent or empty: every resource. At most
    /// 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 127)), extend("x-kubernetes-list-type" = "atomic"))]
    pub resources: Vec<String>,
    /// API verbs such as list or update; `"*"` is every verb. Absent or empty: every verb. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub verbs: Vec<String>,
    /// Member clusters, of the ShardingConfig's `clusters`; `"member-*"` is each whose name begins so. Absent or empty:
    /// the API server itself, and no member. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub clusters: Vec<String>,
}

/// Requests by their HTTP form; an absent field matches all. Of TLS to another server, host and port alone are seen.
/// The other fields match any there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpMatch {
    /// The host that is talked to, without port. Absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<TextMatch>,
    /// The path of the URL, without its query. That of a request to another server is compared in its normal form.
    /// Absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<TextMatch>,
    /// The HTTP method, such as POST; `"*"` is every method. Absent: every method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::METHOD))]
    pub method: Option<String>,
    /// Headers that must all be there. Absent or empty: none is asked for. At most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub headers: Vec<HeaderMatch>,
    /// TCP ports of other servers than the API server, at any address. The entry then matches requests to these ports,
    /// and none to the API server. The pods' connections to them go to their proxy, which does the fault. Not
    /// 5441, 15001 or 15002, which are the proxy's own. All FaultInjections and CircuitBreakers that select a pod may
    /// name 32 ports. Absent or empty: the entry matches requests to the API server only. At most 32, distinct.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend(
            "items" = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535},
            "x-kubernetes-list-type" = "set"
        )
    )]
    pub ports: Vec<u16>,
}

/// A text, exactly or by regular expression.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.exact) != has(self.regex)").message("exact: exactly one of exact and regex is required"))]
pub struct TextMatch {
    /// The whole text, in just this case. Absent where `regex` is there; exactly one of the two is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub exact: Option<String>,
    /// A regular expression, in the syntax of Go's regexp (RE2), that must match the whole text. Absent where `exact`
    /// is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub regex: Option<String>,
}

/// A header and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeaderMatch {
    /// The header's name, in any case.
    #[schemars(length(min = 1, max = 256), regex(pattern = rules::HEADER_NAME))]
    pub name: String,
    /// The header's value, exactly.
    #[schemars(length(max = 4096))]
    pub value: String,
}

/// When a fault is done; an absent field is no restriction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.startTime) || !has(self.endTime) || self.startTime != self.endTime")
        .message("endTime: is the same as startTime; leave both out for the whole day"),
    validation = Rule::new(rules::SOME_DAY)
        .message("daysOfMonth: none of these days is in any of the months; the fault would never be done")
)]
pub struct EffectiveTime {
    /// The time zone of all fields, by its name in the IANA database, such as Europe/Berlin. Default UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), regex(pattern = rules::TIME_ZONE))]
    pub time_zone: Option<String>,
    /// From this time of the day, "HH:MM:SS". A start after the end reaches over midnight, and then the day is
    /// the one that it starts on. Absent: from midnight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8), regex(pattern = rules::TIME_OF_DAY))]
    pub start_time: Option<String>,
    /// Until this time of the day, "HH:MM:SS". Absent: until midnight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8), regex(pattern = rules::TIME_OF_DAY))]
    pub end_time: Option<String>,
    /// Days of the week, 0 (Sunday) to 6. Absent or empty: every day. At most 7.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7), inner(range(min = 0, max = 6)), extend("x-kubernetes-list-type" = "set"))]
    pub days_of_week: Vec<i32>,
    /// Days of the month, 1 to 31. Absent or empty: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 31), inner(range(min = 1, max = 31)), extend("x-kubernetes-list-type" = "set"))]
    pub days_of_month: Vec<i32>,
    /// Months, 1 to 12. Absent or empty: every month.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 12), inner(range(min = 1, max = 12)), extend("x-kubernetes-list-type" = "set"))]
    pub months: Vec<i32>,
}

/// What the proxies reported. Absent until one has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultInjectionStatus {
    /// The `metadata.generation` that this status speaks of. Absent until it is first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When this status was last written. Absent until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_updated_time: Option<Time>,
    /// A hash of the spec that the proxies should have. Absent until the manager has made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_spec_hash: Option<String>,
    /// Accepted (valid) and Programmed (every proxy of a selected pod does the faults). `PathNotVisible` is there where
    /// a fault asks for a path, a method or a header, and may meet TLS, which hides them. Absent or empty until the
    /// manager has seen it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The selected pods, at most 200. Absent or empty: no pod is selected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub target_status: Vec<TargetStatus>,
}
