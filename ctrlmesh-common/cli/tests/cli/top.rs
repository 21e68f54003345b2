//! `ctrlmesh top` before a scripted API server, which proxies to the metrics of proxies.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr, stdout};

fn pod(name: &str, container: &str) -> Value {
    json!({"metadata": {"namespace": "ops", "name": name}, "status": {"phase": "Running"},
        "spec": {"nodeName": name, "containers": [{"name": container, "image": "proxy:1"}]}})
}

fn pods(items: &Value) -> (StatusCode, Value) {
    (StatusCode::OK, json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}))
}

fn refused(message: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": message});
    (StatusCode::FORBIDDEN, status)
}

/// What a proxy has counted: `requests` for each of two shards, one of which only writes.
fn page(requests: u64) -> String {
    let series = |pod: &str, shard: &str, verb: &str| {
        format!(
            "ctrlmesh_proxy_pod_requests_total{{namespace=\"ops\",pod=\"{pod}\",shard=\"{shard}\",verb=\"{verb}\",group=\"\",resource=\"pods\",outcome=\"ok\"}} {requests}\n\
             ctrlmesh_proxy_pod_namespace_requests_total{{namespace=\"ops\",pod=\"{pod}\",shard=\"{shard}\",object_namespace=\"shop\"}} {requests}\n"
        )
    };
    series("web-a", "web-1-normal", "get") + &series("web-b", "web-2-normal", "patch")
}

/// A cluster with a node proxy, which counts 1,000 requests between two looks, and a sidecar that may not be read.
async fn bed() -> Bed {
    let looks = Arc::new(AtomicU64::new(0));
    Bed::answering(move |seen| {
        let path = seen.target.split('?').next().unwrap_or_default();
        match path {
            "/api/v1/namespaces/ctrlmesh-system/pods" => pods(&json!([pod("node-1", "proxy")])),
            "/api/v1/pods" => pods(&json!([pod("web-b", "ctrlmesh-proxy"), pod("web-a", "operator")])),
            "/api/v1/namespaces/ops/pods/node-1:5441/proxy/metrics" => {
                (StatusCode::OK, page(1_000 * (looks.fetch_add(1, Ordering::Relaxed) + 1)).into())
            }
            _ => refused("not for you"),
        }
    })
    .await
}

async fn top(bed: &Bed, arguments: &[&str]) -> Output {
    bed.ctrlmesh(&[&["top", "--interval", "100ms"], arguments].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_between_two_looks() {
    let by_shard: Value = serde_json::from_str(&stdout(&top(&bed().await, &["-A", "-o", "json"]).await)).unwrap();
    assert_eq!((&by_shard["kind"], by_shard["rows"].as_array().map(Vec::len)), (&json!("Top"), Some(2)));
    let row = |shard: &str| by_shard["rows"].as_array().unwrap().iter().find(|row| row["shard"] == shard).unwrap();
    let rate = |shard: &str, of: &str| row(shard)[of].as_f64().unwrap();
    assert!(rate("web-1-normal", "requests") > 0.0 && rate("web-1-normal", "writes") <= 0.0, "{by_shard}");
    assert!(rate("web-2-normal", "writes") > 0.0, "{by_shard}");
    let reads = by_shard["notRead"][0].as_str().unwrap();
    assert_eq!(reads, "ops/web-b: you may not get pods/proxy in namespace ops");

    let by_namespace = stdout(&top(&bed().await, &["-A", "--by", "namespace"]).await);
    assert!(by_namespace.starts_with("OBJECTS IN   REQUESTS/S\nshop "), "{by_namespace}");
}

#[tokio::test(flavor = "multi_thread")]
async fn traffic_that_cannot_be_shown_says_why() {
    for (arguments, says) in [
        (&["--interval", "0s"][..], "--interval: must be longer than 0s"),
        (&["web"], "does `kubectl get shardingconfigs` work there?"),
        (&["web", "-A"], "cannot be used with"),
        (&["--by", "node"], "[possible values: shard, pod, namespace]"),
    ] {
        let refused = bed().await.ctrlmesh(&[&["top"], arguments].concat()).await;
        let error = stderr(&refused);
        assert!(!refused.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
    let none =
        Bed::answering(|seen| if seen.target.contains("/proxy/") { refused("") } else { pods(&json!([])) }).await;
    let error = stderr(&top(&none, &[]).await);
    assert!(error.contains("no proxy runs: `ctrlmesh check` says why"), "{error}");
}
