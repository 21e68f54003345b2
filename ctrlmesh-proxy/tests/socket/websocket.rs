//! Watches over `WebSocket`s, which the proxy forwards as bytes.

use std::sync::{Arc, Mutex};

use crate::harness::client::tls;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::Upstream;
use crate::harness::watches::{Bed, LEASES, WATCH, leases, pods};
use crate::harness::{soon, until};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Asks for a WebSocket, and returns the connection behind the head of the answer, and that head.
async fn upgraded(bed: &Bed, target: &str) -> (TlsStream<TcpStream>, String) {
    upgraded_with(bed, target, "").await
}

/// The same with more headers.
async fn upgraded_with(bed: &Bed, target: &str, more: &str) -> (TlsStream<TcpStream>, String) {
    let mut stream = tls(&bed.pki, bed.proxy.address, "http/1.1").await;
    let head = format!(
        "GET {target} HTTP/1.1\r\nHost: k\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(soon("the answer", stream.read_u8()).await.unwrap());
    }
    (stream, String::from_utf8(answer).unwrap())
}

/// An API server that upgrades every request, and sends until the client is gone.
async fn websockets(policy: &Value) -> (Bed, Arc<Mutex<Vec<String>>>) {
    let mut bed = Bed::new(policy).await;
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let record = asked.clone();
    let upstream = Upstream::bytes(bed.pki.server(&["http/1.1"]), move |mut stream| {
        let record = record.clone();
        async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            if !head.to_lowercase().contains("upgrade") {
                let list = r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[]}"#;
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{list}",
                    list.len()
                );
                return stream.write_all(answer.as_bytes()).await.unwrap();
            }
            let is_shown = |(at, line): &(usize, &str)| *at == 0 || line.to_lowercase().starts_with("sec-websocket-protocol");
            let shown: Vec<&str> = head.lines().enumerate().filter(is_shown).map(|(_, line)| line).collect();
            record.lock().unwrap().push(shown.join("\n"));
            let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nevent";
            stream.write_all(switch.as_bytes()).await.unwrap();
            let mut rest = Vec::new();
            let _left = stream.read_to_end(&mut rest).await;
        }
    })
    .await;
    let file = bed.pki.path("policy");
    bed.proxy = Proxy::start(&bed.pki, upstream.address, &["--policy", file.to_str().unwrap()]);
    bed.upstream = upstream;
    (bed, asked)
}

/// Whether a handshake was accepted, as the API server does, to tell the client to list again.
async fn assert_expired(mut stream: TlsStream<TcpStream>, head: &str) {
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    let head = head.to_lowercase();
    for line in ["connection: upgrade", "upgrade: websocket", "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="] {
        assert!(head.lines().any(|one| one == line), "no {line} in {head}");
    }
    let mut frames = Vec::new();
    let _unclean = soon("the end", stream.read_to_end(&mut frames)).await;
    // One text message of less than 64 KiB, and the close.
    assert_eq!(&frames[..2], [0x81, 126]);
    let end = 4 + usize::from(u16::from_be_bytes([frames[2], frames[3]]));
    let event: Value = serde_json::from_slice(&frames[4..end]).unwrap();
    let status = &event["object"];
    assert_eq!(
        (&event["type"], &status["kind"], &status["code"], &status["reason"]),
        (&json!("ERROR"), &json!("Status"), &json!(410), &json!("Expired"))
    );
    assert_eq!(&frames[end..], [0x88, 2, 3, 0xe8]);
}

#[tokio::test]
async fn a_websocket_watch_is_narrowed_and_ends_at_a_change() {
    let (bed, asked) = websockets(&pods(1, "team=a")).await;
    let (mut stream, head) = upgraded(&bed, WATCH).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(asked.lock().unwrap()[0].contains("?labelSelector=team%3Da&watch=1"));
    let mut event = [0; 5];
    soon("an event", stream.read_exact(&mut event)).await.unwrap();
    // Not its own.
    let mut other = pods(2, "team=a");
    other["lock"] = json!({"namespace": "ops", "name": "lead", "shard": "s1"});
    bed.change(&other).await;
    assert_eq!(bed.proxy.metric("ctrlmesh_proxy_tunnels").await, 1.0);
    bed.change(&pods(3, "team=b")).await;
    let mut rest = Vec::new();
    let _unclean = soon("the end", stream.read_to_end(&mut rest)).await;
    assert!(rest.is_empty());
    until("the tunnel to end", || async { bed.proxy.metric("ctrlmesh_proxy_tunnels").await == 0.0 }).await;
    // Its version is from before the change, and the proxy cannot splice a WebSocket.
    let (stream, head) = upgraded(&bed, WATCH).await;
    assert_expired(stream, &head).await;
    let (_, head) = upgraded(&bed, "/api/v1/pods?watch=1").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    // It lists again, and watches from there: it was found out that all from before the change is older.
    let (_, head) = upgraded(&bed, "/api/v1/pods?watch=1&resourceVersion=10").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
}

#[tokio::test]
async fn a_websocket_watch_of_the_lock_is_refused() {
    let (bed, asked) = websockets(&leases(1, "team=a")).await;
    let (_, head) = upgraded(&bed, &format!("{LEASES}?watch=1")).await;
    // fabric8's client watches without a WebSocket then; 400 ended it.
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    assert!(asked.lock().unwrap().is_empty());
    let (_, head) = upgraded(&bed, "/apis/coordination.k8s.io/v1/namespaces/other/leases?watch=1").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
}

#[tokio::test]
async fn an_exec_does_not_end_when_the_policy_changes() {
    let (bed, _) = websockets(&pods(1, "team=a")).await;
    let (mut stream, head) = upgraded(&bed, "/api/v1/namespaces/x/pods/p/exec?command=sh").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    let mut event = [0; 5];
    soon("bytes", stream.read_exact(&mut event)).await.unwrap();
    let (watch, _) = upgraded(&bed, WATCH).await;
    bed.change(&pods(2, "team=b")).await;
    until("the watch to end", || async { bed.proxy.metric("ctrlmesh_proxy_tunnels").await == 1.0 }).await;
    drop(watch);
    stream.write_all(b"still here").await.unwrap();
    assert_eq!(bed.proxy.metric("ctrlmesh_proxy_tunnels").await, 1.0);
}

#[tokio::test]
async fn a_second_token_does_not_reach_what_the_api_server_proxies_to() {
    let mut policy = pods(1, "team=a");
    policy["allowProxy"] = json!(true);
    let (bed, asked) = websockets(&policy).await;
    let proxied = "/api/v1/namespaces/kube-system/pods/https:node-proxy:6443/proxy/api/v1/pods?watch=1";
    let protocols = "base64url.bearer.authorization.k8s.io.dG9rZW4, binary.k8s.io";
    let more = format!("Authorization: Bearer other\r\nSec-WebSocket-Protocol: {protocols}\r\n");
    let (_stream, _head) = upgraded_with(&bed, proxied, &more).await;
    let asked = asked.lock().unwrap().last().unwrap().to_lowercase();
    assert!(asked.ends_with("\nsec-websocket-protocol: binary.k8s.io"), "{asked}");
}

#[tokio::test]
async fn a_websocket_watch_that_expires_is_told_in_its_encoding() {
    let (bed, asked) = websockets(&pods(1, "team=a")).await;
    let (watch, _) = upgraded(&bed, WATCH).await;
    bed.change(&pods(2, "team=b")).await;
    drop(watch);
    let headers = "Accept: application/vnd.kubernetes.protobuf;stream=watch, application/json\r\n\
                   Sec-WebSocket-Protocol: base64.binary.k8s.io\r\n";
    let (mut stream, head) = upgraded_with(&bed, WATCH, headers).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(head.to_lowercase().contains("\r\nsec-websocket-protocol: base64.binary.k8s.io\r\n"), "{head}");
    let mut frames = Vec::new();
    let _unclean = soon("the end", stream.read_to_end(&mut frames)).await;
    // A binary message: a WatchEvent without a length before it, of type ERROR.
    assert_eq!(&frames[..2], [0x82, 126]);
    assert!(frames[4..].starts_with(b"\x0a\x05ERROR") && frames.ends_with(&[0x88, 2, 3, 0xe8]), "{frames:?}");
    // What is no WebSocket of the API server's gets its status as before.
    let version = "GET /api/v1/pods?watch=1&resourceVersion=5 HTTP/1.1\r\nHost: k\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 8\r\nSec-WebSocket-Key: a2V5\r\n\r\n";
    let answer = exchange_start(&bed, version).await;
    assert!(answer.starts_with("HTTP/1.1 410 "), "{answer}");
    assert_eq!(asked.lock().unwrap().len(), 1);
}

/// The first line of the answer to these bytes.
async fn exchange_start(bed: &Bed, bytes: &str) -> String {
    let mut stream = tls(&bed.pki, bed.proxy.address, "http/1.1").await;
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        line.push(soon("the answer", stream.read_u8()).await.unwrap());
    }
    String::from_utf8(line).unwrap()
}
