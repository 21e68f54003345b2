//! `ctrlmesh owner` before a scripted API server.

use std::process::Output;

use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr, stdout};

const OURS: &str = "ctrlmesh.kusionstack.io/v1alpha1";

/// The group `name` as aggregated discovery has it, with the resource `websites`.
fn group(name: &str) -> Value {
    let websites = json!({"resource": "websites", "singularResource": "website", "shortNames": ["ws"],
        "responseKind": {"group": name, "version": "v1", "kind": "Website"}, "scope": "Namespaced",
        "verbs": ["get"]});
    json!({"metadata": {"name": name}, "versions": [{"version": "v1", "resources": [websites]}]})
}

fn groups(items: &[Value]) -> Value {
    json!({"apiVersion": "apidiscovery.k8s.io/v2", "kind": "APIGroupDiscoveryList", "metadata": {}, "items": items})
}

/// Root `web`, which divides websites of one group, and a shard by hand for those of team a.
fn configs() -> Value {
    let websites = json!([{"apiGroups": ["web.example.com"], "resources": ["websites"]}]);
    let root = json!({"prefix": "web", "targetDeployment": "web", "resourceSelector": [{"relateResources": websites}]});
    let slots: serde_json::Map<String, Value> = (0..32).map(|slot| (slot.to_string(), json!("web-1-normal"))).collect();
    let limits = json!([{"relateResources": websites, "selector": {"matchLabels": {"team": "a"}}}]);
    let config = |name: &str, spec: Value, status: Value| {
        json!({"apiVersion": OURS, "kind": "ShardingConfig", "metadata": {"namespace": "ops", "name": name},
            "spec": spec, "status": status})
    };
    json!([
        config("by-hand", json!({"limits": limits}), json!({"pods": [{"name": "pod-a"}]})),
        config("web", json!({"root": root}), json!({"epoch": 1, "ownership": {"epoch": 1, "slots": slots}})),
    ])
}

/// An API server with website `site` in namespace `ops`, in two groups.
fn answer(target: &str) -> (StatusCode, Value) {
    let object = |group: &str| {
        json!({"apiVersion": format!("{group}/v1"), "kind": "Website",
            "metadata": {"namespace": "ops", "name": "site", "labels": {"team": "a"}}})
    };
    let answer = match target.split('?').next().unwrap_or_default() {
        "/api" => groups(&[]),
        "/apis" => groups(&[group("web.example.com"), group("old.example.com")]),
        "/apis/web.example.com/v1/namespaces/ops/websites/site" => object("web.example.com"),
        "/apis/old.example.com/v1/namespaces/ops/websites/site" => object("old.example.com"),
        "/apis/ctrlmesh.kusionstack.io/v1alpha1/shardingconfigs" => {
            json!({"apiVersion": OURS, "kind": "ShardingConfigList", "metadata": {}, "items": configs()})
        }
        _ => {
            let missing = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404,
                "message": "not here"});
            return (StatusCode::NOT_FOUND, missing);
        }
    };
    (StatusCode::OK, answer)
}

async fn bed() -> Bed {
    Bed::answering(|seen| answer(&seen.target)).await
}

async fn owner(bed: &Bed, arguments: &[&str]) -> Output {
    bed.ctrlmesh(&[&["owner"], arguments].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn roots_and_shards_by_hand_say_who_owns_an_object() {
    let bed = bed().await;
    let shown = owner(&bed, &["website", "site"]).await;
    let (screen, warning) = (stdout(&shown), stderr(&shown));
    assert!(screen.starts_with("Object: websites.web.example.com ops/site\n"), "{screen}{warning}");
    assert!(screen.contains("Root:    ops/web, Deployment web, epoch 1\n  Owner: web-1-normal, by slot "), "{screen}");
    assert!(screen.contains("Shard:     ops/by-hand, by hand\n  Sees it: by its labels: team=a\n"), "{screen}");
    let expected =
        "Warning: \"website\" is taken as websites.web.example.com; it could also be websites.old.example.com";
    assert_eq!(warning.trim_end(), expected);

    let shown = owner(&bed, &["ws.old.example.com", "site", "-o", "json"]).await;
    let document: Value = serde_json::from_str(&stdout(&shown)).unwrap();
    assert_eq!((&document["kind"], &document["roots"]), (&json!("Owner"), &json!([])));
    assert_eq!(stderr(&shown), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_named() {
    let bed = bed().await;
    for (arguments, says) in [
        (["gadget", "site"], "the API server has no resource \"gadget\""),
        (["website", "other"], "there are no websites with the name \"other\" in namespace \"ops\""),
    ] {
        let refused = owner(&bed, &arguments).await;
        let error = stderr(&refused);
        assert!(!refused.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}
