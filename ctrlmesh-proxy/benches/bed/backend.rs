//! A server that answers from memory: small objects, large lists, and watches that tick.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::channel::Channel;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::time;
use tokio_rustls::TlsAcceptor;

use super::pki;

/// The size of `/list`: a list of 100 MB, as of 50,000 pods.
pub(crate) const LIST_BYTES: usize = 100 << 20;

/// The size of a small object: a Lease, a `ConfigMap`.
const SMALL_BYTES: usize = 1024;

/// The pieces that a large response comes in.
const PIECE_BYTES: usize = 64 << 10;

/// The time between two events of a watch that ticks.
const TICK: Duration = Duration::from_millis(1);

/// What is watched, and how large an object of it is: a Lease, a Pod.
pub(crate) const WATCHES: [(&str, usize); 2] = [
    ("/api/v1/namespaces/small/pods?watch=true&resourceVersion=1", 256),
    ("/api/v1/namespaces/large/pods?watch=true&resourceVersion=1", 10 << 10),
];

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves until it is killed.
pub(crate) async fn run(address: SocketAddr, dir: &Path) {
    let listener = TcpListener::bind(address).await.unwrap();
    let acceptor = TlsAcceptor::from(pki::server_of(dir, &["h2", "http/1.1"]));
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = service_fn(move |request| async move { Ok::<_, Infallible>(answer(&request)) });
            let mut server = auto::Builder::new(TokioExecutor::new());
            server.http2().max_concurrent_streams(1000).initial_stream_window_size(1 << 20);
            let _broken = server.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn answer(request: &Request<Incoming>) -> Response<Body> {
    let body = match request.uri().path() {
        "/list" => list(),
        "/api/v1/pods" if request.uri().query().is_some_and(|query| query.contains("watch")) => silence(),
        path if let Some((_, bytes)) = WATCHES.iter().find(|(watch, _)| watch.starts_with(&format!("{path}?"))) => {
            ticks(*bytes)
        }
        _ => Full::new(Bytes::from_static(&[b' '; SMALL_BYTES])).boxed_unsync(),
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn list() -> Body {
    let (mut send, body) = Channel::new(4);
    tokio::spawn(async move {
        let piece = Bytes::from(vec![b' '; PIECE_BYTES]);
        for _ in 0..LIST_BYTES / PIECE_BYTES {
            if send.send(Frame::data(piece.clone())).await.is_err() {
                return;
            }
        }
    });
    body.boxed_unsync()
}

/// Changes of objects of so many bytes that say when they were sent, in nanoseconds of the machine's clock.
fn ticks(bytes: usize) -> Body {
    let (mut send, body) = Channel::new(4);
    tokio::spawn(async move {
        let mut ticks = time::interval(TICK);
        let filling = "x".repeat(bytes);
        for version in 2_u64.. {
            ticks.tick().await;
            let event = format!(
                r#"{{"type":"MODIFIED","object":{{"kind":"Pod","apiVersion":"v1","metadata":{{"name":"one","namespace":"small","uid":"0f1e","resourceVersion":"{version}"}},"spec":{{"nodeName":"{filling}"}},"sent":{:020}}}}}"#,
                super::load::now_nanoseconds()
            ) + "\n";
            if send.send(Frame::data(event.into())).await.is_err() {
                return;
            }
        }
    });
    body.boxed_unsync()
}

/// A watch on which nothing happens.
fn silence() -> Body {
    let (mut send, body) = Channel::new(1);
    tokio::spawn(async move {
        let event = "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"1\"}}}\n";
        if send.send(Frame::data(Bytes::from_static(event.as_bytes()))).await.is_ok() {
            std::future::pending::<()>().await;
        }
    });
    body.boxed_unsync()
}
