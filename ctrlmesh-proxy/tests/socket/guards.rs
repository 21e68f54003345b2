//! Limits on how often an operator asks.

use std::fs;

use crate::harness::client::{Answer, Client, get, tls};
use crate::harness::watches::{Bed, WATCH, event, sees};
use crate::harness::{soon, until};
use bytes::Bytes;
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

const CONFIG_MAPS: &str = "/api/v1/namespaces/ops/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";

const MINUTE: u64 = 60_000_000_000;

/// A policy of the shard `s1` with one guard: this trigger, over everything, with room for `burst` and one a minute.
fn policy(epoch: u64, trigger: &str, burst: u32) -> Value {
    json!({
        "epoch": epoch,
        "limits": [{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": "team=a"}],
        "lock": {"namespace": "ops", "name": "lead", "shard": "s1"},
        "guards": [guard("all", trigger, "*", burst)],
    })
}

fn guard(rule: &str, trigger: &str, verb: &str, burst: u32) -> Value {
    let requests = json!({"apiGroups": ["*"], "resources": ["*"], "verbs": [verb], "namespaces": ["*"]});
    json!({
        "breaker": "ops/wild", "rule": rule, "trigger": trigger, "requests": [requests],
        "bucket": {"burst": burst, "limit": 1, "intervalNanoseconds": MINUTE},
    })
}

async fn client(bed: &Bed, version: Version) -> Client {
    Client::connect(&bed.pki, bed.proxy.address, version).await
}

async fn status_of(bed: &Bed, target: &str) -> StatusCode {
    client(bed, Version::HTTP_2).await.get(target).await.status
}

fn arrived(bed: &Bed) -> usize {
    bed.upstream.seen.lock().unwrap().len()
}

fn assert_refused(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    let status: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((&status["kind"], &status["reason"]), (&json!("Status"), &json!("TooManyRequests")));
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("rule \"all\" of CircuitBreaker ops/wild"), "{message}");
    let seconds = status["details"]["retryAfterSeconds"].as_u64().unwrap();
    assert_eq!(answer.headers["retry-after"], seconds.to_string());
    assert!((1..=60).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn too_many_requests_are_refused_and_never_arrive() {
    for version in BOTH {
        let bed = Bed::new(&policy(1, "limiterOnly", 3)).await;
        let mut client = client(&bed, version).await;
        for _ in 0..3 {
            assert_eq!(client.get(CONFIG_MAPS).await.status, StatusCode::OK);
        }
        let before = arrived(&bed);
        for _ in 0..3 {
            assert_refused(&client.get(CONFIG_MAPS).await);
        }
        assert_eq!(arrived(&bed), before);
        assert_eq!(client.get("/version").await.status, StatusCode::OK, "it is no resource");
        let counted = |outcome: &str| format!("guard_requests_total{{rule=\"ops/wild/all\",outcome=\"{outcome}\"}}");
        for (outcome, count) in [("allowed", 3.0), ("refused", 3.0)] {
            let metric = format!("ctrlmesh_proxy_{}", counted(outcome));
            assert_eq!(bed.proxy.metric(&metric).await, count, "{outcome}");
        }
    }
}

#[tokio::test]
async fn a_refusal_is_protobuf_for_a_client_of_protobuf() {
    let bed = Bed::new(&policy(1, "forceOpened", 1)).await;
    let mut request = get(CONFIG_MAPS);
    request.headers_mut().insert("accept", "application/vnd.kubernetes.protobuf".parse().unwrap());
    let answer = client(&bed, Version::HTTP_2).await.ask(request).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(answer.body.starts_with(b"k8s\0") && !answer.headers.contains_key("retry-after"));
    assert_eq!(bed.proxy.metric("ctrlmesh_proxy_guard_open{rule=\"ops/wild/all\"}").await, 1.0);
}

#[tokio::test]
async fn the_body_of_a_refused_request_is_not_read() {
    let bed = Bed::new(&policy(1, "forceOpened", 1)).await;
    let mut stream = tls(&bed.pki, bed.proxy.address, "http/1.1").await;
    let head = "POST /api/v1/namespaces/ops/secrets HTTP/1.1\r\nHost: k\r\nContent-Length: 1000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 429");
}

#[tokio::test]
async fn the_lock_is_never_limited_and_its_neighbours_are() {
    let bed = Bed::new(&policy(1, "forceOpened", 1)).await;
    let lease = |method: &str, target: &str, name: &str| {
        let body = format!(r#"{{"metadata":{{"name":"{name}"}}}}"#);
        let request = Request::builder().method(method).uri(target).header("content-type", "application/json");
        request.body(Full::new(Bytes::from(body))).unwrap()
    };
    let lead = format!("{LEASES}/lead");
    let mut client = client(&bed, Version::HTTP_2).await;
    let before = arrived(&bed);
    for request in [
        lease("PUT", &lead, "lead"),
        lease("POST", LEASES, "lead"),
        get(&lead),
        get(&format!("{LEASES}?fieldSelector=metadata.name%3Dlead")),
    ] {
        let what = format!("{request:?}");
        assert_ne!(client.ask(request).await.status, StatusCode::TOO_MANY_REQUESTS, "{what}");
    }
    assert_eq!(arrived(&bed), before + 4);
    let before = arrived(&bed);
    for request in [
        lease("POST", LEASES, "other"),
        lease("PUT", &format!("{LEASES}/other"), "other"),
        get(LEASES),
        get(&format!("{LEASES}?fieldSelector=metadata.name%21%3Dlead")),
    ] {
        let what = format!("{request:?}");
        assert_eq!(client.ask(request).await.status, StatusCode::TOO_MANY_REQUESTS, "{what}");
    }
    assert_eq!(arrived(&bed), before);
}

#[tokio::test]
async fn a_change_of_guards_leaves_watches_alone() {
    let mut bed = Bed::new(&policy(1, "forceClosed", 1)).await;
    let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    bed.change(&policy(2, "forceOpened", 1)).await;
    assert_eq!(status_of(&bed, CONFIG_MAPS).await, StatusCode::TOO_MANY_REQUESTS);
    watching.send.send_data(event("MODIFIED", "x", 6)).await.unwrap();
    assert_eq!(watching.sees().await, sees("MODIFIED", "x"));
    bed.change(&policy(3, "forceClosed", 1)).await;
    assert_eq!(status_of(&bed, CONFIG_MAPS).await, StatusCode::OK);
    watching.send.send_data(event("MODIFIED", "y", 7)).await.unwrap();
    assert_eq!(watching.sees().await, sees("MODIFIED", "y"));
    assert!(bed.watches.try_recv().is_err(), "no other watch was begun");
    assert_eq!(bed.listed().len(), 1, "only the client listed");
}

#[tokio::test]
async fn a_held_request_passes_under_the_policy_that_lets_it() {
    let holding = |epoch, trigger, selector: &str| {
        let mut policy = policy(epoch, trigger, 1);
        policy["guards"][0]["holds"] = json!(true);
        policy["limits"][0]["selector"] = json!(selector);
        policy
    };
    for version in BOTH {
        let bed = Bed::new(&holding(1, "forceOpened", "team=a")).await;
        let mut client = client(&bed, version).await;
        let held = tokio::spawn(async move { client.get("/api/v1/pods").await });
        // Its head has arrived, and nothing of it is under way: the next policy is enforced at once.
        bed.change(&holding(2, "forceOpened", "team=b")).await;
        assert!(!held.is_finished());
        bed.change(&holding(3, "forceClosed", "team=c")).await;
        assert_eq!(soon("the answer", held).await.unwrap().status, StatusCode::OK);
        let target = bed.upstream.last().target;
        assert!(target.contains("team%3Dc"), "{target}");
    }
}

/// Waits until the state folder has an open breaker with this text.
async fn until_kept(bed: &Bed, text: &str) {
    until("the breaker to be kept", || async {
        let file = bed.pki.path("state").join("guards/_");
        fs::read_to_string(file).unwrap_or_default().contains(text)
    })
    .await;
}

#[tokio::test]
async fn an_open_breaker_is_open_in_the_next_process() {
    let mut bed = Bed::new(&policy(1, "normal", 1)).await;
    assert_eq!(status_of(&bed, CONFIG_MAPS).await, StatusCode::OK);
    assert_eq!(status_of(&bed, CONFIG_MAPS).await, StatusCode::TOO_MANY_REQUESTS);
    until_kept(&bed, r#""rule":"all""#).await;
    let mut others = policy(2, "normal", 1);
    others["guards"].as_array_mut().unwrap().push(guard("other", "limiterOnly", "create", 1));
    bed.restart(&others, true);
    let mut client = client(&bed, Version::HTTP_2).await;
    let answer = client.get(CONFIG_MAPS).await;
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(
        text.contains("is open until it is reset: kubectl annotate") && !answer.headers.contains_key("retry-after")
    );
    others["epoch"] = json!(3);
    others["guards"][0]["reset"] = json!("all");
    bed.change(&others).await;
    assert_eq!(client.get(CONFIG_MAPS).await.status, StatusCode::OK);
    // The value was seen, so it closes nothing again.
    assert_eq!(client.get(CONFIG_MAPS).await.status, StatusCode::TOO_MANY_REQUESTS);
    until_kept(&bed, r#""reset":"all""#).await;
    others["epoch"] = json!(4);
    bed.restart(&others, true);
    assert_eq!(status_of(&bed, CONFIG_MAPS).await, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_breaker_closes_after_its_window_by_a_probe() {
    let mut policy = policy(1, "normal", 1);
    policy["guards"][0]["sleepingWindowNanoseconds"] = json!(1_000_000);
    policy["guards"][0]["bucket"] = json!({"burst": 1, "limit": 1, "intervalNanoseconds": 2_000_000_000_u64});
    let bed = Bed::new(&policy).await;
    let open = "ctrlmesh_proxy_guard_open{rule=\"ops/wild/all\"}";
    let client = tokio::sync::Mutex::new(client(&bed, Version::HTTP_2).await);
    until("the breaker to open", || async {
        client.lock().await.get(CONFIG_MAPS).await.status == StatusCode::TOO_MANY_REQUESTS
    })
    .await;
    assert_eq!(bed.proxy.metric(open).await, 1.0);
    until("the breaker to close", || async {
        client.lock().await.get(CONFIG_MAPS).await.status == StatusCode::OK && bed.proxy.metric(open).await == 0.0
    })
    .await;
}
