//! `ctrlmesh rollout` before a scripted API server.

use std::process::Output;
use std::sync::{Arc, Mutex};

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr, stdout};
use crate::harness::upstream::ReceivedRequest;

const ANNOTATION: &str = "ctrlmesh.kusionstack.io/rollout";

const ROOTS: &str = "/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/ops/shardingconfigs";

fn root() -> Value {
    let rule = json!({"prefix": "web", "targetDeployment": "web", "rollout": {},
        "auto": {"shardingSize": 2, "everyShardReplicas": 1}});
    let trial = json!({"revision": "new", "phase": "Waiting", "step": 1, "slots": ["3"],
        "stepStartedAt": "2026-01-01T00:00:00Z", "passed": 2, "failed": 0, "message": "promote it"});
    let shadow = json!({"revision": "new", "intended": 3, "equal": 3, "different": 0, "refused": 0, "unknown": 0});
    json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": "web", "resourceVersion": "1"},
        "spec": {"root": rule}, "status": {"rollout": {"promoted": "old", "trial": trial, "shadow": shadow}},
    })
}

/// An API server with root `web`, and a manager that carries out each command by the next look.
fn answer(root: &mut Value, seen: &ReceivedRequest) -> (StatusCode, Value) {
    let path = seen.target.split('?').next().unwrap_or_default();
    if path == ROOTS {
        let list = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfigList",
            "metadata": {}, "items": [root]});
        return (StatusCode::OK, list);
    }
    if path != format!("{ROOTS}/web") {
        let missing = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": ""});
        return (StatusCode::NOT_FOUND, missing);
    }
    if seen.method == Method::PATCH {
        let written: Value = serde_json::from_slice(&seen.body).unwrap();
        root["status"]["rollout"]["handled"] = written["metadata"]["annotations"][ANNOTATION].clone();
        root["status"]["rollout"]["trial"]["phase"] = json!("Analysing");
        root["status"]["rollout"]["trial"]["step"] = json!(2);
    }
    (StatusCode::OK, root.clone())
}

async fn bed() -> Bed {
    let root = Arc::new(Mutex::new(root()));
    Bed::answering(move |seen| answer(&mut root.lock().unwrap(), seen)).await
}

async fn rollout(bed: &Bed, arguments: &[&str]) -> Output {
    bed.ctrlmesh(&[&["rollout"], arguments].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_is_listed_shown_and_printed() {
    let bed = bed().await;
    let list = stdout(&rollout(&bed, &["status"]).await);
    assert!(list.ends_with("web    old        new     Waiting   1/3    2        0        promote it"), "{list}");
    let screen = stdout(&rollout(&bed, &["status", "web", "--context", "dev"]).await);
    assert!(screen.starts_with("Root:      ops/web, Deployment web\nPromoted:  old"), "{screen}");
    let json: Value = serde_json::from_str(&stdout(&rollout(&bed, &["status", "web", "-o", "json"]).await)).unwrap();
    assert_eq!(json["trial"]["slots"], json!(["3"]));
    let report = stdout(&rollout(&bed, &["report", "web"]).await);
    assert!(report.contains("Revision: new\nWrites:   of 3 intended writes 3 equal, 0 different"), "{report}");
    let json: Value = serde_json::from_str(&stdout(&rollout(&bed, &["report", "web", "-o", "json"]).await)).unwrap();
    assert_eq!(json["equal"], 3);
    let yaml = stdout(&rollout(&bed, &["status", "web", "-o", "yaml"]).await);
    assert!(yaml.contains("promoted: old"), "{yaml}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_written_and_its_outcome_printed() {
    let bed = bed().await;
    let output = rollout(&bed, &["promote", "web", "-n", "ops"]).await;
    assert_eq!(stdout(&output), "revision new: Analysing, step 2 of 3: promote it", "{}", stderr(&output));
    let seen = bed.upstream.seen.lock().unwrap().clone();
    let patch = seen.iter().find(|seen| seen.method == Method::PATCH).unwrap();
    let patch: Value = serde_json::from_slice(&patch.body).unwrap();
    let value = patch["metadata"]["annotations"][ANNOTATION].as_str().unwrap();
    assert!(value.starts_with("promote new 2") && value.ends_with('Z'), "{value}");
    let output = rollout(&bed, &["abort", "web", "--wait=false"]).await;
    assert!(stdout(&output).starts_with("asked the manager for \"abort new 2"), "{}", stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_an_error_that_says_what_to_do() {
    let bed = bed().await;
    for (arguments, says) in [
        (["status", "other", "-n", "ops"].as_slice(), "`ctrlmesh rollout status -n ops` lists the roots"),
        (&["status", "web", "--kubeconfig", "/nowhere"], "read the kubeconfig `/nowhere`"),
        (&["status", "web", "--context", "prod"], "take the context from the kubeconfig"),
        (&["promote", "web", "--revision", "what"], "--revision may name one of: new"),
        (&["promote", "web", "--revision", "old"], "revision \"old\" is promoted already"),
    ] {
        let output = rollout(&bed, arguments).await;
        let text = stderr(&output);
        assert!(text.contains(says) && output.status.code() == Some(1), "{arguments:?}: {text}");
    }
}
