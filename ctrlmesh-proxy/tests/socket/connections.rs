//! The proxy's connections to the API server.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use crate::harness::client::{Client, get, tls};
use crate::harness::frames::{asked, operator};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, whole};
use crate::harness::{soon, until};
use http::{Request, StatusCode, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];
const PROTOCOLS: &[&str] = &["h2", "http/1.1"];

async fn echo(pki: &Pki) -> Upstream {
    Upstream::http(pki.server(PROTOCOLS), |seen| async move { whole(StatusCode::CREATED, seen.body) }).await
}

#[tokio::test]
async fn each_client_connection_has_its_own_upstream_connection() {
    let pki = Pki::new();
    let upstream = echo(&pki).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    for version in BOTH {
        let before = upstream.connections();
        let mut one = Client::connect(&pki, proxy.address, version).await;
        assert_eq!(upstream.connections(), before, "opened before it was needed");
        for _ in 0..5 {
            one.get("/api").await;
        }
        let mut two = Client::connect(&pki, proxy.address, version).await;
        two.get("/api").await;
        assert_eq!(upstream.connections(), before + 2, "{version:?}");
        drop((one, two));
        until("the upstream connections to close with their clients", || async {
            proxy.metric("ctrlmesh_proxy_upstream_connections").await == 0.0
        })
        .await;
    }
}

#[tokio::test]
async fn an_abandoned_request_holds_up_no_other_on_its_connection() {
    let pki = Pki::new();
    let release = Arc::<Notify>::default();
    let released = release.clone();
    let upstream = Upstream::http(pki.server(PROTOCOLS), move |seen| {
        let released = released.clone();
        async move {
            if seen.target == "/slow" {
                released.notified().await;
            }
            whole(StatusCode::OK, "")
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    client.get("/warm").await;
    let slow = client.send(get("/slow"));
    let mut slow = Box::pin(slow);
    assert!(tokio::time::timeout(Duration::ZERO, slow.as_mut()).await.is_err());
    drop(slow);
    for _ in 0..100 {
        assert_eq!(client.get("/fast").await.status, StatusCode::OK);
    }
    assert_eq!(upstream.connections(), 1);
    release.notify_one();
}

#[tokio::test]
async fn an_api_server_that_is_down_is_503_with_retry_after() {
    let pki = Pki::new();
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let proxy = Proxy::start(&pki, closed, &[]);
    for version in BOTH {
        let answer = Client::connect(&pki, proxy.address, version).await.get("/api/v1/pods").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers.contains_key("retry-after"));
        let status: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((&status["kind"], &status["reason"]), (&"Status".into(), &"ServiceUnavailable".into()));
        assert_eq!(status["code"], 503);
    }
    assert!(proxy.metric(r#"ctrlmesh_proxy_upstream_errors_total{reason="connect"}"#).await >= 2.0);
}

#[tokio::test]
async fn an_api_server_with_a_foreign_certificate_is_never_asked() {
    let pki = Pki::new();
    let stranger = Pki::new();
    let upstream = echo(&stranger).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let answer = Client::connect(&pki, proxy.address, Version::HTTP_2).await.get("/api").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(upstream.seen.lock().unwrap().is_empty());
    assert!(proxy.metric(r#"ctrlmesh_proxy_upstream_errors_total{reason="tls"}"#).await >= 1.0);
}

#[tokio::test]
async fn a_replaced_upstream_ca_is_believed_without_a_restart() {
    let pki = Pki::new();
    let next = Pki::new();
    let upstream = echo(&next).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    fs::copy(next.path("real.crt"), pki.path("real.crt")).unwrap();
    until("the new CA to be believed", || async {
        let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
        client.get("/api").await.status == StatusCode::CREATED
    })
    .await;
}

#[tokio::test]
async fn an_api_server_without_http2_is_spoken_to_in_http1() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["http/1.1"]), |_| async { whole(StatusCode::CREATED, "") }).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let first = Client::connect(&pki, proxy.address, Version::HTTP_2).await.get("/api").await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
    let stream = tls(&pki, proxy.address, "http/1.1").await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let second = Client::connect(&pki, proxy.address, Version::HTTP_11).await.get("/api").await;
    assert_eq!(second.status, StatusCode::CREATED);
}

#[tokio::test]
async fn a_replaced_certificate_is_for_new_connections() {
    let pki = Pki::new();
    let upstream = echo(&pki).await;
    // The proxy presents a certificate signed by the mesh CA, from files.
    let (certificate, key) = (pki.path("own.crt"), pki.path("own.key"));
    pki.issue(&certificate, &key);
    let proxy = Proxy::with_files(&pki, upstream.address, &certificate, &key);
    let mut clients = Vec::new();
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        client.get("/api").await;
        clients.push(client);
    }
    let presented = || async {
        let stream = tls(&pki, proxy.address, "h2").await;
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    let before = presented().await;
    pki.issue(&certificate, &key);
    until("another certificate", || async { presented().await != before }).await;
    for client in &mut clients {
        assert_eq!(client.get("/api").await.status, StatusCode::CREATED);
        assert!(!client.is_closed());
    }
    // A key that does not fit the certificate changes nothing.
    let now = presented().await;
    fs::write(&key, "no key").unwrap();
    until("the refusal", || async { proxy.log().contains("serving certificate kept") }).await;
    assert_eq!(presented().await, now);
}

#[tokio::test]
async fn a_mute_api_server_is_503_within_the_connect_deadline() {
    let pki = Pki::new();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let deadline = ["--connect-timeout", "200ms", "--response-timeout", "1h"];
    let proxy = Proxy::start(&pki, silent.local_addr().unwrap(), &deadline);
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        for target in ["/api/v1/pods", "/api/v1/pods?watch=1"] {
            let answer = client.get(target).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{version:?}");
            assert!(answer.headers.contains_key("retry-after"));
        }
    }
}

#[tokio::test]
async fn concurrent_requests_share_one_connection_attempt() {
    let pki = Pki::new();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let deadline = ["--connect-timeout", "2s", "--response-timeout", "1h"];
    let proxy = Proxy::start(&pki, silent.local_addr().unwrap(), &deadline);
    let accepted = Arc::<std::sync::atomic::AtomicUsize>::default();
    let count = accepted.clone();
    let accepting = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = silent.accept().await {
            count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            held.push(stream);
        }
    });
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let together = (0..8).map(|_| send.send_request(asked("/api"), true).unwrap().0);
    let together: Vec<_> = together.collect();
    for answer in together {
        let answer = soon("an answer", answer).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
    assert_eq!(accepted.load(std::sync::atomic::Ordering::SeqCst), 1);
    // A later request tries again.
    let later = send.send_request(asked("/api"), true).unwrap().0;
    soon("an answer", later).await.unwrap();
    assert_eq!(accepted.load(std::sync::atomic::Ordering::SeqCst), 2);
    accepting.abort();
}

#[tokio::test]
async fn an_http2_client_falls_back_to_http1_with_the_api_server() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["http/1.1"]), |_| async { whole(StatusCode::OK, "") }).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut first = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    // Offered HTTP/2 too, before anything was known.
    let mut second = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    for client in [&mut first, &mut second] {
        assert_eq!(client.get("/api").await.status, StatusCode::SERVICE_UNAVAILABLE);
        until("the connection to be given up", || async { client.is_closed() }).await;
    }
}

/// Reads until the head of a request has come, and its body if it has one.
async fn request(stream: &mut (impl tokio::io::AsyncRead + Unpin)) {
    let mut said = Vec::new();
    while !said.ends_with(b"\r\n\r\n") && !said.ends_with(b"body") {
        said.push(stream.read_u8().await.unwrap());
        if said.ends_with(b"\r\n\r\n") && said.starts_with(b"POST") {
            said.push(b' ');
        }
    }
}

#[tokio::test]
async fn an_unsafe_request_that_broke_off_is_not_retried() {
    let pki = Pki::new();
    let http1 = Upstream::bytes(pki.server(&["http/1.1"]), |mut stream| async move {
        request(&mut stream).await;
    })
    .await;
    // Once it has a request's head, it breaks the protocol.
    let http2 = Upstream::bytes(pki.server(&["h2"]), |mut stream| async move {
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        stream.read_exact(&mut [0; 24]).await.unwrap();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
            if head[3] == 1 {
                break;
            }
        }
        stream.write_all(&[0, 0, 1, 0, 0, 0, 0, 0, 0, b'x']).await.unwrap();
        let _end = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    for (upstream, version) in [(http1, Version::HTTP_11), (http2, Version::HTTP_2)] {
        let proxy = Proxy::start(&pki, upstream.address, &[]);
        for (method, status) in [("POST", 502), ("DELETE", 502), ("GET", 503)] {
            let body = if method == "POST" { "body" } else { "" };
            let request = Request::builder().method(method).uri("/api/v1/namespaces/x/pods");
            let request = request.body(http_body_util::Full::from(body)).unwrap();
            let mut client = Client::connect(&pki, proxy.address, version).await;
            let answer = client.ask(request).await;
            assert_eq!(answer.status.as_u16(), status, "{version:?} {method}");
            let again = answer.headers.contains_key("retry-after");
            assert_eq!(again, status == 503, "{version:?} {method}");
        }
    }
}
