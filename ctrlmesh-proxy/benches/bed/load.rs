//! The clients: what they ask, and what they measure.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use nix::time::{ClockId, clock_gettime};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::pki::Pki;

/// One connection.
pub(crate) enum Client {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}

impl Client {
    pub(crate) async fn connect(pki: &Pki, address: SocketAddr, version: Version) -> Self {
        let protocol = if version == Version::HTTP_2 { "h2" } else { "http/1.1" };
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(pki.client_of_both(&[protocol])).connect(name, stream).await.unwrap();
        if version == Version::HTTP_2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.initial_stream_window_size(4 << 20).initial_connection_window_size(64 << 20);
            let (send, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            Client::Http2(send)
        } else {
            let (send, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            Client::Http1(send)
        }
    }

    pub(crate) async fn get(&mut self, path: &str) -> Incoming {
        let request =
            |uri: &str| Request::get(uri).header("authorization", "Bearer x").header("accept", "application/json");
        let response = match self {
            Client::Http1(send) => {
                send.ready().await.unwrap();
                let request = request(path).header("host", "localhost").body(Empty::new()).unwrap();
                send.send_request(request).await.unwrap()
            }
            Client::Http2(send) => {
                let request = request(&format!("https://localhost{path}")).body(Empty::new()).unwrap();
                send.send_request(request).await.unwrap()
            }
        };
        assert_eq!(response.status(), 200);
        response.into_body()
    }

    /// Another way to the same connection, where it carries many requests; else a new one.
    pub(crate) async fn another(&self, pki: &Pki, address: SocketAddr) -> Self {
        match self {
            Client::Http1(_) => Self::connect(pki, address, Version::HTTP_11).await,
            Client::Http2(send) => Client::Http2(send.clone()),
        }
    }
}

/// Sends `count` requests from each of `at_once` clients; returns how long each took, in microseconds.
pub(crate) async fn requests(
    pki: &Pki,
    address: SocketAddr,
    version: Version,
    path: &'static str,
    at_once: usize,
    count: usize,
) -> Vec<f64> {
    let first = Client::connect(pki, address, version).await;
    let mut clients = JoinSet::new();
    for _ in 0..at_once {
        let mut client = first.another(pki, address).await;
        clients.spawn(async move {
            let mut took = Vec::with_capacity(count);
            for _ in 0..count {
                let begun = Instant::now();
                drain(client.get(path).await).await;
                took.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            took
        });
    }
    clients.join_all().await.concat()
}

/// Reads a body to its end and returns its length.
pub(crate) async fn drain(mut body: Incoming) -> usize {
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame.unwrap().data_ref().map_or(0, Bytes::len);
    }
    length
}

/// Reads `count` events and returns how late each was, in microseconds.
pub(crate) async fn events(mut body: Incoming, count: usize) -> Vec<f64> {
    let mut late = Vec::with_capacity(count);
    let mut text = Vec::new();
    while late.len() < count {
        let frame = body.frame().await.unwrap().unwrap();
        let now = now_nanoseconds();
        text.extend_from_slice(frame.data_ref().unwrap());
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let sent = std::str::from_utf8(&line[line.len() - 23..line.len() - 3]).unwrap().parse::<u64>().unwrap();
            late.push(Duration::from_nanos(now.saturating_sub(sent)).as_secs_f64() * 1e6);
        }
    }
    late
}

/// The machine's clock, which all processes share.
pub(crate) fn now_nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
    u64::try_from(now.tv_sec()).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec()).unwrap()
}

/// The value below which `share` of the values lie.
pub(crate) fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index"
    )]
    let at = ((values.len() - 1) as f64 * share) as usize;
    values[at]
}
