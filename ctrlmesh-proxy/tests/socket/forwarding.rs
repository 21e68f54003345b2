//! Requests and responses that pass untouched between an operator and a scripted API server.

use std::sync::Arc;

use crate::harness::client::{Client, exchange_bytes, get, tls};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::soon;
use crate::harness::upstream::{Upstream, streamed, whole};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];
const PROTOCOLS: &[&str] = &["h2", "http/1.1"];

async fn echo(pki: &Pki) -> Upstream {
    Upstream::http(pki.server(PROTOCOLS), |seen| async move {
        let mut response = whole(StatusCode::CREATED, seen.body);
        response.headers_mut().insert("x-from", HeaderValue::from_static("upstream"));
        response
    })
    .await
}

#[tokio::test]
async fn a_request_arrives_as_it_was_sent() {
    let pki = Pki::new();
    let upstream = echo(&pki).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    for version in BOTH {
        let target = "/apis/x.io/v1/namespaces/a%2Fb/things/n%20m?x=%zz&x=2&&=&labelSelector=a%3Db";
        let mut request = Request::new(Full::new(Bytes::from_static(b"\x00\xffbody")));
        *request.method_mut() = Method::PATCH;
        *request.uri_mut() = target.parse().unwrap();
        let headers: HeaderMap = [
            ("authorization", "Bearer secret"),
            ("accept", "application/vnd.kubernetes.protobuf"),
            ("accept-encoding", "gzip"),
            ("content-type", "application/strategic-merge-patch+json"),
            ("impersonate-extra-scopes", "one"),
            ("user-agent", "operator/1"),
        ]
        .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
        .into_iter()
        .collect();
        *request.headers_mut() = headers.clone();
        request.headers_mut().append("impersonate-extra-scopes", HeaderValue::from_static("two"));

        let answer = Client::connect(&pki, proxy.address, version).await.ask(request.clone()).await;

        assert_eq!((answer.status, &answer.body[..]), (StatusCode::CREATED, &b"\x00\xffbody"[..]));
        assert_eq!(answer.headers["x-from"], "upstream");
        let seen = upstream.last();
        assert_eq!((seen.method, seen.target.as_str()), (Method::PATCH, target));
        let mut expected = request.headers().clone();
        if version == Version::HTTP_11 {
            expected.insert("host", HeaderValue::from_static("kubernetes"));
        }
        expected.insert("content-length", HeaderValue::from_static("6"));
        let mut arrived = seen.headers;
        if version == Version::HTTP_2 {
            arrived.remove("host");
        }
        assert_eq!(arrived, expected, "{version:?}");
    }
}

#[tokio::test]
async fn a_response_arrives_as_it_was_sent_with_nothing_added() {
    let pki = Pki::new();
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), |mut stream| async move {
        let mut request = [0; 4096];
        let _read = stream.read(&mut request).await.unwrap();
        let answer = "HTTP/1.1 200 OK\r\nAudit-Id: 7\r\nContent-Length: 2\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\
                      Warning: 299 - \"a\"\r\nWarning: 299 - \"b\"\r\n\r\nok";
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let answer =
        exchange_bytes(&pki, proxy.address, b"GET /api HTTP/1.1\r\nHost: k\r\nConnection: close\r\n\r\n").await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut lines: Vec<&str> = head.lines().collect();
    lines[1..].sort_unstable();
    let expected = [
        "HTTP/1.1 200 OK",
        "Audit-Id: 7",
        "Connection: close",
        "Content-Length: 2",
        "Warning: 299 - \"a\"",
        "Warning: 299 - \"b\"",
    ];
    assert_eq!((lines.as_slice(), body), (&expected[..], "ok"));
}

#[tokio::test]
async fn hop_by_hop_headers_stay_behind() {
    let pki = Pki::new();
    let upstream = echo(&pki).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut request = get("/api");
    for (name, value) in
        [("connection", "x-hop"), ("x-hop", "1"), ("keep-alive", "1"), ("proxy-connection", "1"), ("te", "gzip")]
    {
        request.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Client::connect(&pki, proxy.address, Version::HTTP_11).await.ask(request).await;
    let expected: HeaderMap = [("host".parse().unwrap(), HeaderValue::from_static("kubernetes"))].into_iter().collect();
    assert_eq!(upstream.last().headers, expected);
}

#[tokio::test]
async fn head_has_a_length_and_no_body() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(PROTOCOLS), |_| async {
        let mut response = whole(StatusCode::OK, "");
        response.headers_mut().insert("content-length", HeaderValue::from_static("5"));
        response
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    for version in BOTH {
        let request = Request::head("/healthz").body(Full::default()).unwrap();
        let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
        assert_eq!((&answer.headers["content-length"], answer.body.len()), (&HeaderValue::from_static("5"), 0));
    }
}

#[tokio::test]
async fn trailers_pass() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(PROTOCOLS), |_| async {
        let (mut send, mut response) = streamed();
        response.headers_mut().insert("trailer", HeaderValue::from_static("x-sum"));
        tokio::spawn(async move {
            send.send_data(Bytes::from_static(b"body")).await.unwrap();
            let trailers = [("x-sum".parse().unwrap(), HeaderValue::from_static("4"))].into_iter().collect();
            send.send_trailers(trailers).await.unwrap();
        });
        response
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    for version in BOTH {
        let mut request = get("/api");
        request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
        assert_eq!(answer.body, "body");
        assert_eq!(answer.trailers.unwrap()["x-sum"], "4", "{version:?}");
    }
}

#[tokio::test]
async fn each_piece_of_a_stream_arrives_before_the_next_is_sent() {
    let pki = Pki::new();
    let go_on = Arc::<Notify>::default();
    let next = go_on.clone();
    let upstream = Upstream::http(pki.server(PROTOCOLS), move |_| {
        let next = next.clone();
        async move {
            let (mut send, response) = streamed();
            tokio::spawn(async move {
                for piece in ["one\n", "two\n", "three\n"] {
                    next.notified().await;
                    send.send_data(Bytes::from_static(piece.as_bytes())).await.unwrap();
                }
            });
            response
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        let mut body = client.send(get("/api/v1/pods?watch=1")).await.unwrap().into_body();
        for piece in ["one\n", "two\n", "three\n"] {
            go_on.notify_one();
            let frame = soon("a piece", body.frame()).await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), piece);
        }
        let rest = soon("the end", body.collect()).await.unwrap();
        assert!(rest.to_bytes().is_empty());
    }
}

#[tokio::test]
async fn over_http1_a_body_waits_for_100_continue() {
    let pki = Pki::new();
    let ask = Arc::<Notify>::default();
    let asked = ask.clone();
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), move |mut stream| {
        let asked = asked.clone();
        async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            asked.notified().await;
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
            let mut body = [0; 4];
            stream.read_exact(&mut body).await.unwrap();
            assert_eq!(&body, b"body");
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
            stream.shutdown().await.unwrap();
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut stream = tls(&pki, proxy.address, "http/1.1").await;
    let head =
        "POST /api HTTP/1.1\r\nHost: k\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    ask.notify_one();
    let mut early = [0; 25];
    soon("100 Continue", stream.read_exact(&mut early)).await.unwrap();
    assert_eq!(&early, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"body").await.unwrap();
    let mut answer = String::new();
    soon("the answer", stream.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
}

#[tokio::test]
async fn a_compressed_body_arrives_compressed() {
    const COMPRESSED: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03not really";
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(PROTOCOLS), |_| async {
        let mut response = whole(StatusCode::OK, COMPRESSED);
        response.headers_mut().insert("content-encoding", HeaderValue::from_static("gzip"));
        response
    })
    .await;
    let policy = pki.path("policy");
    std::fs::write(&policy, "limits: [{selector: team=a}]").unwrap();
    let proxy = Proxy::start(&pki, upstream.address, &["--policy", policy.to_str().unwrap()]);
    for version in BOTH {
        let mut request = get("/api/v1/pods");
        request.headers_mut().insert("accept-encoding", HeaderValue::from_static("gzip"));
        let answer = Client::connect(&pki, proxy.address, version).await.ask(request).await;
        assert_eq!(upstream.last().headers["accept-encoding"], "gzip");
        assert_eq!(upstream.last().target, "/api/v1/pods?labelSelector=team%3Da");
        assert_eq!(
            (&answer.headers["content-encoding"], &answer.body[..]),
            (&HeaderValue::from_static("gzip"), COMPRESSED),
            "{version:?}"
        );
    }
}
