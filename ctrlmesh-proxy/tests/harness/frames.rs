//! An API server that sends the HTTP/2 frames that a test asks for.

use bytes::Bytes;
use http::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::client::tls;
use super::pki::Pki;
use super::proxy::Proxy;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const CONTINUATION: u8 = 9;

/// Of SETTINGS and PING: an answer. Of DATA and HEADERS: the stream's end.
pub(crate) const ACK: u8 = 1;
pub(crate) const END: u8 = 1;
const END_HEADERS: u8 = 4;

/// `:status: 200`, which every peer's table holds.
const OK: &[u8] = &[0x88];

/// The client's connection preface.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A frame as it is written.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// One side of a connection, after the other's preface.
pub(crate) struct Frames(TlsStream<TcpStream>);

pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

impl Frames {
    pub(crate) async fn begin(mut stream: TlsStream<TcpStream>) -> Self {
        stream.read_exact(&mut [0; 24]).await.unwrap();
        Self(stream)
    }

    /// The connection, from where the last frame ended.
    pub(crate) fn into_stream(self) -> TlsStream<TcpStream> {
        self.0
    }

    /// The next frame; `None` once the connection ends.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).await.ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        self.0.read_exact(&mut payload).await.ok()?;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        Some(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    pub(crate) async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        // Fails where the peer is gone.
        let _gone = self.0.write_all(&frame(kind, flags, stream, payload)).await;
        let _gone = self.0.flush().await;
    }

    /// Answers a request; its body is still to come.
    pub(crate) async fn answer(&mut self, stream: u32) {
        self.send(HEADERS, END_HEADERS, stream, OK).await;
    }
}

/// An operator on bare HTTP/2.
#[expect(clippy::disallowed_methods, reason = "tests are not drained")]
pub(crate) async fn operator(pki: &Pki, proxy: &Proxy) -> h2::client::SendRequest<Bytes> {
    let stream = tls(pki, proxy.address, "h2").await;
    let mut builder = h2::client::Builder::new();
    builder.initial_connection_window_size(1 << 30);
    let (send, connection) = builder.handshake(stream).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    send
}

pub(crate) fn asked(path: &str) -> Request<()> {
    Request::get(format!("https://kubernetes{path}")).body(()).unwrap()
}
