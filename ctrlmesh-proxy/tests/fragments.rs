//! A `#` in a target cuts nothing off: the request is refused, and what it would have become is not sent.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::large_futures, reason = "one per test, and never moved")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

mod harness;

use std::collections::BTreeMap;

use harness::client::{exchange_bytes, tls};
use harness::frames::{HEADERS, PREFACE, SETTINGS, frame};
use harness::pki::Pki;
use harness::proxy::Proxy;
use harness::soon;
use harness::upstream::{Upstream, whole};
use http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const GOAWAY: u8 = 7;
const END_STREAM_AND_HEADERS: u8 = 5;

/// `:method: GET`, `:scheme: https`, `:authority: k`.
const REST: &[u8] = b"\x82\x87\x41\x01k";
/// `:path: /api/v1/namespaces/a#b` as it is, and in Huffman's code.
const PLAIN: &[u8] = b"\x44\x16/api/v1/namespaces/a#b";
const ENCODED: &[u8] = b"\x44\x90\x60\x75\x99\x8e\xe1\x62\xa1\xd2\x54\x56\x32\x15\x0c\x0f\xfe\xa3";
/// The same from the dynamic table, and a path that holds nothing.
const AGAIN: &[u8] = b"\xbe";
const GOOD: &[u8] = b"\x44\x04/api";
/// `:status: 200` and `400`.
const OK: u8 = 0x88;
const BAD: u8 = 0x8c;

async fn bed() -> (Pki, Upstream, Proxy) {
    let pki = Pki::new();
    let protocols = ["h2", "http/1.1"];
    let upstream =
        Upstream::http(pki.server(&protocols), |_| async { whole(StatusCode::OK, "") }).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    (pki, upstream, proxy)
}

fn targets(upstream: &Upstream) -> Vec<String> {
    upstream.seen.lock().unwrap().iter().map(|seen| seen.target.clone()).collect()
}

#[tokio::test]
async fn over_http1_it_is_refused_wherever_the_request_stands() {
    let (pki, upstream, proxy) = bed().await;
    for bad in [
        "/api/v1/namespaces/a#b/pods/x",
        "/api/v1/namespaces/a?x=y#z",
        "https://k/api/v1/namespaces/a#b",
    ] {
        let body = r#"{"a":"GET /x/api#x HTTP/1.1 "}"#;
        let text = format!(
            "POST /api HTTP/1.1\r\nHost: k\r\nX-Note: a #1\r\nContent-Length: {}\r\n\r\n{body}\
             DELETE {bad} HTTP/1.1\r\nHost: k\r\n\r\n\
             GET /apis HTTP/1.1\r\nHost: k\r\nConnection: close\r\n\r\n",
            body.len()
        );
        upstream.seen.lock().unwrap().clear();
        let answer = exchange_bytes(&pki, proxy.address, text.as_bytes()).await;
        let heads = answer.matches("HTTP/1.1 200 ").count();
        assert_eq!((heads, answer.matches("HTTP/1.1 400 ").count()), (2, 1), "{bad}: {answer}");
        assert_eq!(targets(&upstream), ["/api", "/apis"], "{bad}");
    }
}

/// The lines of a log may look like requests.
#[tokio::test]
async fn over_http1_what_looks_so_in_bodies_refuses_nobody_else() {
    let (pki, upstream, proxy) = bed().await;
    let post = |lines: usize| {
        let body = "GET /x/api#x HTTP/1.1 200\n".repeat(lines);
        format!("POST /api HTTP/1.1\r\nHost: k\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let heads = |answer: &str| {
        let heads = answer.split("HTTP/1.1 ").skip(1);
        heads.map(|head| head[..3].to_owned()).collect::<Vec<_>>()
    };
    // So many are remembered.
    let end = "GET /apis HTTP/1.1\r\nHost: k\r\nConnection: close\r\n\r\n";
    let text = format!("{}{}{end}", post(100), post(100));
    let answer = exchange_bytes(&pki, proxy.address, text.as_bytes()).await;
    assert_eq!(heads(&answer), ["200", "200", "200"], "{answer}");
    // After more the client is sent to another connection, and what comes by this one all the same is not passed.
    for more in ["", end, "DELETE /api/v1/namespaces/a#b HTTP/1.1\r\nHost: k\r\n\r\n"] {
        upstream.seen.lock().unwrap().clear();
        let text = format!("{}{more}", post(3000));
        let answer = exchange_bytes(&pki, proxy.address, text.as_bytes()).await;
        assert_eq!(heads(&answer), ["200"], "{answer}");
        assert!(answer.to_lowercase().contains("\r\nconnection: close\r\n"), "{answer}");
        assert_eq!(targets(&upstream), ["/api"], "{more}");
    }
}

#[tokio::test]
async fn over_http2_it_is_refused_however_it_is_written() {
    let (pki, upstream, proxy) = bed().await;
    for bad in [PLAIN, ENCODED] {
        upstream.seen.lock().unwrap().clear();
        let mut stream = tls(&pki, proxy.address, "h2").await;
        let mut sent = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
        for (number, path) in [(1, bad), (3, AGAIN), (5, GOOD)] {
            let block = [REST, path].concat();
            sent.extend(frame(HEADERS, END_STREAM_AND_HEADERS, number, &block));
        }
        // The authority is put into the table before the path, once.
        let mut first = true;
        for at in 0..sent.len() {
            if sent[at..].starts_with(REST) && !std::mem::take(&mut first) {
                // An authority that is not put into it.
                sent[at + 2] = 0x01;
            }
        }
        stream.write_all(&sent).await.unwrap();
        let mut answers = BTreeMap::new();
        let mut goes_away = false;
        while answers.len() < 3 || !goes_away {
            let mut head = [0; 9];
            soon("a frame", stream.read_exact(&mut head)).await.unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            soon("its payload", stream.read_exact(&mut payload)).await.unwrap();
            goes_away |= head[3] == GOAWAY;
            if head[3] == HEADERS {
                answers.insert(head[8], payload[0]);
            }
        }
        assert_eq!(answers, BTreeMap::from([(1, BAD), (3, BAD), (5, OK)]));
        assert_eq!(targets(&upstream), ["/api"]);
    }
}
