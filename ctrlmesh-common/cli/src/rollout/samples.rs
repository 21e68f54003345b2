//! Roots for tests.

use ctrlmesh_common::api::ShardingConfig;
use serde_json::{Value, json};

/// Root `ops/web` of a Deployment, with this `status.rollout`.
pub(super) fn root(status: Option<Value>) -> ShardingConfig {
    let rule = json!({"prefix": "web", "targetDeployment": "web", "rollout": {},
        "auto": {"shardingSize": 2, "everyShardReplicas": 1}});
    let mut root = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": "web"}, "spec": {"root": rule},
    });
    if let Some(status) = status {
        root["status"] = json!({"rollout": status});
    }
    serde_json::from_value(root).unwrap()
}

/// Revision `new` is tried beside `old`, and `bad` has failed before.
pub(super) fn trial(phase: &str) -> Value {
    let began = "2026-01-01T00:00:00Z";
    json!({
        "promoted": "old",
        "trial": {"revision": "new", "phase": phase, "step": 1, "slots": ["3", "7"], "stepStartedAt": began,
            "passed": 2, "failed": 1, "message": "why"},
        "rejected": [{"revision": "bad", "message": "it wrote 0 times", "at": began}],
    })
}
