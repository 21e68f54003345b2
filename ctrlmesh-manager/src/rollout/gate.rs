//! Says of a pod whether its version is promoted, and in which order a Deployment removes pods.

use ctrlmesh_common::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::rules::pod::{DELETION_COST, PodName};

/// The condition of a pod that its readiness gate asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateState {
    /// Whether the pod may be Ready: its version is promoted.
    pub holds: bool,
    /// One word in `CamelCase`.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// The strategic merge patch of `pods/status`: conditions are merged by type, so those of others stay.
///
/// The condition changed at `now`.
pub fn wanted_patch(uid: &str, state: &GateState, now: Timestamp) -> Value {
    let condition = json!({
        "type": names::PROMOTED,
        "status": if state.holds { "True" } else { "False" },
        "reason": state.reason,
        "message": state.message,
        "lastTransitionTime": Time(now),
    });
    // A pod of the same name with another UID is another pod: there the API server refuses the patch.
    json!({"metadata": {"uid": uid}, "status": {"conditions": [condition]}})
}

/// Writes the condition of the pod, which changes now.
///
/// # Errors
/// If the API server refuses it, such as where the pod is gone, or has another UID.
pub async fn set(client: &Client, pod: &PodName, uid: &str, state: &GateState) -> kube::Result<()> {
    let patch = Patch::Strategic(wanted_patch(uid, state, Timestamp::now()));
    pods(client, pod).patch_status(&pod.name, &PatchParams::default(), &patch).await.map(drop)
}

/// Writes how much it costs to remove the pod; `None` removes what was written.
///
/// # Errors
/// As [`set`].
pub async fn set_deletion_cost(client: &Client, pod: &PodName, uid: &str, cost: Option<i32>) -> kube::Result<()> {
    let patch = Patch::Merge(cost_patch(uid, cost));
    pods(client, pod).patch_metadata(&pod.name, &PatchParams::default(), &patch).await.map(drop)
}

fn cost_patch(uid: &str, cost: Option<i32>) -> Value {
    json!({"metadata": {"uid": uid, "annotations": {DELETION_COST: cost.map(|cost| cost.to_string())}}})
}

fn pods(client: &Client, pod: &PodName) -> Api<Pod> {
    Api::namespaced(client.clone(), &pod.namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_patch_names_one_condition_of_one_pod() {
        let state = |holds| GateState { holds, reason: "Trial".to_owned(), message: "step 1 of 3".to_owned() };
        let now: Timestamp = "2026-01-01T00:00:00.9Z".parse().unwrap();
        for (holds, status) in [(true, "True"), (false, "False")] {
            let condition = json!({
                "type": "ctrlmesh.kusionstack.io/promoted", "status": status, "reason": "Trial",
                "message": "step 1 of 3", "lastTransitionTime": "2026-01-01T00:00:00Z",
            });
            let expected = json!({"metadata": {"uid": "7d1"}, "status": {"conditions": [condition]}});
            assert_eq!(wanted_patch("7d1", &state(holds), now), expected);
        }
    }

    #[test]
    fn a_cost_is_written_as_text_and_none_removes_it() {
        let patch = |cost| cost_patch("7d1", cost)["metadata"]["annotations"].take();
        assert_eq!(patch(Some(-5)), json!({"controller.kubernetes.io/pod-deletion-cost": "-5"}));
        assert_eq!(patch(None), json!({"controller.kubernetes.io/pod-deletion-cost": null}));
    }
}
