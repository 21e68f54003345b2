//! Operators: clients that trust the mesh CA and speak HTTP/1.1, HTTP/2 or plain bytes.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::pki::Pki;
use super::soon;

/// A connection of an operator.
pub(crate) struct Client {
    send: Send,
    #[expect(dead_code, reason = "held: the connection's task ends with it")]
    tasks: JoinSet<()>,
}

enum Send {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// A response that was read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Answer {
    /// Whether it is a watch that ends at once, so that the client lists again.
    pub(crate) fn is_expired_watch(&self) -> bool {
        let event: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let said = [&event["type"], &event["object"]["kind"], &event["object"]["reason"]];
        self.status == StatusCode::OK && said == ["ERROR", "Status", "Expired"] && event["object"]["code"] == 410
    }
}

impl Client {
    pub(crate) async fn connect(pki: &Pki, address: SocketAddr, version: Version) -> Self {
        let mut tasks = JoinSet::new();
        let send = if version == Version::HTTP_2 {
            let stream = TokioIo::new(tls(pki, address, "h2").await);
            let (send, connection) = Box::pin(http2::handshake(TokioExecutor::new(), stream)).await.unwrap();
            tasks.spawn(async move { drop(connection.await) });
            Send::Http2(send)
        } else {
            let stream = TokioIo::new(tls(pki, address, "http/1.1").await);
            let (send, connection) = http1::handshake(stream).await.unwrap();
            tasks.spawn(async move { drop(connection.with_upgrades().await) });
            Send::Http1(send)
        };
        Self { send, tasks }
    }

    /// The head of the response; its body is still to come.
    pub(crate) async fn send(&mut self, mut request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        match &mut self.send {
            Send::Http1(send) => {
                if !request.headers().contains_key("host") {
                    request.headers_mut().insert("host", "kubernetes".parse().unwrap());
                }
                soon("a connection", send.ready()).await?;
                soon("a response", send.send_request(request)).await
            }
            Send::Http2(send) => send_http2(send, request).await,
        }
    }

    /// The response to a request that is sent beside others over the same HTTP/2 connection.
    pub(crate) fn ask_beside(&self, request: Request<Full<Bytes>>) -> impl Future<Output = Answer> + use<> {
        let Send::Http2(send) = &self.send else { panic!("HTTP/1.1 answers one request after the other") };
        let mut send = send.clone();
        async move { read(send_http2(&mut send, request).await.unwrap()).await }
    }

    pub(crate) async fn ask(&mut self, request: Request<Full<Bytes>>) -> Answer {
        read(self.send(request).await.unwrap()).await
    }

    pub(crate) async fn get(&mut self, target: &str) -> Answer {
        self.ask(get(target)).await
    }

    /// Whether the connection takes no more requests.
    pub(crate) fn is_closed(&self) -> bool {
        match &self.send {
            Send::Http1(send) => send.is_closed(),
            Send::Http2(send) => send.is_closed(),
        }
    }
}

async fn send_http2(
    send: &mut http2::SendRequest<Full<Bytes>>,
    mut request: Request<Full<Bytes>>,
) -> hyper::Result<Response<Incoming>> {
    let target = request.uri().path_and_query().unwrap().as_str();
    *request.uri_mut() = format!("https://kubernetes{target}").parse().unwrap();
    soon("a connection", send.ready()).await?;
    soon("a response", send.send_request(request)).await
}

/// A GET request.
pub(crate) fn get(target: &str) -> Request<Full<Bytes>> {
    Request::get(target).body(Full::default()).unwrap()
}

/// Reads a response to its end.
pub(crate) async fn read(response: Response<Incoming>) -> Answer {
    let (head, body) = response.into_parts();
    let body = soon("the end of a body", body.collect()).await.unwrap();
    let trailers = body.trailers().cloned();
    Answer { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
}

/// A TLS connection to the proxy.
pub(crate) async fn tls(pki: &Pki, address: SocketAddr, protocol: &str) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("kubernetes.default.svc").unwrap();
    let connect = TlsConnector::from(pki.client(&[protocol])).connect(name, stream);
    soon("a TLS handshake", connect).await.unwrap()
}

/// Sends bytes over TLS and returns all that comes back until the other side closes.
pub(crate) async fn exchange_bytes(pki: &Pki, address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = tls(pki, address, "http/1.1").await;
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let _unclean = soon("the connection's end", stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Status and body of a page without TLS.
pub(crate) async fn plain_get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    soon("a page", stream.read_to_string(&mut answer)).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
