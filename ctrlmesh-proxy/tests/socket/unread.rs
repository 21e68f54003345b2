//! Memory limits for clients that send requests and do not read the responses.

use crate::harness::client::{Client, tls};
use crate::harness::frames::{CONTINUATION, HEADERS, PREFACE, SETTINGS, frame};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::harness::upstream::{Upstream, whole};
use bytes::Bytes;
use http::{Request, StatusCode, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Half of it may wait.
const MEMORY: &str = "64Mi";
const MAY_WAIT: f64 = 32.0 * 1024.0 * 1024.0;

/// Four times what may wait, were each to wait as large as it can.
const REQUESTS: usize = 90;

const REFUSED: &str = r#"ctrlmesh_proxy_client_errors_total{reason="unread"}"#;
const WAITS: &str = "ctrlmesh_proxy_unread_bytes";

struct Bed {
    // Dropped before the folder, in which it writes.
    proxy: Proxy,
    pki: Pki,
    _upstream: Upstream,
}

/// An API server with a large list and a small object, and a proxy with little memory.
async fn bed() -> Bed {
    bed_with(MEMORY, &[]).await
}

/// Does the same with so much memory, and more arguments for the proxy.
async fn bed_with(memory: &str, more: &[&str]) -> Bed {
    let pki = Pki::new();
    let list = Bytes::from(vec![b' '; 16 << 20]);
    let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), move |request| {
        let list = list.clone();
        async move {
            match &*request.target {
                "/list" => whole(StatusCode::OK, list),
                _ => whole(StatusCode::OK, "fine"),
            }
        }
    })
    .await;
    let told = [&["--memory-limit", memory], more].concat();
    let proxy = Proxy::start(&pki, upstream.address, &told);
    Bed { proxy, pki, _upstream: upstream }
}

impl Bed {
    /// A small request is answered, and the unread bytes are within the budget.
    async fn assert_bounded(&self, before: u64) {
        until("a refusal", || async { self.proxy.metric(REFUSED).await >= 1.0 }).await;
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let mut client = Client::connect(&self.pki, self.proxy.address, version).await;
            assert_eq!(client.get("/api").await.body, "fine");
        }
        let waits = self.proxy.metric(WAITS).await;
        assert!(waits > MAY_WAIT / 4.0 && waits <= MAY_WAIT, "{waits}");
        let grown = self.proxy.resident_bytes().saturating_sub(before);
        assert!(grown < 64 << 20, "the proxy grew by {grown} bytes");
    }

    /// Asks for the large list over so many connections, and reads nothing.
    async fn ask_for_lists(&self, count: usize) -> Vec<impl Sized + use<>> {
        let mut held = Vec::new();
        for _ in 0..count {
            let mut stream = tls(&self.pki, self.proxy.address, "http/1.1").await;
            stream.write_all(b"GET /list HTTP/1.1\r\nHost: k\r\n\r\n").await.unwrap();
            held.push(stream);
        }
        held
    }

    async fn assert_nothing_waits(&self) {
        until("nothing waits", || async { self.proxy.metric(WAITS).await == 0.0 }).await;
    }
}

#[tokio::test]
async fn lists_that_nobody_reads_are_given_up_over_http1() {
    let bed = bed().await;
    let before = bed.proxy.resident_bytes();
    let held = bed.ask_for_lists(REQUESTS).await;
    bed.assert_bounded(before).await;
    drop(held);
    bed.assert_nothing_waits().await;
}

/// With the default, as a proxy runs on a node. Of less, the allocator would give most back by itself.
#[tokio::test]
async fn what_waited_goes_back_to_the_system() {
    let bed = bed_with("512Mi", &[]).await;
    let before = bed.proxy.resident_bytes();
    let held = bed.ask_for_lists(8 * REQUESTS).await;
    until("a refusal", || async { bed.proxy.metric(REFUSED).await >= 1.0 }).await;
    assert!(bed.proxy.resident_bytes() > 4 * before, "too little waits for this test");
    drop(held);
    bed.assert_nothing_waits().await;
    until("the memory to be given back", || async { bed.proxy.resident_bytes() < 2 * before }).await;
}

/// Two kinds of clients: one whose window is full, and one that does not even read its socket.
#[tokio::test]
async fn lists_that_nobody_reads_are_given_up_over_http2() {
    for (window, reads) in [(64 << 10, true), (4 << 20, false)] {
        let bed = bed().await;
        let before = bed.proxy.resident_bytes();
        let stream = tls(&bed.pki, bed.proxy.address, "h2").await;
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window).initial_connection_window_size(1 << 30);
        let (mut send, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
        let mut connection = Box::pin(connection);
        let mut responses = Vec::new();
        for _ in 0..REQUESTS {
            let request = Request::get("https://kubernetes/list").body(()).unwrap();
            responses.push(send.send_request(request, true).unwrap().0);
        }
        // The requests leave.
        let asked = || async { bed.proxy.metric("ctrlmesh_proxy_streams").await > 0.0 };
        tokio::select! {
            _ended = &mut connection => panic!("the connection ended"),
            () = until("requests", asked) => {}
        }
        if reads {
            tokio::select! {
                _ended = &mut connection => panic!("the connection ended"),
                () = bed.assert_bounded(before) => {}
            }
        } else {
            bed.assert_bounded(before).await;
        }
        drop((send, responses, connection));
        bed.assert_nothing_waits().await;
    }
}

#[tokio::test]
async fn heads_that_do_not_end_are_given_up() {
    for protocol in ["h2", "http/1.1"] {
        let bed = bed_with(MEMORY, &["--header-timeout", "10m"]).await;
        let mut held = Vec::new();
        for _ in 0..REQUESTS {
            let mut stream = tls(&bed.pki, bed.proxy.address, protocol).await;
            // The client sees its connection end.
            let _closed = stream.write_all(&unended(protocol)).await;
            held.push(stream);
        }
        until("a refusal", || async { bed.proxy.metric(REFUSED).await >= 1.0 }).await;
        let waits = bed.proxy.metric(WAITS).await;
        assert!(waits > MAY_WAIT / 2.0 && waits <= MAY_WAIT, "{protocol}: {waits}");
        drop(held);
        bed.assert_nothing_waits().await;
    }
}

/// Most of the longest head that is taken.
fn unended(protocol: &str) -> Vec<u8> {
    const BYTES: usize = 900 << 10;
    if protocol != "h2" {
        return format!("GET /api HTTP/1.1\r\nHost: k\r\nX-Long: {}", "x".repeat(BYTES)).into();
    }
    let mut bytes = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    // A header whose value goes on and on.
    bytes.extend(frame(HEADERS, 0, 1, b"\x00\x01x\x7f\x80\x80\x40"));
    for _ in 0..BYTES / (16 << 10) {
        bytes.extend(frame(CONTINUATION, 0, 1, &[b'x'; 16 << 10]));
    }
    bytes
}

#[tokio::test]
async fn an_upload_that_is_not_taken_ends_with_its_client() {
    let pki = Pki::new();
    // An API server that answers without reading the body.
    let upstream = Upstream::bytes(pki.server(&["h2"]), |stream| async move {
        let mut builder = h2::server::Builder::new();
        builder.initial_window_size(64 << 10);
        let mut connection = builder.handshake::<_, Bytes>(stream).await.unwrap();
        let mut open = Vec::new();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let body = respond.send_response(http::Response::new(()), false).unwrap();
            open.push((request, body));
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &["--memory-limit", MEMORY]);
    let stream = tls(&pki, proxy.address, "h2").await;
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    let driver = tokio::spawn(connection);
    let mut send = send.ready().await.unwrap();
    let request = Request::get("https://kubernetes/api/v1/pods?watch=1").body(()).unwrap();
    let (_response, mut body) = send.send_request(request, false).unwrap();
    body.send_data(Bytes::from(vec![0; 4 << 20]), false).unwrap();
    until("the upload to wait", || async { proxy.metric(WAITS).await > 0.0 }).await;
    driver.abort();
    until("nothing waits", || async { proxy.metric(WAITS).await == 0.0 }).await;
    let upstream = "ctrlmesh_proxy_upstream_connections";
    until("no connection", || async { proxy.metric(upstream).await == 0.0 }).await;
}

#[tokio::test]
async fn a_body_that_goes_on_behind_its_answer_is_no_head() {
    let pki = Pki::new();
    // An API server that answers at once, and then reads the body to its end.
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), |mut stream| async move {
        let mut all = vec![0; 64 << 10];
        let read = stream.read(&mut all).await.unwrap();
        assert!(all[..read].starts_with(b"POST"));
        let answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n";
        stream.write_all(answer).await.unwrap();
        let mut left = BODY - (read - head(&all[..read]));
        while left > 0 {
            left -= stream.read(&mut all).await.unwrap();
        }
        stream.write_all(b"5\r\nended\r\n0\r\n\r\n").await.unwrap();
        stream.flush().await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &["--memory-limit", MEMORY]);
    let (mut read, mut write) = tokio::io::split(tls(&pki, proxy.address, "http/1.1").await);
    let request = format!("POST /api HTTP/1.1\r\nHost: k\r\nContent-Length: {BODY}\r\n\r\n");
    write.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"begun\r\n") {
        answer.push(read.read_u8().await.unwrap());
    }
    write.write_all(&vec![b'x'; BODY]).await.unwrap();
    write.flush().await.unwrap();
    while !answer.ends_with(b"ended\r\n") {
        answer.push(read.read_u8().await.unwrap());
    }
    assert!(proxy.metric(REFUSED).await < 1.0);
}

/// More than may wait.
const BODY: usize = 64 << 20;

/// Where the body begins.
fn head(bytes: &[u8]) -> usize {
    bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4
}
