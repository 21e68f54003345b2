//! `ctrlmesh trace` before a scripted API server: where it looks for the proxy, and what it says where there is none.

use std::process::Output;

use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr};

fn pod(name: &str, container: &str, phase: &str) -> Value {
    let enrolled = if name == "stranger" { "false" } else { "true" };
    json!({"apiVersion": "v1", "kind": "Pod", "status": {"phase": phase},
        "metadata": {"namespace": "ops", "name": name, "labels": {"ctrlmesh.kusionstack.io/enable-proxy": enrolled}},
        "spec": {"nodeName": "n1", "containers": [{"name": container, "image": "proxy:1"}]}})
}

fn refused(code: StatusCode, reason: &str) -> (StatusCode, Value) {
    (code, json!({"kind": "Status", "status": "Failure", "reason": reason, "code": code.as_u16(), "message": reason}))
}

/// A cluster with these node proxies, in whose containers nobody may run anything.
async fn trace(proxies: Value, name: &str) -> Output {
    let bed = Bed::answering(move |seen| {
        let path = seen.target.split('?').next().unwrap_or_default();
        match path {
            "/api/v1/namespaces/ctrlmesh-system/pods" => {
                (StatusCode::OK, json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": proxies}))
            }
            "/api/v1/namespaces/ops/pods/absent" => refused(StatusCode::NOT_FOUND, "NotFound"),
            "/api/v1/namespaces/ops/pods/ended" => (StatusCode::OK, pod("ended", "operator", "Succeeded")),
            "/api/v1/namespaces/ops/pods/stranger" => (StatusCode::OK, pod("stranger", "operator", "Running")),
            "/api/v1/namespaces/ops/pods/web-0" => (StatusCode::OK, pod("web-0", "operator", "Running")),
            "/api/v1/namespaces/ops/pods/web-1" => (StatusCode::OK, pod("web-1", "ctrlmesh-proxy", "Running")),
            _ => refused(StatusCode::FORBIDDEN, "Forbidden"),
        }
    })
    .await;
    bed.ctrlmesh(&["trace", name, "-n", "ops"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_error_says_what_to_do() {
    let node = json!([pod("node-1", "proxy", "Running")]);
    for (proxies, name, expected) in [
        (&node, "absent", "there is no pod \"absent\" in namespace \"ops\""),
        (&node, "ended", "pod \"ended\" in namespace \"ops\" has ended"),
        (&node, "stranger", "is not enrolled, so no proxy sees its requests: label its pods"),
        (&json!([]), "web-0", "no proxy runs on the pod's node (n1): `ctrlmesh check` says why"),
        (&node, "elsewhere", "you may not get pods elsewhere in namespace ops"),
        (&node, "web-0", "takes the rights to get and create pods/exec in namespace ops"),
        (&node, "web-1", "takes the rights to get and create pods/exec in namespace ops"),
    ] {
        let output = trace(proxies.clone(), name).await;
        let error = stderr(&output);
        assert!(!output.status.success() && error.contains(expected), "{name}: {error}");
    }
}
