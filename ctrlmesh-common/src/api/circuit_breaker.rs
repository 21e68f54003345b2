//! `CircuitBreaker`: limits the requests of an operator.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{LabelSelector, rules};

mod status;

pub use status::*;

/// Limits how often the selected pods may do something, and what they may talk to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[expect(clippy::duplicated_attributes, reason = "several columns have one type")]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "ctrlmesh.kusionstack.io",
    version = "v1alpha1",
    kind = "CircuitBreaker",
    shortname = "cbk",
    category = "ctrlmesh",
    namespaced,
    status = "CircuitBreakerStatus",
    derive = "PartialEq",
    doc = "Limits how often the selected pods may do something, and what they may talk to.",
    printcolumn(name = "Selector", type_ = "string", json_path = ".spec.selector.matchLabels"),
    printcolumn(
        name = "Programmed",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Programmed\")].status"
    ),
    printcolumn(name = "Open", type_ = "string", json_path = ".status.conditions[?(@.type==\"Open\")].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct CircuitBreakerSpec {
    /// Which pods, of this namespace, are held back. Required, with at least one requirement: an empty selector would
    /// mean every pod of the namespace, which nobody may mean by leaving something out. To mean it, ask for the label
    /// `ctrlmesh.kusionstack.io/enable-proxy`, with the operator Exists.
    #[x_kube(validation = Rule::new(rules::HAS_REQUIREMENT)
        .message(rules::HAS_REQUIREMENT_MESSAGE))]
    pub selector: LabelSelector,
    /// Limits on how often; each that a request falls under has to let it pass. Absent or empty: no limit. At most 64,
    /// with distinct names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub rate_limitings: Vec<RateLimiting>,
    /// Rules on what the pods may talk to beside the API server; all must let a request pass. They hold for TCP
    /// connections to the ports that the rules of a pod name, at any address. Connections to other ports pass.
    /// All rules that select a pod may name 32 ports, together with its FaultInjections, and have 16 regular
    /// expressions. Absent or empty: the pods may talk to anything. At most 64, with distinct names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub traffic_intercept_rules: Vec<TrafficInterceptRule>,
}

/// A limit on how often something may be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.triggerPolicy in ['ForceOpened', 'ForceClosed'] || has(self.bucket)")
        .message("bucket: is required with the trigger policies Normal and LimiterOnly"),
    validation = Rule::new("has(self.resourceRules) && size(self.resourceRules) > 0 || has(self.restRules) && size(self.restRules) > 0")
        .message("resourceRules: at least one rule, here or in restRules, is required; the limit would apply to nothing"),
    validation = Rule::new("!has(self.bucket) || !has(self.bucket.percentOfShare) || has(self.resourceRules) && size(self.resourceRules) > 0 && self.resourceRules.all(rule, !('*' in rule.apiGroups) && !rule.resources.exists(name, name.startsWith('*')))")
        .message("resourceRules: are required with bucket.percentOfShare, and must write out groups and resources; their objects are counted")
)]
pub struct RateLimiting {
    /// The limit's name, distinct within the resource.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// How much is allowed: a token bucket. Absent: nothing is counted, which only the trigger policies `ForceOpened`
    /// and `ForceClosed` allow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<Bucket>,
    /// When the breaker opens. Normal: when the bucket is empty, until it recovers. `LimiterOnly`: never, requests
    /// beyond the bucket are refused one by one. `ForceOpened`: it is open, `ForceClosed`: it is closed, whatever the
    /// bucket says. Default Normal.
    #[serde(default)]
    pub trigger_policy: TriggerPolicy,
    /// How a breaker that has opened closes again; used with the trigger policy Normal only. Absent: Manual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recover_policy: Option<RecoverPolicy>,
    /// What an open breaker does to a request. Refuse: it is refused at once. Hold: it waits up to 20 s for the breaker
    /// to close, and is refused then. Default Refuse.
    #[serde(default, skip_serializing_if = "OnOpen::is_refuse")]
    pub on_open: OnOpen,
    /// The requests to the API server that are counted: those that any of the rules matches. Absent or empty: none. At
    /// least one rule, here or in `restRules`, is required. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub resource_rules: Vec<ResourceRule>,
    /// The requests to other servers that are counted: those that any of the rules matches. The pods' connections to
    /// their ports, at any address, go to their proxy. A connection over TLS counts as one request, and is matched by
    /// host and port alone. A refused request gets 429; a refused connection is closed. None is held. Absent or
    /// empty: none. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub rest_rules: Vec<RestRule>,
    /// Free-form properties, kept for compatibility; nothing reads them. Absent or empty: none. At most 64, of at most
    /// 1024 characters each.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 1024}))]
    pub properties: BTreeMap<String, String>,
}

/// A token bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.scope) || self.scope == 'Pod' || !has(self.limit) || self.limit > 0")
        .message("limit: must be at least 1 with the scopes Shard and Operator; a pod that comes begins with an empty bucket"),
    validation = Rule::new("has(self.percentOfShare) || has(self.burst) && has(self.limit)")
        .message("burst, limit: are both required, unless there is percentOfShare"),
    validation = Rule::new("!has(self.percentOfShare) || !has(self.burst) && !has(self.limit)")
        .message("percentOfShare: stands in place of burst and limit, and cannot be beside them"),
    validation = Rule::new("!has(self.percentOfShare) || !has(self.scope) || self.scope == 'Pod'")
        .message("scope: must be Pod with percentOfShare; the share is that of the pod's shard")
)]
pub struct Bucket {
    /// How many requests may be made at once: what the bucket holds. At least 1, because a bucket that holds nothing
    /// never lets a request pass; to refuse all, there is the trigger policy `ForceOpened`. Required, unless there is
    /// `percentOfShare`, with which it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_294_967_295_u32), extend("format" = "int64"))]
    pub burst: Option<u32>,
    /// In which time `limit` requests, or `percentOfShare` of the share, may be made: a duration such as 1s, 10m or
    /// 1h30m, greater than zero.
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::POSITIVE_DURATION)
        .message(rules::POSITIVE_DURATION_MESSAGE))]
    pub interval: String,
    /// How many requests may be made in `interval`: what flows into the bucket in that time. 0: nothing does, so after
    /// the first `burst` requests none is allowed. Required, unless there is `percentOfShare`, with which it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4_294_967_295_u32), extend("format" = "int64"))]
    pub limit: Option<u32>,
    /// In place of `burst` and `limit`: in any time of `interval`, a pod may make one request for so many percent of
    /// the objects of its share. The objects of the kinds and namespaces of `resourceRules` are counted; these have to
    /// be labelled. 1 to 100, and always at least one request. Absent: `burst` and `limit` say how much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100), extend("format" = "int64"))]
    pub percent_of_share: Option<u32>,
    /// Whose bucket it is. Pod: each pod has one of its own. Shard, Operator: the pods of a shard, or of an operator,
    /// share one; each has an equal part, and a pod that comes begins with an empty one. Default Pod.
    #[serde(default, skip_serializing_if = "BucketScope::is_pod")]
    pub scope: BucketScope,
}

/// Whose bucket it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BucketScope {
    /// Each pod has one.
    #[default]
    Pod,
    /// The pods of a shard share one.
    Shard,
    /// The pods of an operator share one.
    Operator,
}

impl BucketScope {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_pod(&self) -> bool {
        *self == Self::Pod
    }
}

/// When a breaker opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TriggerPolicy {
    /// When the bucket is empty; it stays open until it recovers.
    #[default]
    Normal,
    /// Never: requests beyond the bucket are refused one by one.
    LimiterOnly,
    /// It is open, whatever the bucket says.
    ForceOpened,
    /// It is closed, whatever the bucket says.
    ForceClosed,
}

/// What an open breaker does to a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnOpen {
    /// It is refused at once.
    #[default]
    Refuse,
    /// It waits, and is refused after 20 s.
    Hold,
}

impl OnOpen {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_refuse(&self) -> bool {
        *self == Self::Refuse
    }
}

/// How an open breaker closes again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type != 'SleepingWindow' || has(self.sleepingWindowSize)")
    .message("sleepingWindowSize: is required with the type SleepingWindow"))]
pub struct RecoverPolicy {
    /// Manual: a user closes it, by the annotation `circuitbreaker.ctrlmesh.kusionstack.io/reset` with the limit's
    /// name, or by changing the limit. `SleepingWindow`: after `sleepingWindowSize` one request passes as a probe, and
    /// the breaker closes where the API server answers it.
    #[serde(rename = "type")]
    pub kind: RecoverType,
    /// For how long the breaker stays open: a duration such as 10m, greater than zero. Required with the type
    /// `SleepingWindow`. Absent with Manual, where it is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 2, max = 32),
        regex(pattern = rules::DURATION)
    )]
    #[x_kube(validation = Rule::new(rules::POSITIVE_DURATION)
        .message(rules::POSITIVE_DURATION_MESSAGE))]
    pub sleeping_window_size: Option<String>,
}

/// What closes an open breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RecoverType {
    /// A user, by an annotation or by changing the limit.
    Manual,
    /// Time.
    SleepingWindow,
}

/// Requests to the API server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceRule {
    /// API groups; `""` is the core group, `"*"` is every group. 1 to 64.
    #[schemars(length(min = 1, max = 64), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub api_groups: Vec<String>,
    /// Resources, `resource/subresource` included; `"pods/*"` is every subresource of pods, `"*/status"` the status of
    /// every resource, `"*"` every resource and subresource. 1 to 64.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 127)), extend("x-kubernetes-list-type" = "atomic"))]
    pub resources: Vec<String>,
    /// API verbs such as create, update or delete; `"*"` is every verb. 1 to 64.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub verbs: Vec<String>,
    /// Namespaces; `"*"` is every namespace, and the only one to match requests without a namespace. 1 to 1024.
    #[schemars(length(min = 1, max = 1024), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub namespaces: Vec<String>,
    /// Member clusters, of the ShardingConfig's `clusters`; `"member-*"` is each whose name begins so. Absent or empty:
    /// the API server itself, and no member. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub clusters: Vec<String>,
}

/// Requests to another server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestRule {
    /// `scheme://host:port/path`, with a host as in `contents` of `trafficInterceptRules`. Without a port, it is that
    /// of the scheme. A path that ends in `/*` stands for all that begin so; without one, every path counts. At most
    /// 2048 characters.
    #[schemars(length(max = 2048), regex(pattern = r"^https?://[^/]+(/.*)?$"))]
    pub url: String,
    /// The HTTP method, such as POST; `"*"` is every method. Over TLS every method counts.
    #[schemars(length(min = 1, max = 16), regex(pattern = rules::METHOD))]
    pub method: String,
}

/// What may be talked to beside the API server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!('*' in self.methods) || size(self.methods) == 1")
    .message("methods: \"*\" is every method, and cannot be beside others"))]
pub struct TrafficInterceptRule {
    /// The rule's name, distinct within the resource.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// What happens to requests that match. Whitelist: only they pass, of what goes to the ports that the rule names.
    /// Blacklist: they are refused, and others pass.
    pub intercept_type: InterceptType,
    /// How `contents` are read. Normal: as URLs. Regexp: as regular expressions.
    pub content_type: ContentType,
    /// The URLs that match; a request needs one of them. 1 to 256. With the type Normal, each is
    /// `[http://|https://]HOST[:PORT][/PATH]`. HOST is a DNS name, an IPv4 address, an IPv6 address in brackets,
    /// `*.example.com` for every name below, or `*`. Without a scheme, both match. Without PORT, the scheme's own port
    /// matches, 80 or 443; without a scheme too, those in `ports`. A PATH that ends in `/*` stands for all that begin
    /// so; without PATH, every path matches. With the type Regexp, each is a regular expression in Go's syntax. It must
    /// match the whole `SCHEME://HOST[:PORT]/PATH`, with the port where it is not the scheme's own. Queries are not
    /// looked at. A connection over TLS is matched by host and port alone.
    #[schemars(length(min = 1, max = 256), inner(length(min = 1, max = 2048)), extend("x-kubernetes-list-type" = "atomic"))]
    pub contents: Vec<String>,
    /// HTTP methods that match, such as POST; `"*"` is every method, and stands alone. Over TLS every method matches. 1
    /// to 16.
    #[schemars(length(min = 1, max = 16), inner(length(max = 16), regex(pattern = rules::METHOD)), extend("x-kubernetes-list-type" = "set"))]
    pub methods: Vec<String>,
    /// TCP ports of the contents that name neither scheme nor port, and of regular expressions. The pod's connections
    /// to them go to its proxy. Not 5441, 15001 or 15002, which are the proxy's own. Absent or empty: 80 and 443. At
    /// most 32, distinct.
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

/// What happens to traffic that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum InterceptType {
    /// Only what matches passes.
    Whitelist,
    /// Only what does not match passes.
    Blacklist,
}

/// How the contents of a rule are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ContentType {
    /// As URLs.
    Normal,
    /// As regular expressions, in the syntax of Go's regexp (RE2).
    Regexp,
}
