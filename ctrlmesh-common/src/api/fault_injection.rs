//! `FaultInjection`: shows how an operator behaves when its API server does not.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{LabelSelector, rules};

/// Delays or fails some requests of the selected pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
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
    printcolumn(name = "Faults", type_ = "string", json_path = ".spec.httpFault[*].name"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct FaultInjectionSpec {
    /// Which pods, of this namespace, meet the faults. Required, with at least one requirement.
    #[x_kube(validation = Rule::new(rules::HAS_REQUIREMENT)
        .message(rules::HAS_REQUIREMENT_MESSAGE))]
    pub selector: LabelSelector,
    /// Switches all faults off. Default false.
    #[serde(default)]
    pub disabled: bool,
    /// The faults; the first that matches a request is done to it. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub http_fault: Vec<HttpFault>,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.delay) || has(self.abort)")
    .message("delay: at least one of delay and abort is required; the fault would do nothing"))]
pub struct HttpFault {
    /// The fault's name, for logs and metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub name: Option<String>,
    /// Delays the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,
    /// Answers the request with an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abort: Option<Abort>,
    /// Which requests. Absent: all.
    #[serde(default, rename = "match", skip_serializing_if = "Option::is_none")]
    pub matches: Option<FaultMatch>,
    /// When. Absent: always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effective_time: Option<EffectiveTime>,
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
    /// How many of a hundred requests are delayed, "0" to "100". Default "100"; "0" is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::PERCENT))]
    pub percent: Option<String>,
}

/// An error that the API server did not make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Abort {
    /// The HTTP status of the answer, 200 to 599.
    #[schemars(range(min = 200, max = 599))]
    pub http_status: i32,
    /// How many of a hundred requests are answered so, "0" to "100". Default "100"; "0" is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::PERCENT))]
    pub percent: Option<String>,
}

/// Which requests meet a fault: one that any of `resources` and any of `httpMatch` match; an empty list matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultMatch {
    /// Requests to the API server. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub resources: Vec<FaultResources>,
    /// Requests by their HTTP form. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub http_match: Vec<HttpMatch>,
}

/// Requests to the API server; an absent list matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultResources {
    /// API groups; `""` is the core group, `"*"` is every group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub api_groups: Vec<String>,
    /// Namespaces; `"*"` is every namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub namespaces: Vec<String>,
    /// Resources; `"*"` is every resource.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 127)), extend("x-kubernetes-list-type" = "atomic"))]
    pub resources: Vec<String>,
    /// API verbs; `"*"` is every verb.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub verbs: Vec<String>,
}

/// Requests by their HTTP form; an absent field matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpMatch {
    /// The host that is talked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<TextMatch>,
    /// The path of the URL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<TextMatch>,
    /// The HTTP method, such as POST.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = rules::METHOD))]
    pub method: Option<String>,
    /// Headers that must all be there. At most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub headers: Vec<HeaderMatch>,
}

/// A text, exactly or by regular expression.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.exact) != has(self.regex)").message("exact: exactly one of exact and regex is required"))]
pub struct TextMatch {
    /// The whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub exact: Option<String>,
    /// A regular expression that must match the whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub regex: Option<String>,
}

/// A header and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeaderMatch {
    /// The header's name, in any case.
    #[schemars(length(min = 1, max = 256))]
    pub name: String,
    /// The header's value, exactly.
    #[schemars(length(max = 4096))]
    pub value: String,
}

/// When a fault is done, in UTC; an absent field is no restriction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EffectiveTime {
    /// From this time of the day, "HH:MM:SS". A start after the end reaches over midnight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8), regex(pattern = rules::TIME_OF_DAY))]
    pub start_time: Option<String>,
    /// Until this time of the day, "HH:MM:SS".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8), regex(pattern = rules::TIME_OF_DAY))]
    pub end_time: Option<String>,
    /// Days of the week, 0 (Sunday) to 6.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7), inner(range(min = 0, max = 6)), extend("x-kubernetes-list-type" = "set"))]
    pub days_of_week: Vec<i32>,
    /// Days of the month, 1 to 31.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 31), inner(range(min = 1, max = 31)), extend("x-kubernetes-list-type" = "set"))]
    pub days_of_month: Vec<i32>,
    /// Months, 1 to 12.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 12), inner(range(min = 1, max = 12)), extend("x-kubernetes-list-type" = "set"))]
    pub months: Vec<i32>,
}

/// What the proxies reported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultInjectionStatus {
    /// The `metadata.generation` that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When this status was last written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_updated_time: Option<Time>,
    /// A hash of the spec that the proxies should have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_spec_hash: Option<String>,
    /// Each selected pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub target_status: Vec<FaultTargetStatus>,
}

/// The faults in one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultTargetStatus {
    /// The pod's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// The pod's address.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "podIP")]
    pub pod_ip: Option<String>,
    /// A hash of the spec that the pod's proxy has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
    /// What is wrong, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
