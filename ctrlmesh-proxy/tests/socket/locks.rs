//! Bodies with the leader-election lock: lists of any size, other answers, and bodies that never end.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::harness::client::{Client, get, tls};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::soon;
use crate::harness::upstream::{ReceivedRequest, Upstream, streamed, whole};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Version};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];
const MAPS: &str = "/api/v1/namespaces/ops/configmaps";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/ops/leases/lead";
const POLICY: &str = "lock: {namespace: ops, name: lead, shard: s1}";

async fn bed<A, F>(answer: A, more: &[&str]) -> (Pki, Upstream, Proxy)
where
    A: Fn(ReceivedRequest) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = http::Response<crate::harness::upstream::Body>> + Send + 'static,
{
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), answer).await;
    let file = pki.path("policy.yaml");
    fs::write(&file, POLICY).unwrap();
    let arguments = [&["--policy", file.to_str().unwrap()], more].concat();
    let proxy = Proxy::start(&pki, upstream.address, &arguments);
    (pki, upstream, proxy)
}

fn config_map(name: &str, bytes: usize) -> Value {
    json!({"metadata": {"namespace": "ops", "name": name}, "data": {"x": "a text of 30 bytes with ]}\\\" ".repeat(bytes / 30)}})
}

/// More than any single object may have: ours, another shard's, and many others.
fn long_list() -> Value {
    let others = (0..5).map(|number| config_map(&format!("c{number}"), 800 << 10));
    let locks = ["lead---s2", "lead---s1", "lead---s3"].map(|name| config_map(name, 10));
    let items: Vec<Value> = locks.into_iter().chain(others).collect();
    json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": items})
}

fn names(list: &Value) -> Vec<String> {
    let items = list["items"].as_array().unwrap();
    items.iter().map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_list_of_any_size_passes_with_its_lock_renamed() {
    let answer = |_| async {
        let mut response = whole(StatusCode::OK, long_list().to_string());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        response
    };
    let (pki, _upstream, proxy) = bed(answer, &[]).await;
    let before = proxy.resident_bytes();
    for version in BOTH {
        for target in [MAPS, "/api/v1/configmaps"] {
            let answer = Client::connect(&pki, proxy.address, version).await.get(target).await;
            assert_eq!(answer.status, StatusCode::OK, "{version:?} {target}");
            let list: Value = serde_json::from_slice(&answer.body).unwrap();
            let expected = ["lead", "c0", "c1", "c2", "c3", "c4"];
            assert_eq!(names(&list), expected, "{version:?} {target}");
            assert_eq!(list["items"][1], long_list()["items"][3]);
        }
    }
    let grown = proxy.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "the proxy grew by {grown} bytes");
}

#[tokio::test]
async fn a_list_that_breaks_off_is_not_taken_for_a_whole_one() {
    let answer = |_| async {
        let mut response = whole(StatusCode::OK, format!("{{\"items\":[{}3]}}", " ".repeat(200 << 10)));
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        response
    };
    let (pki, _upstream, proxy) = bed(answer, &[]).await;
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        let body = match client.send(get(MAPS)).await {
            Ok(response) => soon("the end", response.into_body().collect()).await.map(drop),
            Err(error) => Err(error),
        };
        assert!(body.is_err(), "{version:?}");
    }
}

#[tokio::test]
async fn an_answer_that_is_no_lock_and_no_success_passes_as_it_is() {
    let answer = |seen: ReceivedRequest| async move {
        let code = if seen.method == "GET" { 429 } else { 502 };
        let mut response = whole(StatusCode::from_u16(code).unwrap(), "slow down, lead---s1");
        let kind = if code == 429 { "text/plain; charset=utf-8" } else { "application/json" };
        response.headers_mut().insert("content-type", HeaderValue::from_static(kind));
        response.headers_mut().insert("retry-after", HeaderValue::from_static("7"));
        response
    };
    let (pki, _upstream, proxy) = bed(answer, &[]).await;
    for version in BOTH {
        for (method, status) in [("GET", 429), ("DELETE", 502)] {
            let request = Request::builder().method(method).uri(LEASE);
            let request = request.body(http_body_util::Full::default()).unwrap();
            let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
            assert_eq!(answer.status.as_u16(), status, "{version:?}");
            assert_eq!(answer.headers["retry-after"], "7");
            assert_eq!(answer.body, "slow down, lead---s1");
        }
    }
}

#[tokio::test]
async fn a_lock_that_the_client_does_not_finish_is_408() {
    let answer = |_| async { whole(StatusCode::OK, "{}") };
    let (pki, upstream, proxy) = bed(answer, &["--response-timeout", "300ms"]).await;
    let mut stream = tls(&pki, proxy.address, "http/1.1").await;
    let head =
        format!("PUT {LEASE} HTTP/1.1\r\nHost: k\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    soon("the answer", stream.read_exact(&mut answer)).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&answer), "HTTP/1.1 408");
    assert!(upstream.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_lock_that_the_api_server_does_not_finish_is_504() {
    let answer = |_| async {
        let (mut send, response) = streamed();
        tokio::spawn(async move {
            let _gone = send.send_data(Bytes::from_static(b"{")).await;
            tokio::time::sleep(Duration::from_mins(10)).await;
        });
        response
    };
    let (pki, _upstream, proxy) = bed(answer, &["--response-timeout", "300ms"]).await;
    for version in BOTH {
        let answer = Client::connect(&pki, proxy.address, version).await.get(LEASE).await;
        assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT, "{version:?}");
    }
}

#[tokio::test]
async fn unfinished_locks_are_bounded_for_each_client() {
    let answer = |_| async { whole(StatusCode::OK, "{}") };
    let (pki, _upstream, proxy) = bed(answer, &[]).await;
    let before = proxy.resident_bytes();
    let stream = tls(&pki, proxy.address, "h2").await;
    let (mut send, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let mut open = Vec::new();
    let mut refused = 0;
    for _ in 0..40 {
        send = send.ready().await.unwrap();
        let (mut response, mut body) = send.send_request(put(()), false).unwrap();
        body.send_data(Bytes::from(vec![b' '; 2 << 20]), false).unwrap();
        match soon("the body to be taken", taken(&mut response, &mut body)).await {
            Some(status) => {
                assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
                refused += 1;
            }
            None => open.push((response, body)),
        }
    }
    assert!(refused > 0);
    let grown = proxy.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "the proxy grew by {grown} bytes");
    // Others find room, on this thread and on the other one.
    let mut others = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
        assert_eq!(client.ask(put(Bytes::from_static(RENEWAL).into())).await.status, StatusCode::OK);
        others.push(client);
    }
    // A client that goes away releases its memory.
    drop(open);
    crate::harness::until("room", || async {
        let mut send = send.clone().ready().await.unwrap();
        let (response, mut body) = send.send_request(put(()), false).unwrap();
        body.send_data(Bytes::from_static(RENEWAL), true).unwrap();
        response.await.unwrap().status() == StatusCode::OK
    })
    .await;
}

const RENEWAL: &[u8] = br#"{"metadata":{"name":"lead"}}"#;

fn put<B>(body: B) -> Request<B> {
    let request = Request::put(format!("https://k{LEASE}"));
    request.header("content-type", "application/json").body(body).unwrap()
}

/// Waits until the proxy has taken all of a body. Returns the status where it is refused.
async fn taken(response: &mut h2::client::ResponseFuture, body: &mut h2::SendStream<Bytes>) -> Option<StatusCode> {
    loop {
        tokio::select! {
            answer = &mut *response => return Some(answer.unwrap().status()),
            () = tokio::time::sleep(Duration::from_millis(5)) => {
                body.reserve_capacity(1);
                if body.capacity() > 0 {
                    return None;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_body_that_names_another_shards_lock_is_403() {
    let answer = |_| async { whole(StatusCode::OK, "{}") };
    let (pki, upstream, proxy) = bed(answer, &[]).await;
    let body = r#"{"metadata":{"namespace":"ops","name":"lead---s2"}}"#;
    let request = Request::post("/apis/coordination.k8s.io/v1/namespaces/ops/leases")
        .header("content-type", "application/json")
        .body(http_body_util::Full::from(body))
        .unwrap();
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    let answer = client.ask(request).await;
    let status: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((answer.status, &status["reason"]), (StatusCode::FORBIDDEN, &json!("Forbidden")));
    assert!(upstream.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn yaml_and_cbor_are_refused_where_a_lock_may_be() {
    let answer = |_| async { whole(StatusCode::CREATED, "{}") };
    let (pki, upstream, proxy) = bed(answer, &[]).await;
    let post = |target: &str, kind: &str, body: &'static [u8]| {
        let request = Request::post(target).header("content-type", kind);
        request.body(http_body_util::Full::from(body)).unwrap()
    };
    let yaml = b"metadata:\n  name: settings\n";
    // {"metadata": {"name": "x"}}
    let cbor = b"\xa1\x48metadata\xa1\x44name\x41x";
    let json = br#"{"metadata": {"name": "x"}}"#;
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    for (kind, body) in [("application/yaml", &yaml[..]), ("application/cbor", cbor)] {
        let answer = client.ask(post(MAPS, kind, body)).await;
        assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{kind}");
        let status: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(status["reason"], "UnsupportedMediaType", "{kind}");
        assert!(upstream.seen.lock().unwrap().is_empty(), "{kind}");
    }
    for (target, kind, body) in [
        ("/api/v1/namespaces/other/configmaps", "application/cbor", &cbor[..]),
        (MAPS, "application/apply-patch+yaml", json),
    ] {
        assert_eq!(client.ask(post(target, kind, body)).await.status, StatusCode::CREATED, "{kind}");
        assert_eq!(upstream.last().body, body, "{kind}");
    }
}

/// As the API server makes them: the request tells which part of its object a row holds.
fn table(target: &str) -> Value {
    let row = |name: &str| {
        let object = if target.contains("includeObject=None") {
            Value::Null
        } else {
            json!({"kind": "PartialObjectMetadata", "metadata": {"namespace": "ops", "name": name}})
        };
        json!({"cells": [name, 1, "2d"], "object": object})
    };
    let rows = ["lead---s2", "lead---s1", "lead", "other"].map(row);
    json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "rows": rows})
}

#[tokio::test]
async fn a_table_without_objects_shows_no_other_shards_lock() {
    let answer = |seen: ReceivedRequest| async move {
        let mut response = whole(StatusCode::OK, table(&seen.target).to_string());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        response
    };
    let (pki, _upstream, proxy) = bed(answer, &[]).await;
    for version in BOTH {
        for target in [MAPS, "/api/v1/configmaps"] {
            let mut request = get(&format!("{target}?limit=5&includeObject=None"));
            let accept = HeaderValue::from_static("application/json;as=Table;v=v1;g=meta.k8s.io");
            request.headers_mut().insert("accept", accept);
            let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
            let table: Value = serde_json::from_slice(&answer.body).unwrap();
            let rows = table["rows"].as_array().unwrap();
            let names: Vec<_> = rows.iter().map(|row| row["cells"][0].as_str().unwrap()).collect();
            assert_eq!(names, ["lead", "other"], "{version:?} {target}");
        }
    }
}

#[tokio::test]
async fn a_lock_that_is_asked_for_in_yaml_or_cbor_comes_in_json() {
    let answer = |seen: ReceivedRequest| async move {
        // As the API server does: the first type that it knows.
        let accept = seen.headers.get("accept").map_or("", |accept| accept.to_str().unwrap());
        let yaml = accept.starts_with("application/yaml");
        let text = if yaml { "items: []\n".to_owned() } else { long_list().to_string() };
        let kind = if yaml { "application/yaml" } else { "application/json" };
        let mut response = whole(StatusCode::OK, text);
        response.headers_mut().insert("content-type", HeaderValue::from_static(kind));
        response
    };
    let (pki, upstream, proxy) = bed(answer, &[]).await;
    for version in BOTH {
        for (accept, sent) in [
            ("application/yaml", "application/json"),
            ("application/cbor, application/json;q=0.9", "application/json;q=0.9"),
            (
                "application/yaml;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/yaml;q=0.5",
                "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json;q=0.5",
            ),
        ] {
            let mut request = get(MAPS);
            request.headers_mut().insert("accept", HeaderValue::from_static(accept));
            let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
            assert_eq!(answer.status, StatusCode::OK, "{version:?} {accept}");
            assert_eq!(upstream.last().headers["accept"], sent);
            let list: Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(names(&list)[0], "lead");
        }
        // A list that holds no lock comes as requested.
        let mut request = get("/api/v1/namespaces/other/configmaps");
        request.headers_mut().insert("accept", HeaderValue::from_static("application/yaml"));
        let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
        assert_eq!(answer.headers["content-type"], "application/yaml");
    }
}

/// A Lease that this identity holds.
fn lease(name: &str, holder: &str) -> Value {
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"namespace": "ops", "name": name, "resourceVersion": "9"},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 1}})
}

/// Whom a client is told to hold the lock.
async fn held_by(client: &mut Client) -> String {
    let answer = client.get(LEASE).await;
    let read: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((answer.status, &read["metadata"]["name"]), (StatusCode::OK, &json!("lead")), "{read}");
    read["spec"]["holderIdentity"].as_str().unwrap().to_owned()
}

/// The proxy sees connections end a moment after the client has ended them.
async fn until_free(client: &mut Client) {
    let free = async {
        while !held_by(client).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the lock to be free", free).await;
}

async fn take(client: &mut Client, identity: &str) {
    let request = Request::put(LEASE).header("content-type", "application/json");
    let request = request.body(Bytes::from(lease("lead", identity).to_string()).into()).unwrap();
    assert_eq!(client.ask(request).await.status, StatusCode::OK);
}

/// A process that ends leaves its lock behind: its successor in the pod need not wait until the Lease has run out.
#[tokio::test]
async fn what_an_ended_process_of_the_pod_holds_is_free() {
    let stored = Arc::new(Mutex::new(lease("lead---s1", "op-0_before").to_string()));
    let kept = stored.clone();
    let answer = move |seen: ReceivedRequest| {
        let kept = kept.clone();
        async move {
            if seen.method == "PUT" {
                *kept.lock().unwrap() = String::from_utf8(seen.body.to_vec()).unwrap();
            }
            let mut response = whole(StatusCode::OK, kept.lock().unwrap().clone());
            response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
            response
        }
    };
    let (pki, _upstream, proxy) = bed(answer, &["--pod", "ops/op-0"]).await;
    for version in BOTH {
        let mut first = Client::connect(&pki, proxy.address, version).await;
        until_free(&mut first).await;
        take(&mut first, "op-0_one").await;
        let mut second = Client::connect(&pki, proxy.address, version).await;
        assert_eq!([held_by(&mut first).await, held_by(&mut second).await], ["op-0_one"; 2]);
        drop((first, second));
        // The next process.
        let mut next = Client::connect(&pki, proxy.address, version).await;
        until_free(&mut next).await;
        take(&mut next, "op-0_two").await;
        assert_eq!(held_by(&mut next).await, "op-0_two");
        take(&mut next, "op-1_other").await;
        assert_eq!(held_by(&mut next).await, "op-1_other", "another pod's");
        take(&mut next, "op-0_before").await;
    }
}
