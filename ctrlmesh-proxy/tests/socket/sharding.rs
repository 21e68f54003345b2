//! Each row of the table in docs/design/request-path.md, between an operator and a scripted API server.

use std::fs;

use crate::harness::client::Client;
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::harness::upstream::{Upstream, whole};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Version};
use http_body_util::Full;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

const POLICY: &str = r#"
limits:
- relateResources: [{apiGroups: [""], resources: [pods]}, {apiGroups: [apps], resources: ["*"]}]
  selector: team=a
lock: {namespace: ops, name: lead, shard: s1}
"#;

struct Bed {
    // Dropped before the folder, in which it writes.
    proxy: Proxy,
    pki: Pki,
    upstream: Upstream,
}

impl Bed {
    /// What the API server is asked when a client asks `method target`.
    async fn asked(&self, method: Method, target: &str) -> String {
        let request = Request::builder().method(method).uri(target).body(Full::default()).unwrap();
        let mut client = Client::connect(&self.pki, self.proxy.address, Version::HTTP_2).await;
        let answer = client.ask(request).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        self.upstream.last().target
    }
}

async fn bed() -> Bed {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), |seen| async move {
        let mut response = whole(StatusCode::OK, seen.body);
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        response
    })
    .await;
    let policy = pki.path("policy.yaml");
    fs::write(&policy, POLICY).unwrap();
    let proxy = Proxy::start(&pki, upstream.address, &["--policy", policy.to_str().unwrap()]);
    Bed { proxy, pki, upstream }
}

#[tokio::test]
async fn list_watch_and_deletecollection_get_client_and_policy() {
    let bed = bed().await;
    let rows = [
        (Method::GET, "/api/v1/pods", "/api/v1/pods?labelSelector=team%3Da"),
        (Method::GET, "/api/v1/pods?labelSelector=team%3Db&limit=5", "labelSelector=team%3Da%2Cteam%3Db&limit=5"),
        (Method::GET, "/api/v1/namespaces/x/pods?watch", "?labelSelector=team%3Da&watch"),
        (Method::GET, "/api/v1/watch/pods", "labelSelector=team%3Da"),
        (Method::DELETE, "/api/v1/namespaces/x/pods", "labelSelector=team%3Da"),
        (Method::GET, "/apis/apps/v1beta1/deployments", "labelSelector=team%3Da"),
    ];
    for (method, target, expected) in rows {
        let asked = bed.asked(method, target).await;
        assert!(asked.ends_with(expected), "{target} became {asked}");
    }
    assert!((bed.proxy.metric("ctrlmesh_proxy_injected_total").await - 6.0).abs() < f64::EPSILON);
}

#[tokio::test]
async fn everything_else_passes_unchanged() {
    let bed = bed().await;
    let rows = [
        (Method::GET, "/api/v1/namespaces/x/pods/p"),
        (Method::GET, "/api/v1/namespaces/x/pods/p/log?follow=true"),
        (Method::POST, "/api/v1/namespaces/x/pods?dryRun=All"),
        (Method::PUT, "/apis/apps/v1/namespaces/x/deployments/d/scale"),
        (Method::PATCH, "/api/v1/namespaces/x/pods/p"),
        (Method::DELETE, "/api/v1/namespaces/x/pods/p"),
        (Method::GET, "/api/v1/services?labelSelector=team%3Db"),
        (Method::GET, "/healthz/ping?verbose"),
        (Method::GET, "/apis"),
    ];
    for (method, target) in rows {
        assert_eq!(bed.asked(method, target).await, target);
    }
    assert!(bed.proxy.metric("ctrlmesh_proxy_injected_total").await.abs() < f64::EPSILON);
}

#[tokio::test]
async fn a_target_that_the_api_server_would_refuse_is_refused() {
    let bed = bed().await;
    for version in BOTH {
        let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
        let mut request = Request::get("/api/v1/namespaces/a%/pods").body(Full::default()).unwrap();
        request.headers_mut().insert("accept", HeaderValue::from_static("application/json"));
        let answer = client.ask(request).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let status: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &400.into()));
    }
    assert!(bed.upstream.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_refusal_is_protobuf_for_a_client_that_speaks_only_protobuf() {
    let bed = bed().await;
    let mut client = Client::connect(&bed.pki, bed.proxy.address, Version::HTTP_2).await;
    let mut request = Request::get("/api/v1/namespaces/a%/pods").body(Full::default()).unwrap();
    request.headers_mut().insert("accept", HeaderValue::from_static("application/vnd.kubernetes.protobuf"));
    let answer = client.ask(request).await;
    assert_eq!(answer.headers["content-type"], "application/vnd.kubernetes.protobuf");
    assert!(answer.body.starts_with(b"k8s\0"));
}

#[tokio::test]
async fn the_lock_is_renamed_both_ways_and_nothing_else() {
    let bed = bed().await;
    let ours = r#"{ "metadata" : {"labels":{"lead":"lead"}, "name": "lead", "namespace":"ops" },"spec":{"holderIdentity":"lead"} }"#;
    let theirs = ours.replace(r#""name": "lead""#, r#""name": "lead---s1""#);
    for version in BOTH {
        let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
        let request = Request::put("/apis/coordination.k8s.io/v1/namespaces/ops/leases/lead")
            .header("content-type", "application/json")
            .header("accept-encoding", "gzip")
            .body(Full::new(Bytes::from(ours)))
            .unwrap();
        let answer = client.ask(request).await;
        let seen = bed.upstream.last();
        assert_eq!(seen.target, "/apis/coordination.k8s.io/v1/namespaces/ops/leases/lead---s1");
        assert_eq!(seen.body, theirs);
        assert_eq!(seen.headers["content-length"], theirs.len().to_string());
        assert!(!seen.headers.contains_key("accept-encoding"));
        assert_eq!(answer.body, ours, "{version:?}");
        assert_eq!(answer.headers["content-length"], ours.len().to_string());
    }
    assert!((bed.proxy.metric("ctrlmesh_proxy_renamed_total").await - 2.0).abs() < f64::EPSILON);
}

#[tokio::test]
async fn a_lock_elsewhere_and_its_neighbours_are_left_alone() {
    let bed = bed().await;
    for target in [
        "/apis/coordination.k8s.io/v1/namespaces/other/leases/lead",
        "/apis/coordination.k8s.io/v1/namespaces/ops/leases/another",
        "/api/v1/namespaces/ops/secrets/lead",
    ] {
        assert_eq!(bed.asked(Method::GET, target).await, target);
    }
}

#[tokio::test]
async fn a_lock_that_is_too_large_is_refused() {
    let bed = bed().await;
    for version in BOTH {
        let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
        let body = format!(r#"{{"metadata":{{"name":"lead"}},"data":"{}"}}"#, "x".repeat(4 << 20));
        let request = Request::put("/apis/coordination.k8s.io/v1/namespaces/ops/leases/lead")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let refused = match client.send(request).await {
            Ok(response) => response.status() == StatusCode::PAYLOAD_TOO_LARGE,
            // The connection may close while the client still sends.
            Err(_) => version == Version::HTTP_11,
        };
        assert!(refused, "{version:?}");
    }
    assert!(bed.upstream.seen.lock().unwrap().is_empty());
    let refused = r#"ctrlmesh_proxy_requests_total{verb="update",outcome="refused"}"#;
    assert!(bed.proxy.metric(refused).await >= 1.0);
    assert_eq!(bed.asked(Method::GET, "/api/v1/services").await, "/api/v1/services");
}

#[tokio::test]
async fn without_a_policy_everything_passes() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["h2"]), |_| async { whole(StatusCode::OK, "") }).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    client.get("/api/v1/pods?labelSelector=x").await;
    assert_eq!(upstream.last().target, "/api/v1/pods?labelSelector=x");
}

#[tokio::test]
async fn a_policy_that_does_not_parse_changes_nothing() {
    let bed = bed().await;
    fs::write(bed.pki.path("policy.yaml"), "limits: [{selector: 'a in ('}]").unwrap();
    until("the refusal", || async { bed.proxy.log().contains("policy.yaml") || bed.proxy.log().contains("refused") })
        .await;
    let asked = bed.asked(Method::GET, "/api/v1/pods").await;
    assert_eq!(asked, "/api/v1/pods?labelSelector=team%3Da");
    fs::write(bed.pki.path("policy.yaml"), POLICY.replace("team=a", "team=c")).unwrap();
    until("the new policy", || async {
        bed.asked(Method::GET, "/api/v1/pods").await == "/api/v1/pods?labelSelector=team%3Dc"
    })
    .await;
}

/// A policy whose selector takes about so many bytes in a URL.
fn long_policy(epoch: u64, bytes: usize) -> String {
    let values: Vec<String> = (0..bytes / 13).map(|at| format!("{at:010}")).collect();
    format!(
        "epoch: {epoch}\nlimits:\n- relateResources: [{{apiGroups: [''], resources: [pods]}}]\n  selector: a in ({})\n",
        values.join(",")
    )
}

#[tokio::test]
async fn the_longest_selector_passes_and_a_longer_one_is_refused() {
    let bed = bed().await;
    let write = |policy: String| {
        fs::write(bed.pki.path("next"), policy).unwrap();
        fs::rename(bed.pki.path("next"), bed.pki.path("policy.yaml")).unwrap();
    };
    write(long_policy(2, (48 << 10) - 100));
    until("the long policy", || async { bed.proxy.metric("ctrlmesh_proxy_policy_epoch{pod=\"\"}").await > 1.5 }).await;
    write(long_policy(3, (48 << 10) + 100));
    until("the longer one to be refused", || async {
        let log = bed.proxy.log();
        log.contains("policy refused") && log.contains("limits[0].selector: takes")
    })
    .await;
    let client_asks = format!("/api/v1/pods?labelSelector=x{}", "%2Cx".repeat(2000));
    for version in BOTH {
        let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
        assert_eq!(client.get(&client_asks).await.status, StatusCode::OK);
        let asked = bed.upstream.last().target;
        assert!(asked.len() > (48 << 10) + 7900 && asked.ends_with("%2Cx"), "{}", asked.len());
    }
}
