//! Metrics of the operator itself that a new version is judged by: `spec.root.rollout.analysis.metrics`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::rules;

/// A metric that has to be in its range at each check. Out of range, the check fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutMetric {
    /// What the metric is called in the messages of checks. Each name is there once.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Who is asked for the value.
    pub provider: MetricProvider,
    /// Where the value has to be.
    pub threshold_range: ThresholdRange,
}

/// Who is asked for a metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricProvider {
    /// A Prometheus server, or another one with its HTTP API.
    pub prometheus: PrometheusProvider,
}

/// A query of a Prometheus server. The manager asks it over HTTP at each check, and waits 5 s at most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PrometheusProvider {
    /// The server, such as `http://prometheus.monitoring.svc:9090`, and the path that its API is below, if there is
    /// one. Only http.
    #[x_kube(validation = Rule::new(rules::METRIC_ADDRESS).message(rules::METRIC_ADDRESS_MESSAGE))]
    #[schemars(length(max = 2048))]
    pub address: String,
    /// PromQL with one number as its result: a scalar, or a vector of one sample. These are replaced: `{{revision}}`,
    /// the revision on trial; `{{promoted}}`, the promoted one; `{{namespace}}` and `{{root}}`, those of this
    /// ShardingConfig; `{{pods}}`, the names of the pods on trial, joined by `|`, such as for `pod=~"{{pods}}"`.
    #[x_kube(validation = Rule::new(rules::METRIC_QUERY).message(rules::METRIC_QUERY_MESSAGE))]
    #[schemars(length(min = 1, max = 4096))]
    pub query: String,
}

/// Where a value has to be, both ends included. At least one end is required.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(rules::HAS_BOUND).message(rules::HAS_BOUND_MESSAGE),
    validation = Rule::new(rules::ORDERED_RANGE).message(rules::ORDERED_RANGE_MESSAGE)
)]
pub struct ThresholdRange {
    /// The least value, a decimal number in quotes, such as "0.99". Absent: any value that is no greater than `max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = rules::DECIMAL))]
    pub min: Option<String>,
    /// The greatest value, a decimal number in quotes, such as "0.05". Absent: any value that is no less than `min`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = rules::DECIMAL))]
    pub max: Option<String>,
}
