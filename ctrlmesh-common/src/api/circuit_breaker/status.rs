//! The status of a `CircuitBreaker`: what the proxies reported, and what the manager's leader divides and counts.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::TargetStatus;

/// What the proxies reported. Absent until one has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CircuitBreakerStatus {
    /// The `metadata.generation` that this status speaks of. Absent until it is first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When this status was last written. Absent until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_updated_time: Option<Time>,
    /// A hash of the spec that the proxies should have. Absent until the manager has made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_spec_hash: Option<String>,
    /// Accepted (valid), Programmed (every proxy of a selected pod enforces it), and Open (a breaker refuses requests
    /// now). `PathNotVisible` is there where a rule of `trafficInterceptRules` asks for a path or a method, and may
    /// meet TLS, which hides both. Absent or empty until the manager has seen it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// How buckets with the scope Shard or Operator are divided. Written by the manager's leader only; the proxies
    /// follow it. Absent or empty: no bucket is shared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["group"]))]
    pub divisions: Vec<BucketDivision>,
    /// How many objects are in the share of each shard, for limits with `percentOfShare`. Written by the manager's
    /// leader only; the proxies follow it. Absent or empty: nothing is counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["limit", "shard"]))]
    pub shares: Vec<ShareSize>,
    /// The selected pods, at most 200: first those with an open breaker. Absent or empty: no pod is selected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub target_status: Vec<BreakerTargetStatus>,
}

/// How the buckets of a CircuitBreaker are divided among the pods that share them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BucketDivision {
    /// Whose pods: an operator as `NAMESPACE/NAME` of its ShardingConfig, or a shard as `NAMESPACE/NAME/SHARD`.
    pub group: String,
    /// Grows with each change of the division: the time of the change, in milliseconds since 1970.
    pub generation: i64,
    /// How many parts there are.
    #[schemars(range(min = 1, max = 4_294_967_295_u32), extend("format" = "int64"))]
    pub parts: u32,
    /// The pods that have one. Other pods of the group wait until each of these enforces its part.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pods: Vec<DivisionPod>,
}

/// How many objects a limit goes by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShareSize {
    /// The limit's name.
    pub limit: String,
    /// Whose share, as `NAMESPACE/NAME/SHARD`, with the name of the root.
    pub shard: String,
    /// How many objects of the limit's kinds and namespaces are in it, by which its budget goes. A growth of less than
    /// a tenth is left out.
    #[schemars(range(min = 0))]
    pub objects: i64,
    /// A hash of the limit's `resourceRules`, for which the objects were counted.
    pub resource_rules_hash: String,
}

/// A pod that has a part of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DivisionPod {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// The breaker in one pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BreakerTargetStatus {
    /// The pod and what its proxy has.
    #[serde(flatten)]
    pub target: TargetStatus,
    /// The state of each limit; of all pods at most 2000, first those that are open. Absent or empty: the pod's proxy
    /// has reported none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub limiting_snapshots: Vec<LimitingSnapshot>,
    /// What trafficInterceptRules have refused; of all pods at most 1000. Absent or empty: nothing, as far as is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub intercept_snapshots: Vec<InterceptSnapshot>,
}

/// What one trafficInterceptRule has refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InterceptSnapshot {
    /// The rule's name.
    pub name: String,
    /// How many requests and connections, since the pod's proxy started.
    pub refused: i64,
    /// The last one, as HOST:PORT.
    pub last_refused: String,
    /// When that was.
    pub last_refused_time: Time,
}

/// The state of one limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LimitingSnapshot {
    /// The limit's name.
    pub name: String,
    /// Opened (requests are refused) or Closed.
    pub state: BreakerState,
    /// When the state last changed. Absent: it never has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// How many requests passed since the pod's proxy started. Absent: that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<i64>,
    /// How many requests were refused since then. Absent: that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<i64>,
}

/// Whether a breaker lets requests pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BreakerState {
    /// Requests are refused.
    Opened,
    /// Requests pass.
    Closed,
}
