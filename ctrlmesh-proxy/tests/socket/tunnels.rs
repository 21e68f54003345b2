//! Traffic that passes as bytes: exec, attach, port-forward, logs, `proxy`, and connections without TLS or HTTP.

use std::time::Duration;

use crate::harness::client::{Client, get, tls};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::random::Random;
use crate::harness::soon;
use crate::harness::upstream::{Upstream, streamed, whole};
use bytes::Bytes;
use http::{StatusCode, Version};
use http_body_util::BodyExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// How much passes each way: more than any buffer between.
const BYTES: usize = 3 << 20;

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_and_half_closes() {
    let pki = Pki::new();
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        assert!(head.contains("upgrade: spdy/3.1\r\n") && head.contains("connection: upgrade\r\n"), "{head}");
        let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\nhello";
        stream.write_all(switch.as_bytes()).await.unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.unwrap();
        stream.write_all(&said).await.unwrap();
        stream.shutdown().await.unwrap();
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut stream = tls(&pki, proxy.address, "http/1.1").await;
    let head = "POST /api/v1/namespaces/a/pods/p/exec?command=sh HTTP/1.1\r\nHost: k\r\nConnection: Upgrade\r\n\
                Upgrade: SPDY/3.1\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nhello") {
        answer.push(soon("the switch", stream.read_u8()).await.unwrap());
    }
    assert!(answer.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&answer));
    stream.write_all(b"echo me").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut rest = String::new();
    soon("the echo, after our half is closed", stream.read_to_string(&mut rest)).await.unwrap();
    assert_eq!(rest, "echo me");
    assert!((proxy.metric("ctrlmesh_proxy_tunnelled_total").await - 1.0).abs() < f64::EPSILON);
}

#[tokio::test]
async fn what_is_not_tls_passes_to_the_api_server_as_it_is() {
    let pki = Pki::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(&pki, listener.local_addr().unwrap(), &[]);
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    let (mut upstream, _) = soon("a connection", listener.accept()).await.unwrap();
    let mut said = String::new();
    soon("what the client said", upstream.read_to_string(&mut said)).await.unwrap();
    assert_eq!(said, "GET / HTTP/1.0\r\n\r\n");
    upstream.write_all(b"not here").await.unwrap();
    drop(upstream);
    let mut answer = String::new();
    soon("the answer", client.read_to_string(&mut answer)).await.unwrap();
    assert_eq!(answer, "not here");
}

/// Bytes before or instead of a handshake that some server accepts: a warning alert (Go's does), an `SSLv2` hello, a
/// PROXY line, and plain HTTP.
const NOT_TLS: [&[u8]; 4] = [
    b"\x15\x03\x01\x00\x02\x01\x5a",
    b"\x80\x2e\x01\x03\x01\x00\x15",
    b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n",
    b"GET /api/v1/pods HTTP/1.0\r\n\r\n",
];

const LIMITED: &str = "limits: [{relateResources: [{apiGroups: [''], resources: [pods]}], selector: a=b}]";
const LOCKED: &str = "lock: {namespace: ops, name: lead, shard: s1}";
const PASSING: &str = "mode: pass\nepoch: 1";

#[tokio::test]
async fn a_policy_refuses_connections_without_tls() {
    let pki = Pki::new();
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), |_| async {}).await;
    for policy in [LIMITED, LOCKED] {
        let file = pki.path("policy.yaml");
        std::fs::write(&file, policy).unwrap();
        let proxy = Proxy::start(&pki, upstream.address, &["--policy", file.to_str().unwrap()]);
        for first in NOT_TLS {
            let mut client = TcpStream::connect(proxy.address).await.unwrap();
            client.write_all(first).await.unwrap();
            let mut answer = Vec::new();
            soon("the end", client.read_to_end(&mut answer)).await.unwrap();
            let answer = String::from_utf8(answer).unwrap();
            assert!(answer.starts_with("HTTP/1.0 400 "), "{}: {answer}", first.escape_ascii());
        }
        let refused = proxy.metric(r#"ctrlmesh_proxy_client_errors_total{reason="not_tls"}"#).await;
        assert_eq!(refused, 4.0);
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn an_opaque_connection_ends_when_a_policy_is_to_be_applied() {
    let pki = Pki::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let file = pki.path("policy.yaml");
    std::fs::write(&file, PASSING).unwrap();
    let arguments = ["--policy", file.to_str().unwrap()];
    let proxy = Proxy::start(&pki, listener.local_addr().unwrap(), &arguments);
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    client.write_all(NOT_TLS[0]).await.unwrap();
    let (mut upstream, _) = soon("a connection", listener.accept()).await.unwrap();
    let mut said = [0; 7];
    soon("what the client said", upstream.read_exact(&mut said)).await.unwrap();
    std::fs::write(pki.path("next"), LIMITED).unwrap();
    std::fs::rename(pki.path("next"), &file).unwrap();
    let mut rest = Vec::new();
    let _reset = soon("the end of it", upstream.read_to_end(&mut rest)).await;
    let _reset = soon("the end of it", client.read_to_end(&mut rest)).await;
    assert!(rest.is_empty());
}

#[tokio::test]
async fn a_tunnel_counts_as_the_connection_that_it_was() {
    let pki = Pki::new();
    let upstream = kubelet(&pki).await;
    let proxy = Proxy::start(&pki, upstream.address, &["--max-connections", "1"]);
    let mut stream = tls(&pki, proxy.address, "http/1.1").await;
    let head =
        "POST /api/v1/namespaces/a/pods/p/exec HTTP/1.1\r\nHost: k\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(soon("the switch", stream.read_u8()).await.unwrap());
    }
    assert!(answer.starts_with(b"HTTP/1.1 101 "));
    assert_eq!(proxy.metric("ctrlmesh_proxy_connections").await, 1.0);
    let mut second = TcpStream::connect(proxy.address).await.unwrap();
    let _reset = soon("the refusal", second.read_to_end(&mut Vec::new())).await;
    drop(stream);
    crate::harness::until("room for another", || async { proxy.metric("ctrlmesh_proxy_connections").await == 0.0 })
        .await;
}

/// Noise that holds every byte.
fn noise(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..BYTES).map(|_| random.next().to_be_bytes()[0]).collect()
}

/// An API server that upgrades every request, sends noise, reads until the client has ended, and echoes that.
async fn kubelet(pki: &Pki) -> Upstream {
    Upstream::bytes(pki.server(&["http/1.1"]), |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let header = |name: &str| {
            let line = head.lines().find_map(|line| line.split_once(": ").filter(|(key, _)| key.eq_ignore_ascii_case(name)));
            line.map(|(_, value)| value.to_owned()).unwrap_or_default()
        };
        assert_eq!(header("connection").to_lowercase(), "upgrade", "{head}");
        let switch = format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {}\r\nX-Asked: {}\r\nX-Protocols: {}\r\n\r\n",
            header("upgrade"), head.split(' ').nth(1).unwrap(), header("x-stream-protocol-version") + &header("sec-websocket-protocol"),
        );
        stream.write_all(switch.as_bytes()).await.unwrap();
        let (mut read, mut write) = tokio::io::split(stream);
        let (noise, mut said) = (noise(1), Vec::new());
        let (sent, read) = tokio::join!(write.write_all(&noise), read.read_to_end(&mut said));
        sent.and(read.map(drop)).unwrap();
        write.write_all(&said).await.unwrap();
        write.shutdown().await.unwrap();
    })
    .await
}

/// Asks for an upgrade; the head of the answer.
async fn upgrade(stream: &mut TlsStream<TcpStream>, target: &str, protocol: &str, more: &str) -> String {
    let head =
        format!("POST {target} HTTP/1.1\r\nHost: k\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n{more}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(soon("the switch", stream.read_u8()).await.unwrap());
    }
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn exec_attach_and_port_forward_carry_every_byte() {
    let pki = Pki::new();
    let upstream = kubelet(&pki).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let pod = "/api/v1/namespaces/a/pods/p";
    for target in [
        format!("{pod}/exec?command=sh&command=-c&command=echo%20a%26b&stdin=true&tty=false"),
        format!("{pod}/attach?container=c&stdout=true"),
        format!("{pod}/portforward?ports=80&ports=443"),
    ] {
        for (protocol, more) in [
            ("SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io"),
            ("websocket", "Sec-WebSocket-Protocol: v5.channel.k8s.io"),
        ] {
            let mut stream = tls(&pki, proxy.address, "http/1.1").await;
            let head = upgrade(&mut stream, &target, protocol, more).await;
            assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
            let lower = head.to_lowercase();
            assert!(lower.contains(&format!("upgrade: {protocol}\r\n").to_lowercase()), "{head}");
            assert!(head.contains(&format!("X-Asked: {target}\r\n")), "{head}");
            assert!(head.contains(".channel.k8s.io\r\n"), "{head}");
            let (mut read, mut write) = tokio::io::split(stream);
            let ours = noise(2);
            let said = ours.clone();
            let talking = tokio::spawn(async move {
                write.write_all(&said).await.unwrap();
                write.shutdown().await.unwrap();
            });
            let mut noise_back = vec![0; BYTES];
            soon("the noise", read.read_exact(&mut noise_back)).await.unwrap();
            assert!(noise_back == noise(1), "{target} over {protocol}");
            let mut echoed = Vec::new();
            soon("the echo, after our half is closed", read.read_to_end(&mut echoed)).await.unwrap();
            assert!(echoed == ours, "{target} over {protocol}");
            talking.await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_tunnel_has_no_deadline() {
    let pki = Pki::new();
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        // Later than any answer may come.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
        stream.write_all(switch.as_bytes()).await.unwrap();
        let byte = stream.read_u8().await.unwrap();
        stream.write_u8(byte).await.unwrap();
    })
    .await;
    let deadlines = ["--response-timeout", "200ms", "--header-timeout", "5s", "--connect-timeout", "5s"];
    let proxy = Proxy::start(&pki, upstream.address, &deadlines);
    let mut stream = tls(&pki, proxy.address, "http/1.1").await;
    let head = upgrade(&mut stream, "/api/v1/namespaces/a/pods/p/exec?command=sh", "SPDY/3.1", "X-A: b").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    tokio::time::sleep(Duration::from_secs(6)).await;
    stream.write_u8(7).await.unwrap();
    assert_eq!(soon("the byte", stream.read_u8()).await.unwrap(), 7);
}

#[tokio::test]
async fn a_log_may_take_as_long_as_it_likes_and_arrives_line_by_line() {
    let pki = Pki::new();
    let (lines, next) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
    let next = std::sync::Arc::new(tokio::sync::Mutex::new(next));
    let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), move |seen| {
        let next = next.clone();
        async move {
            // Later than any other answer may come.
            tokio::time::sleep(Duration::from_millis(600)).await;
            if !seen.target.ends_with("/log?follow=true") {
                return whole(StatusCode::OK, "");
            }
            let (mut send, response) = streamed();
            tokio::spawn(async move {
                for _ in 0..3 {
                    let line = next.lock().await.recv().await.unwrap();
                    send.send_data(line).await.unwrap();
                }
            });
            response
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &["--response-timeout", "200ms"]);
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        assert_eq!(client.get("/api/v1/namespaces/a/pods/p").await.status, StatusCode::GATEWAY_TIMEOUT);
        let mut client = Client::connect(&pki, proxy.address, version).await;
        let log = client.send(get("/api/v1/namespaces/a/pods/p/log?follow=true")).await.unwrap();
        let mut log = log.into_body();
        for line in ["one\n", "two\n", "three\n"] {
            lines.send(Bytes::from_static(line.as_bytes())).unwrap();
            let frame = soon("a line", log.frame()).await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), line);
        }
        assert!(soon("the end", log.collect()).await.unwrap().to_bytes().is_empty());
    }
}

#[tokio::test]
async fn what_is_behind_a_proxy_subresource_passes_as_it_is() {
    let pki = Pki::new();
    let upstream =
        Upstream::http(pki.server(&["h2", "http/1.1"]), |seen| async move { whole(StatusCode::OK, seen.target) }).await;
    let policy = pki.path("policy");
    std::fs::write(&policy, "limits: [{selector: team=a}]\nallowProxy: true").unwrap();
    let proxy = Proxy::start(&pki, upstream.address, &["--policy", policy.to_str().unwrap()]);
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        for target in [
            "/api/v1/namespaces/a/pods/p:8080/proxy/x/../y//z?labelSelector=%zz&watch=1",
            "/api/v1/namespaces/a/services/https:s:443/proxy/a%2Fb/./c",
            "/api/v1/nodes/n/proxy/metrics",
        ] {
            assert_eq!(client.get(target).await.body, target, "{version:?}");
        }
    }
}

#[tokio::test]
async fn nothing_is_proxied_elsewhere_unless_the_policy_says_so() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), |_| async { whole(StatusCode::OK, "") }).await;
    let policy = pki.path("policy");
    std::fs::write(&policy, "limits: [{selector: team=a}]").unwrap();
    let proxy = Proxy::start(&pki, upstream.address, &["--policy", policy.to_str().unwrap()]);
    for version in BOTH {
        let answer = Client::connect(&pki, proxy.address, version).await.get("/api/v1/nodes/n/proxy/pods").await;
        let message = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(answer.status == StatusCode::FORBIDDEN && message.contains("spec.allowProxy"), "{message}");
    }
    assert!(upstream.seen.lock().unwrap().is_empty());
}
