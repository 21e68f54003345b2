//! The state of a circuit breaker or a fault injection in each pod that it selects.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What one pod's proxy has of a circuit breaker or a fault injection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// The pod's name. Absent: it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// The pod's address. Absent: it has none yet.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "podIP")]
    pub pod_ip: Option<String>,
    /// A hash of the spec that the pod's proxy has. Absent: it has none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
    /// What is wrong. Absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
