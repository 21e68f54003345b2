//! Limits on clients, while other clients are served.

use crate::harness::client::{Client, get, tls};
use crate::harness::frames::{CONTINUATION, HEADERS, PREFACE, SETTINGS, frame};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, whole};
use crate::harness::{soon, until};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

struct Bed {
    // Dropped before the folder, in which it writes.
    proxy: Proxy,
    pki: Pki,
    _upstream: Upstream,
}

async fn bed(arguments: &[&str]) -> Bed {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), |_| async { whole(StatusCode::OK, "fine") }).await;
    let proxy = Proxy::start(&pki, upstream.address, arguments);
    Bed { proxy, pki, _upstream: upstream }
}

impl Bed {
    async fn assert_others_live(&self) {
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let answer = Client::connect(&self.pki, self.proxy.address, version).await.get("/api").await;
            assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"fine"[..]));
        }
    }

    /// A client may see its connection end before that is counted.
    async fn until_client_errors(&self, reason: &str, count: f64) {
        let metric = format!("ctrlmesh_proxy_client_errors_total{{reason=\"{reason}\"}}");
        until(&metric, || async { self.proxy.metric(&metric).await >= count }).await;
    }
}

/// Reads until the other side closes or resets the connection.
async fn closed(stream: &mut (impl tokio::io::AsyncRead + Unpin)) {
    let mut rest = Vec::new();
    let _reset = soon("the connection's end", stream.read_to_end(&mut rest)).await;
}

/// Long enough for a client on a busy machine to send its head.
const HEADERS_IN: [&str; 2] = ["--header-timeout", "5s"];

#[tokio::test]
async fn a_client_that_says_nothing_is_cut_off() {
    let bed = bed(&HEADERS_IN).await;
    let mut silent = TcpStream::connect(bed.proxy.address).await.unwrap();
    closed(&mut silent).await;
    bed.until_client_errors("slow", 1.0).await;
    bed.assert_others_live().await;
}

#[tokio::test]
async fn a_client_that_drips_its_request_is_cut_off() {
    let bed = bed(&HEADERS_IN).await;
    let mut stream = tls(&bed.pki, bed.proxy.address, "http/1.1").await;
    stream.write_all(b"GET /api HTTP/1.1\r\nHost: k\r\nX-").await.unwrap();
    closed(&mut stream).await;
    bed.until_client_errors("slow", 1.0).await;
    bed.assert_others_live().await;
}

#[tokio::test]
async fn heads_as_large_as_the_api_server_takes_pass() {
    let bed = bed(&[]).await;
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let mut request = get("/api");
        for number in 0..60 {
            let name = http::HeaderName::try_from(format!("x-large-{number}")).unwrap();
            request.headers_mut().insert(name, HeaderValue::try_from("x".repeat(8 << 10)).unwrap());
        }
        let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
        assert_eq!(client.ask(request).await.body, "fine", "{version:?}");
    }
}

#[tokio::test]
async fn a_head_without_end_is_refused() {
    let bed = bed(&[]).await;
    let mut stream = tls(&bed.pki, bed.proxy.address, "http/1.1").await;
    stream.write_all(b"GET /api HTTP/1.1\r\nHost: k\r\n").await.unwrap();
    let line = format!("x: {}\r\n", "x".repeat(1021));
    let flood = async {
        loop {
            if stream.write_all(line.as_bytes()).await.is_err() {
                return;
            }
        }
    };
    soon("the refusal", flood).await;
    bed.until_client_errors("protocol", 1.0).await;
    bed.assert_others_live().await;
}

#[tokio::test]
async fn a_continuation_flood_ends_its_connection_only() {
    let bed = bed(&[]).await;
    let mut stream = tls(&bed.pki, bed.proxy.address, "h2").await;
    stream.write_all(PREFACE).await.unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    stream.write_all(&frame(HEADERS, 0, 1, &[])).await.unwrap();
    let more = frame(CONTINUATION, 0, 1, b"\x40\x01x\x01x");
    let flood = async {
        loop {
            if stream.write_all(&more).await.is_err() || stream.flush().await.is_err() {
                return;
            }
        }
    };
    soon("the connection's end", flood).await;
    bed.until_client_errors("protocol", 1.0).await;
    bed.assert_others_live().await;
}

#[tokio::test]
async fn a_settings_flood_ends_only_its_connection() {
    let bed = bed(&[]).await;
    bed.assert_others_live().await;
    let before = bed.proxy.resident_bytes();
    let mut stream = tls(&bed.pki, bed.proxy.address, "h2").await;
    stream.write_all(PREFACE).await.unwrap();
    let flood = frame(SETTINGS, 0, 0, &[]).repeat(1000);
    // The acknowledgements are not read.
    let stopped = async { while stream.write_all(&flood).await.is_ok() {} };
    soon("the flood to be stopped", stopped).await;
    bed.until_client_errors("protocol", 1.0).await;
    bed.assert_others_live().await;
    let grown = bed.proxy.resident_bytes().saturating_sub(before);
    assert!(grown < 16 << 20, "the proxy grew by {grown} bytes");
}

#[tokio::test]
async fn rapid_resets_end_their_connection_only() {
    let bed = bed(&[]).await;
    let stream = tls(&bed.pki, bed.proxy.address, "h2").await;
    let (mut send, connection) = h2::client::handshake(stream).await.unwrap();
    let driver = tokio::spawn(connection);
    let flood = async {
        loop {
            let request = Request::get("https://kubernetes/api/v1/pods?watch=1").body(()).unwrap();
            let Ok(ready) = send.clone().ready().await else {
                return;
            };
            send = ready;
            let Ok((response, mut body)) = send.send_request(request, false) else {
                return;
            };
            body.send_reset(h2::Reason::CANCEL);
            drop(response);
            tokio::task::yield_now().await;
        }
    };
    soon("the connection's end", flood).await;
    drop(send);
    assert!(soon("the connection's end", driver).await.unwrap().is_err());
    bed.until_client_errors("protocol", 1.0).await;
    bed.assert_others_live().await;
}

#[tokio::test]
async fn more_connections_than_allowed_are_refused_until_one_leaves() {
    let bed = bed(&["--max-connections", "2"]).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(&bed.pki, bed.proxy.address, Version::HTTP_2).await;
        client.get("/api").await;
        held.push(client);
    }
    let mut third = TcpStream::connect(bed.proxy.address).await.unwrap();
    closed(&mut third).await;
    bed.until_client_errors("too_many", 1.0).await;
    assert_eq!(held[0].get("/api").await.body, "fine");
    held.pop();
    until("a place", || async { bed.proxy.metric("ctrlmesh_proxy_connections").await < 2.0 }).await;
    let mut client = Client::connect(&bed.pki, bed.proxy.address, Version::HTTP_2).await;
    assert_eq!(client.get("/api").await.body, Bytes::from_static(b"fine"));
}

#[tokio::test]
async fn an_http2_client_without_a_whole_head_is_cut_off() {
    let bed = bed(&HEADERS_IN).await;
    // `GET https://k/api`, whole and without its end.
    let block = b"\x82\x87\x41\x01k\x44\x04/api";
    let whole = frame(HEADERS, 5, 1, block);
    let cut = &frame(HEADERS, 5, 3, block)[..12];
    let unended = frame(HEADERS, 1, 3, block);
    let cases = [vec![], [&whole[..], cut].concat(), [&whole[..], &unended].concat(), unended.clone()];
    let cut_off = async |more: Vec<u8>| {
        let mut stream = tls(&bed.pki, bed.proxy.address, "h2").await;
        stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await.unwrap();
        stream.write_all(&more).await.unwrap();
        closed(&mut stream).await;
    };
    futures::future::join_all(cases.map(cut_off)).await;
    bed.until_client_errors("slow", 4.0).await;
    bed.assert_others_live().await;
}

#[tokio::test]
async fn over_http2_a_host_header_names_the_server() {
    let bed = bed(&[]).await;
    // `GET https:/api`, with `host: k` and without anything.
    for host in [&b"\x00\x04host\x01k"[..], b""] {
        let mut stream = tls(&bed.pki, bed.proxy.address, "h2").await;
        let block = [&b"\x82\x87\x44\x04/api"[..], host].concat();
        let sent = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &frame(HEADERS, 5, 1, &block)].concat();
        stream.write_all(&sent).await.unwrap();
        let status = async {
            loop {
                let mut head = [0; 9];
                stream.read_exact(&mut head).await.unwrap();
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let mut payload = vec![0; length as usize];
                stream.read_exact(&mut payload).await.unwrap();
                if head[3] == HEADERS {
                    return payload[0];
                }
            }
        };
        // `:status: 200`.
        assert_eq!(soon("the answer", status).await, 0x88);
    }
}

#[tokio::test]
async fn a_body_that_is_no_chunks_is_the_clients_fault() {
    let bed = bed(&[]).await;
    let text = "POST /api HTTP/1.1\r\nHost: k\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n";
    let answer = crate::harness::client::exchange_bytes(&bed.pki, bed.proxy.address, text.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(!answer.to_lowercase().contains("retry-after"));
    bed.assert_others_live().await;
}

#[tokio::test]
async fn a_request_that_cannot_be_read_is_refused() {
    let bed = bed(&[]).await;
    let many = "x: y\r\n".repeat(200);
    let long = "x".repeat(70_000);
    for (bytes, code) in [
        ("GET /api HTTP/1.1\r\nno header\r\n\r\n".to_owned(), 400),
        (format!("GET /api HTTP/1.1\r\nHost: k\r\n{many}\r\n"), 431),
        (format!("GET /{long} HTTP/1.1\r\nHost: k\r\n\r\n"), 414),
        // An earlier request on the connection is answered.
        ("GET /api HTTP/1.1\r\nHost: k\r\n\r\nGET /a b HTTP/1.1\r\n\r\n".to_owned(), 400),
    ] {
        let answer = crate::harness::client::exchange_bytes(&bed.pki, bed.proxy.address, bytes.as_bytes()).await;
        let last = &answer[answer.rfind("HTTP/1.1 ").unwrap()..];
        assert!(last.starts_with(&format!("HTTP/1.1 {code} ")), "{answer}");
        assert_eq!(answer.contains("fine"), answer.len() > last.len(), "{answer}");
    }
    bed.until_client_errors("protocol", 4.0).await;
    bed.assert_others_live().await;
}
