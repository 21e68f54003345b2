//! What the manager observed of a `ShardingConfig`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::RolloutStatus;
use crate::ownership::{MAX_EPOCH, Ownership, known_slots, schema};
use crate::slots::Slot;

/// What the manager observed. Absent until it has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardingConfigStatus {
    /// The `metadata.generation` that this status speaks of. Absent until it is first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Whether it is a root. Absent until the status is first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_root: Option<bool>,
    /// Grows with every change of what the operator's proxies are told. Absent: there was no table yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = MAX_EPOCH))]
    pub epoch: Option<i64>,
    /// A hash of what they are told in this epoch: a replica of the manager that would tell something else waits until
    /// the leader has written it here. Absent: there was no table yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub policy_digest: Option<String>,
    /// The resourceVersion at which this epoch began: what operators read before it is from before the change. Absent:
    /// there was no table yet, or it was written by a manager that did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub changed_at: Option<String>,
    /// Accepted (the spec is valid and complete), Programmed (every proxy has it), Degraded (something is wrong), of a
    /// root Settled (no ownership is on its way), and with a webhook `WebhookRouted` (its reviews reach the owners). Of
    /// a root with `rollout` Progressing (a version is tried), Analysing (it is compared), Promoted (none is tried),
    /// and `RolledBack` (the last one failed). Absent or empty until the manager has seen it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// What a root has made. Absent: this is no root, or it has made nothing yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<RootStatus>,
    /// Who owns what: written by the manager's leader only, read by everybody else. Absent: this is no root, or it has
    /// divided nothing yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ownership: Option<Ownership>,
    /// The owner that each hash, "0" to "31", is to have, where the root says `balance: Load`. Absent or empty: the
    /// division follows from the root and its pods alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "known_slots")]
    #[schemars(schema_with = "schema::slots")]
    pub wanted: BTreeMap<Slot, String>,
    /// How the versions of a root's operator stand. Absent: the root has no `rollout`, or no pod yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// The pods of the shard. Absent or empty: it has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub pods: Vec<PodStatus>,
}

/// What a root has made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RootStatus {
    /// The names of its shards. Absent or empty: it has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub child_sharding_configs: Vec<String>,
}

/// One pod of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// The pod's name.
    pub name: String,
    /// The node that it runs on. Absent until it is scheduled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The epoch that its proxy has acknowledged last. Absent: none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
    /// When its proxy was last in touch. Absent: it never was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_contact: Option<Time>,
    /// Whether another pod of the shard works, and this one sees and writes nothing, because the operator elects
    /// nobody. Default false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stands_by: bool,
}
