//! `ctrlmesh status` before a scripted API server.

use std::process::Output;

use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr, stdout};
use crate::harness::upstream::ReceivedRequest;

const GROUP: &str = "/apis/ctrlmesh.kusionstack.io/v1alpha1";

fn list(kind: &str, items: &Value) -> Value {
    json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": format!("{kind}List"), "metadata": {},
        "items": items})
}

/// An API server with root `web` and shard `by-hand` in namespace `ops`, which lets nobody read CircuitBreakers of
/// `closed`.
async fn bed() -> Bed {
    let answer = |seen: &ReceivedRequest| {
        let path = seen.target.split('?').next().unwrap_or_default().strip_prefix(GROUP).unwrap_or_default();
        let rule = json!({"prefix": "web", "targetDeployment": "web"});
        let root = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"namespace": "ops", "name": "web"}, "spec": {"root": rule}});
        let by_hand = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"namespace": "ops", "name": "by-hand"}, "spec": {}});
        match path {
            "/shardingconfigs" | "/namespaces/ops/shardingconfigs" => {
                (StatusCode::OK, list("ShardingConfig", &json!([by_hand, root])))
            }
            "/circuitbreakers" | "/namespaces/ops/circuitbreakers" | "/namespaces/empty/circuitbreakers" => {
                (StatusCode::OK, list("CircuitBreaker", &json!([])))
            }
            "/namespaces/empty/shardingconfigs" | "/namespaces/closed/shardingconfigs" => {
                (StatusCode::OK, list("ShardingConfig", &json!([])))
            }
            _ => {
                let refused = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
                    "message": "not for you"});
                (StatusCode::FORBIDDEN, refused)
            }
        }
    };
    Bed::answering(answer).await
}

async fn status(bed: &Bed, arguments: &[&str]) -> Output {
    bed.ctrlmesh(&[&["status"], arguments].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn roots_are_listed_shown_and_printed() {
    let bed = bed().await;
    let listed = stdout(&status(&bed, &["-A"]).await);
    assert!(listed.starts_with("NAMESPACE   NAME      WORKLOAD"), "{listed}");
    assert!(listed.contains("ops         web       Deployment web   0 "), "{listed}");
    let screen = stdout(&status(&bed, &["web"]).await);
    assert!(screen.starts_with("Root:  ops/web, Deployment web\nEpoch: none yet\n"), "{screen}");
    let one: Value = serde_json::from_str(&stdout(&status(&bed, &["web", "-o", "json"]).await)).unwrap();
    assert_eq!((&one["name"], one["unownedSlots"].as_array().map(Vec::len)), (&json!("web"), Some(32)));
    let all: Value = serde_json::from_str(&stdout(&status(&bed, &["-o", "json"]).await)).unwrap();
    assert_eq!((&all["kind"], &all["items"][0]), (&json!("StatusList"), &one));
    let hand = stdout(&status(&bed, &["by-hand"]).await);
    assert!(hand.starts_with("Shard: ops/by-hand, by hand\n"), "{hand}");
    let nothing = stdout(&status(&bed, &["-n", "empty"]).await);
    assert_eq!(nothing.trim_end(), "there is no root and no shard by hand in namespace \"empty\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_shown_says_what_to_do() {
    let bed = bed().await;
    for (arguments, says) in [
        (["other", "-n", "ops"], "there is no root or shard by hand \"other\" in namespace \"ops\""),
        (["web", "-n", "secret"], "does `kubectl get shardingconfigs` work there?"),
        (["-A", "-n", "ops"], "cannot be used with"),
    ] {
        let refused = status(&bed, &arguments).await;
        let error = stderr(&refused);
        assert!(!refused.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}
