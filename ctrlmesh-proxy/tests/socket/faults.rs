//! Faults that an operator's requests meet on purpose.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};

use crate::harness::client::{Answer, Client, get, plain_get};
use crate::harness::watches::{Bed, WATCH, event, sees};
use crate::harness::{soon, until};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

const CONFIG_MAPS: &str = "/api/v1/namespaces/ops/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";

const ALL: u32 = 1_000_000_000;

/// So long that no test waits for it.
const HOUR: u64 = 3_600_000_000_000;

/// A policy of the shard `s1` whose requests all meet this fault.
pub(crate) fn policy(epoch: u64, fault: &Value) -> Value {
    let mut all = json!({"injection": "ops/storm", "fault": "0"});
    for (field, value) in fault.as_object().unwrap() {
        all[field] = value.clone();
    }
    json!({
        "epoch": epoch,
        "limits": [{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": "team=a"}],
        "lock": {"namespace": "ops", "name": "lead", "shard": "s1"},
        "faults": [all],
    })
}

pub(crate) fn without_faults(epoch: u64) -> Value {
    let mut policy = policy(epoch, &json!({}));
    policy["faults"] = json!([]);
    policy
}

fn abort(status: u16) -> Value {
    json!({"abort": {"status": status, "share": ALL}})
}

pub(crate) fn api_fault(kind: &Value) -> Value {
    json!({"apiFault": {"kind": kind, "share": ALL}})
}

fn delay(nanoseconds: u64) -> Value {
    json!({"delay": {"nanoseconds": nanoseconds, "share": ALL}})
}

pub(crate) async fn client(bed: &Bed, version: Version) -> Client {
    Client::connect(&bed.pki, bed.proxy.address, version).await
}

fn arrived(bed: &Bed) -> usize {
    bed.upstream.seen.lock().unwrap().len()
}

fn status_in(answer: &Answer) -> Value {
    serde_json::from_slice(&answer.body).unwrap()
}

fn lease(method: &str, target: &str, name: &str) -> Request<Full<Bytes>> {
    let body = format!(r#"{{"metadata":{{"name":"{name}"}}}}"#);
    let request = Request::builder().method(method).uri(target).header("content-type", "application/json");
    request.body(Full::new(Bytes::from(body))).unwrap()
}

/// How often; there is no metric before the first time.
pub(crate) async fn injected(bed: &Bed, effect: &str) -> f64 {
    let metric = format!("ctrlmesh_proxy_faults_injected_total{{fault=\"ops/storm/0\",effect=\"{effect}\"}} ");
    let page = plain_get(bed.proxy.admin, "/metrics").await.1;
    page.lines().find_map(|line| line.strip_prefix(&metric)).map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn an_aborted_request_gets_a_status_and_never_arrives() {
    for version in BOTH {
        let bed = Bed::new(&policy(1, &abort(503))).await;
        let before = arrived(&bed);
        let answer = client(&bed, version).await.get(CONFIG_MAPS).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        let status = status_in(&answer);
        assert_eq!([&status["kind"], &status["reason"]], [&json!("Status"), &json!("ServiceUnavailable")]);
        let message = status["message"].as_str().unwrap();
        assert!(message.contains("fault \"0\" of FaultInjection ops/storm"), "{message}");
        assert_eq!(arrived(&bed), before);
        assert_eq!(injected(&bed, "abort").await, 1.0);
    }
}

#[tokio::test]
async fn an_aborted_head_has_a_length_and_no_body() {
    for version in BOTH {
        let bed = Bed::new(&policy(1, &abort(503))).await;
        let body = client(&bed, version).await.get("/healthz").await.body;
        let head = Request::head("/healthz").body(Full::default()).unwrap();
        let answer = client(&bed, version).await.ask(head).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!((&answer.headers["content-length"], answer.body.len()), (&HeaderValue::from(body.len()), 0));
    }
}

#[tokio::test]
async fn an_abort_is_in_the_clients_encoding_and_may_succeed() {
    let bed = Bed::new(&policy(1, &abort(500))).await;
    let mut request = get(CONFIG_MAPS);
    let protobuf = HeaderValue::from_static("application/vnd.kubernetes.protobuf");
    request.headers_mut().insert("accept", protobuf);
    let answer = client(&bed, Version::HTTP_2).await.ask(request).await;
    assert!(answer.status == StatusCode::INTERNAL_SERVER_ERROR && answer.body.starts_with(b"k8s\0"));
    for version in BOTH {
        for (code, body) in [(200, true), (204, false), (304, false)] {
            let bed = Bed::new(&policy(1, &abort(code))).await;
            let answer = client(&bed, version).await.get(CONFIG_MAPS).await;
            assert_eq!((answer.status.as_u16(), !answer.body.is_empty()), (code, body), "{version:?}");
            if body {
                assert_eq!(status_in(&answer)["status"], "Success");
            }
        }
    }
}

#[tokio::test]
async fn the_lock_is_spared_also_where_only_its_body_tells() {
    let bed = Bed::new(&policy(1, &abort(500))).await;
    let mut client = client(&bed, Version::HTTP_2).await;
    let lead = format!("{LEASES}/lead");
    for request in [lease("PUT", &lead, "lead"), lease("POST", LEASES, "lead"), get(&lead)] {
        let what = format!("{request:?}");
        assert_ne!(client.ask(request).await.status, StatusCode::INTERNAL_SERVER_ERROR, "{what}");
    }
    for request in [lease("POST", LEASES, "other"), get(LEASES), get(CONFIG_MAPS)] {
        let what = format!("{request:?}");
        assert_eq!(client.ask(request).await.status, StatusCode::INTERNAL_SERVER_ERROR, "{what}");
    }
    let mut all = abort(500);
    all["includesLock"] = json!(true);
    bed.change(&policy(2, &all)).await;
    for request in [lease("PUT", &lead, "lead"), lease("POST", LEASES, "lead")] {
        assert_eq!(client.ask(request).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    }
}

#[tokio::test]
async fn a_delayed_request_waits_and_others_do_not() {
    let mut slow = delay(700_000_000);
    slow["http"] = json!([{"path": {"regex": "/api/.*/configmaps"}, "method": "GET", "headers": []}]);
    let bed = Bed::new(&policy(1, &slow)).await;
    let mut other = client(&bed, Version::HTTP_2).await;
    let mut delayed = client(&bed, Version::HTTP_2).await;
    let begun = Instant::now();
    let waiting = tokio::spawn(async move { (delayed.get(CONFIG_MAPS).await.status, begun.elapsed()) });
    assert_eq!(other.get("/api/v1/namespaces/ops/secrets").await.status, StatusCode::OK);
    let (status, took) = soon("the delayed answer", waiting).await.unwrap();
    assert_eq!(status, StatusCode::OK);
    assert!(took >= Duration::from_millis(700), "{took:?}");
    assert_eq!(injected(&bed, "delay").await, 1.0);
}

#[tokio::test]
async fn a_request_waits_no_longer_than_its_fault_is_there() {
    let bed = Bed::new(&policy(1, &delay(HOUR))).await;
    for request in [get(CONFIG_MAPS), lease("POST", LEASES, "other")] {
        let mut delayed = client(&bed, Version::HTTP_2).await;
        let before = injected(&bed, "delay").await;
        let waiting = tokio::spawn(async move { delayed.ask(request).await.status });
        until("the request to wait", || async { injected(&bed, "delay").await > before }).await;
        let arrived_before = arrived(&bed);
        // Another policy with the same fault changes nothing.
        bed.change(&policy(2, &delay(HOUR))).await;
        assert!(!waiting.is_finished() && arrived(&bed) == arrived_before);
        bed.change(&without_faults(3)).await;
        assert_eq!(soon("the answer", waiting).await.unwrap(), StatusCode::OK);
        bed.change(&policy(4, &delay(HOUR))).await;
    }
}

#[tokio::test]
async fn an_abort_behind_a_delay_ends_with_its_fault() {
    let mut both = delay(HOUR);
    both["abort"] = json!({"status": 500, "share": ALL});
    let bed = Bed::new(&policy(1, &both)).await;
    let mut delayed = client(&bed, Version::HTTP_11).await;
    let waiting = tokio::spawn(async move { delayed.get(CONFIG_MAPS).await.status });
    until("the request to wait", || async { injected(&bed, "delay").await > 0.0 }).await;
    bed.change(&without_faults(2)).await;
    assert_eq!(soon("the answer", waiting).await.unwrap(), StatusCode::OK);
}

#[tokio::test]
async fn a_lost_answer_was_carried_out() {
    for version in BOTH {
        let bed = Bed::new(&policy(1, &api_fault(&json!("answerLost")))).await;
        let before = arrived(&bed);
        let mut client = client(&bed, version).await;
        assert!(client.send(get(CONFIG_MAPS)).await.is_err(), "{version:?}");
        assert_eq!(arrived(&bed), before + 1);
    }
}

#[tokio::test]
async fn an_expired_watch_ends_with_410_in_its_framing() {
    for version in BOTH {
        let bed = Bed::new(&policy(1, &api_fault(&json!("expireWatch")))).await;
        let mut client = client(&bed, version).await;
        assert!(client.get(WATCH).await.is_expired_watch());
        assert_eq!(client.get(CONFIG_MAPS).await.status, StatusCode::OK, "a list is none");
    }
}

#[tokio::test]
async fn a_conflict_hits_updates_only() {
    let bed = Bed::new(&policy(1, &api_fault(&json!("conflict")))).await;
    let mut client = client(&bed, Version::HTTP_2).await;
    let map = format!("{CONFIG_MAPS}/a");
    for (request, expected) in [
        (lease("PUT", &map, "a"), StatusCode::CONFLICT),
        (lease("PATCH", &map, "a"), StatusCode::CONFLICT),
        (lease("POST", CONFIG_MAPS, "a"), StatusCode::OK),
        (get(&map), StatusCode::OK),
    ] {
        let what = format!("{request:?}");
        let answer = client.ask(request).await;
        assert_eq!(answer.status, expected, "{what}");
        if expected == StatusCode::CONFLICT {
            let status = status_in(&answer);
            let message = status["message"].as_str().unwrap();
            assert_eq!(status["reason"], "Conflict");
            assert!(message.starts_with("Operation cannot be fulfilled on configmaps \"a\": the object"), "{message}");
        }
    }
}

#[tokio::test]
async fn too_many_requests_says_when_to_come_again() {
    let bed = Bed::new(&policy(1, &api_fault(&json!({"tooManyRequests": {"retryAfterSeconds": 7}})))).await;
    let answer = client(&bed, Version::HTTP_2).await.get(CONFIG_MAPS).await;
    assert_eq!((answer.status, &answer.headers["retry-after"]), (StatusCode::TOO_MANY_REQUESTS, &"7".parse().unwrap()));
    assert_eq!(status_in(&answer)["details"]["retryAfterSeconds"], 7);
}

#[tokio::test]
async fn go_away_closes_the_connection_after_the_answer() {
    let bed = Bed::new(&policy(1, &api_fault(&json!("goAway")))).await;
    let mut client = client(&bed, Version::HTTP_2).await;
    assert_eq!(client.get(CONFIG_MAPS).await.status, StatusCode::OK);
    until("the connection to close", || async { client.is_closed() }).await;
}

#[tokio::test]
async fn a_cut_watch_breaks_in_the_middle_of_an_event() {
    for version in BOTH {
        let cut = api_fault(&json!({"cutWatch": {"afterNanoseconds": 0}}));
        let mut bed = Bed::new(&policy(1, &cut)).await;
        let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
        let sent = event("ADDED", "a", 6);
        watching.send.send_data(sent.clone()).await.unwrap();
        let mut read = Vec::new();
        let broken = loop {
            match soon("a frame", watching.body.frame()).await {
                Some(Ok(frame)) => read.extend(frame.into_data().unwrap()),
                Some(Err(_)) => break true,
                None => break false,
            }
        };
        assert!(broken, "{version:?}");
        assert!(!read.is_empty() && read.len() < sent.len() && sent.starts_with(&read), "{read:?}");
    }
}

#[tokio::test]
async fn delayed_events_come_in_order_and_at_once_when_lifted() {
    for version in BOTH {
        let late = |nanoseconds| api_fault(&json!({"delayEvents": {"nanoseconds": nanoseconds}}));
        let mut bed = Bed::new(&policy(1, &late(500_000_000))).await;
        let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
        let sent = Instant::now();
        for at in 6..9 {
            watching.send.send_data(event("ADDED", &format!("p{at}"), at)).await.unwrap();
        }
        for at in 6..9 {
            assert_eq!(watching.sees().await, sees("ADDED", &format!("p{at}")));
            assert!(sent.elapsed() >= Duration::from_millis(500));
        }
        bed.change(&policy(2, &late(HOUR))).await;
        let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
        watching.send.send_data(event("ADDED", "q", 9)).await.unwrap();
        bed.change(&without_faults(3)).await;
        assert_eq!(watching.sees().await, sees("ADDED", "q"));
        watching.send.send_data(event("ADDED", "r", 10)).await.unwrap();
        assert_eq!(watching.sees().await, sees("ADDED", "r"));
    }
}

#[tokio::test]
async fn a_slow_body_takes_its_time_and_is_whole() {
    for version in BOTH {
        let bed = Bed::new(&without_faults(1)).await;
        let whole = client(&bed, version).await.get(CONFIG_MAPS).await.body;
        assert!(whole.len() > 8, "{whole:?}");
        let speed = whole.len() * 2;
        bed.change(&policy(2, &api_fault(&json!({"slowBody": {"bytesPerSecond": speed}})))).await;
        let begun = Instant::now();
        let slow = client(&bed, version).await.get(CONFIG_MAPS).await.body;
        assert_eq!(slow, whole);
        // The last part has no wait behind it.
        assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    }
}
