//! `ctrlmesh rollout` asks a manager that leads, and shows what comes of it.

use ctrlmesh_common::api::{RolloutStatus, ShardingConfig, TrialPhase};
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::bed::eventually;
use crate::commands::{output, printed};
use crate::full::{OPERATOR, ROOT, SYSTEM, divide_with, world};
use crate::process::Replica;
use crate::token;

/// The revision that is promoted, and the one that is tried.
pub(crate) const OLD: &str = "op-5d4f";
pub(crate) const NEW: &str = "op-77c9";

/// Applies a root that tries new versions, in steps that end by a command.
async fn apply(client: &Client) {
    let steps = json!([{"slots": 1, "pause": "Manual"}, {"percent": 50, "pause": "Manual"}, {"percent": 100}]);
    divide_with(client, "Proxy", 2, Some(("rollout", json!({"steps": steps, "onFailure": "Hold"})))).await;
}

/// Makes a pod of the operator, in this revision; nothing runs it.
async fn pod(client: &Client, name: &str, revision: &str) {
    token::pod_with_proxy(client, OPERATOR, name).await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), OPERATOR);
    let label = json!({"metadata": {"labels": {"controller-revision-hash": revision}}});
    pods.patch(name, &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
}

/// Makes two pods of the promoted revision, and one of the next one, which is tried then.
pub(crate) async fn begin_trial(client: &Client) {
    for name in ["op-0", "op-1"] {
        pod(client, name, OLD).await;
    }
    until(client, "the first revision", |status| status.promoted == OLD).await;
    replace_second(client, NEW).await;
    until(client, "a trial", |status| is_in(status, TrialPhase::Analysing)).await;
}

/// The second pod comes back in this revision.
pub(crate) async fn replace_second(client: &Client, revision: &str) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), OPERATOR);
    pods.delete("op-1", &DeleteParams::default().grace_period(0)).await.unwrap();
    pod(client, "op-1", revision).await;
}

/// The status of the rollout, as soon as it is as `is` says.
pub(crate) async fn until(client: &Client, what: &str, is: impl Fn(&RolloutStatus) -> bool) -> RolloutStatus {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    eventually(what, async || roots.get(ROOT).await.ok()?.status?.rollout.filter(&is)).await
}

/// Whether the next revision is in this phase of its trial.
pub(crate) fn is_in(status: &RolloutStatus, phase: TrialPhase) -> bool {
    status.trial.as_ref().is_some_and(|trial| trial.revision == NEW && trial.phase == phase)
}

#[tokio::test]
async fn a_trial_is_shown_promoted_and_aborted_by_commands() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    apply(&client).await;
    let screen = printed(&cluster, &["rollout", "status", ROOT]);
    assert!(screen.contains("StatefulSet op") && screen.contains("none yet"), "{screen}");
    begin_trial(&client).await;
    let list = printed(&cluster, &["rollout", "status"]);
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..5], [ROOT, OLD, NEW, "Analysing", "1/3"], "{list}");

    // Each command returns when the manager has carried it out.
    let said = printed(&cluster, &["rollout", "promote", ROOT]);
    assert!(said.starts_with(&format!("revision {NEW}: Analysing, step 2 of 3")), "{said}");
    let status: Value =
        serde_json::from_str(&printed(&cluster, &["rollout", "status", ROOT, "--output", "json"])).unwrap();
    assert_eq!((&status["trial"]["step"], &status["promoted"]), (&json!(2), &json!(OLD)), "{status}");
    let said = printed(&cluster, &["rollout", "abort", ROOT]);
    assert!(said.starts_with(&format!("revision {NEW}: Held")), "{said}");
    let status = until(&client, "the trial to be held", |status| is_in(status, TrialPhase::Held)).await;
    assert_eq!(status.rejected[0].revision, NEW);
    let failed = format!("ctrlmesh_manager_rollout_versions_total{{root=\"{OPERATOR}/{ROOT}\",outcome=\"failed\"}}");
    let held = format!("ctrlmesh_manager_rollout_phase{{root=\"{OPERATOR}/{ROOT}\",phase=\"held\"}}");
    for one in [failed, held] {
        let counted = async || replica.metric(&one).await.filter(|count| (count - 1.0).abs() < f64::EPSILON);
        eventually(&one, counted).await;
    }
    let screen = printed(&cluster, &["rollout", "status", ROOT]);
    assert!(screen.contains("Rejected:") && screen.contains("somebody aborted it"), "{screen}");
    // It is tried again.
    printed(&cluster, &["rollout", "promote", ROOT, "--revision", NEW]);
    let status = until(&client, "another trial", |status| is_in(status, TrialPhase::Analysing)).await;
    assert!(status.rejected.is_empty(), "{status:?}");

    let refused = output(&cluster, &["rollout", "promote", ROOT, "--revision", "op-none"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && error.contains("op-none"), "{error}");
    let refused = output(&cluster, &["rollout", "abort", "nothing"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && error.contains("nothing") && error.contains(OPERATOR), "{error}");
}
