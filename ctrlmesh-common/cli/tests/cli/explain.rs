//! `ctrlmesh explain` before a scripted API server.

use std::process::Output;

use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr, stdout};

const OURS: &str = "ctrlmesh.kusionstack.io/v1alpha1";

const CONFIGS: &str = "/apis/ctrlmesh.kusionstack.io/v1alpha1";

fn list(api: &str, kind: &str, items: &Value) -> Value {
    json!({"apiVersion": api, "kind": kind, "metadata": {}, "items": items})
}

/// Root `web` of websites, fenced by its proxies, whose only pod `web-0` owns every slot.
fn root() -> Value {
    let websites = json!([{"apiGroups": ["web.example.com"], "resources": ["websites"]}]);
    let rule = json!({"prefix": "web", "targetStatefulSet": "web", "fence": "Proxy",
        "auto": {"shardingSize": 1, "everyShardReplicas": 1}, "resourceSelector": [{"relateResources": websites}]});
    let slots: serde_json::Map<String, Value> = (0..32).map(|slot| (slot.to_string(), json!("web-1-normal"))).collect();
    let table =
        json!({"epoch": 1, "slots": slots, "pods": {"web-0": "web-1-normal"}, "podUids": {"u-0": "web-1-normal"}});
    json!({"apiVersion": OURS, "kind": "ShardingConfig", "metadata": {"namespace": "ops", "name": "web", "uid": "r"},
        "spec": {"root": rule, "controller": {"leaderElectionName": "web"}}, "status": {"epoch": 1, "ownership": table}})
}

fn pod() -> Value {
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "s", "controller": true}]);
    let volume = json!([{"name": "ca", "configMap": {"name": "ctrlmesh-root-ca"}}]);
    json!({"metadata": {"namespace": "ops", "name": "web-0", "uid": "u-0", "ownerReferences": owner,
            "labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}},
        "spec": {"serviceAccountName": "robot", "volumes": volume, "containers": []},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
}

/// An API server with website `site`. Whoever is `poor` may not read what is not needed.
fn answer(target: &str, poor: bool) -> (StatusCode, Value) {
    let websites = json!({"resource": "websites", "singularResource": "website", "scope": "Namespaced",
        "responseKind": {"group": "web.example.com", "version": "v1", "kind": "Website"}, "verbs": ["get"]});
    let group =
        json!({"metadata": {"name": "web.example.com"}, "versions": [{"version": "v1", "resources": [websites]}]});
    let groups = |items: Value| list("apidiscovery.k8s.io/v2", "APIGroupDiscoveryList", &items);
    let path = target.split('?').next().unwrap_or_default();
    let site = json!({"apiVersion": "web.example.com/v1", "kind": "Website", "metadata": {"namespace": "ops",
        "name": "site", "managedFields": [{"manager": "web", "operation": "Update", "time": "2026-01-01T00:00:00Z"}]}});
    let of_ours = |kind: &str, items: &Value| Some(list(OURS, &format!("{kind}List"), items));
    let needed = match path {
        "/api" => Some(groups(json!([]))),
        "/apis" => Some(groups(json!([group]))),
        "/apis/web.example.com/v1/namespaces/ops/websites/site" => Some(site),
        _ => match path.strip_prefix(CONFIGS).unwrap_or_default() {
            "/shardingconfigs" | "/namespaces/ops/shardingconfigs" => of_ours("ShardingConfig", &json!([root()])),
            "/namespaces/ops/circuitbreakers" => of_ours("CircuitBreaker", &json!([])),
            "/namespaces/ops/faultinjections" => of_ours("FaultInjection", &json!([])),
            _ => None,
        },
    };
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ops"}});
    let extra = match path {
        _ if poor => None,
        "/api/v1/namespaces" => Some(list("v1", "NamespaceList", &json!([namespace]))),
        "/api/v1/namespaces/ops" => Some(namespace),
        "/api/v1/namespaces/ops/pods" => Some(list("v1", "PodList", &json!([pod()]))),
        "/apis/apps/v1/namespaces/ops/statefulsets" => Some(list("apps/v1", "StatefulSetList", &json!([]))),
        "/apis/events.k8s.io/v1/namespaces/ops/events" => Some(list("events.k8s.io/v1", "EventList", &json!([]))),
        _ => None,
    };
    let status = |code: u16, reason: &str| json!({"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": "not for you"});
    match needed.or(extra) {
        Some(answer) => (StatusCode::OK, answer),
        None if poor && !path.contains("managerstates") => (StatusCode::FORBIDDEN, status(403, "Forbidden")),
        None => (StatusCode::NOT_FOUND, status(404, "NotFound")),
    }
}

async fn bed(poor: bool) -> Bed {
    Bed::answering(move |seen| answer(&seen.target, poor)).await
}

async fn explain(bed: &Bed, arguments: &[&str]) -> Output {
    bed.ctrlmesh(&[&["explain"], arguments].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_explained_with_its_writers() {
    let bed = bed(false).await;
    let shown = explain(&bed, &["website", "site"]).await;
    let screen = stdout(&shown);
    for said in [
        "Object: websites.web.example.com ops/site\n",
        "belongs to shard web-1-normal.",
        "Only the proxies refuse writes: spec.root.fence is Proxy.",
        "web-0   web-1-normal   allowed   not fenced\n",
        "   web             Update      -",
    ] {
        assert!(screen.contains(said), "{said}: {screen}{}", stderr(&shown));
    }
    assert!(!screen.contains("What could not be read"), "{screen}");
    let document = stdout(&explain(&bed, &["website", "site", "--for-pod", "web-0", "-o", "json"]).await);
    let document: Value = serde_json::from_str(&document).unwrap();
    assert_eq!(
        (&document["kind"], &document["roots"][0]["answers"][0]["pod"]),
        (&json!("Explanation"), &json!("web-0"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_not_be_read_is_named_and_the_rest_is_shown() {
    let bed = bed(true).await;
    let screen = stdout(&explain(&bed, &["website", "site"]).await);
    assert!(screen.contains("belongs to shard web-1-normal."), "{screen}");
    assert!(screen.contains("No enrolled pod of the workload is known."), "{screen}");
    for what in ["the pods of namespace ops", "the events of namespace ops", "Lease ops/web---web-1-normal"] {
        assert!(screen.contains(&format!("   {what}: ")), "{what}: {screen}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_explained_and_not_sent() {
    let bed = bed(false).await;
    let as_pod = ["--as-pod", "web-0", "--verb"];
    let shown = explain(&bed, &[&["website"][..], &as_pod, &["list", "-o", "json"]].concat()).await;
    let listed: Value = serde_json::from_str(&stdout(&shown)).unwrap_or_else(|_| panic!("{}", stderr(&shown)));
    assert_eq!(listed["kind"], "RequestExplanation");
    assert_eq!(
        (&listed["outcome"], &listed["policy"]["shard"]),
        (&json!("Rewritten"), &json!("web-1-normal")),
        "{listed}"
    );
    let sent = listed["sent"].as_str().unwrap();
    assert!(sent.starts_with("/apis/web.example.com/v1/namespaces/ops/websites?labelSelector="), "{sent}");
    let screen = stdout(&explain(&bed, &[&["website", "site"][..], &as_pod, &["PATCH"]].concat()).await);
    assert!(screen.contains("The policy lets the request pass."), "{screen}");
    assert!(screen.contains("The API server does not fence the write: spec.root.fence is Proxy."), "{screen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_refused_by_the_name_of_its_flag() {
    let bed = bed(false).await;
    for (arguments, says) in [
        (&["website"][..], "<NAME>"),
        (
            &["website", "other"],
            "there are no websites with the name \"other\" in namespace \"ops\"; --namespace names another one",
        ),
        (&["website", "site", "--for-pod", "stranger"], "--for-pod stranger: no root that divides the object"),
        (&["website", "site", "--as-pod", "web-0"], "--verb <VERB>"),
        (&["website", "--as-pod", "web-0", "--verb", "patch"], "--verb patch needs the NAME of an object"),
        (
            &["website", "--as-pod", "web-9", "--verb", "list"],
            "--as-pod web-9: there is no such pod in namespace \"ops\"",
        ),
    ] {
        let refused = explain(&bed, arguments).await;
        let error = stderr(&refused);
        assert!(!refused.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}
