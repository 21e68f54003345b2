//! A scripted API server.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::channel::{Channel, Sender};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// What the API server takes.
const MAX_HEAD_BYTES: usize = 1 << 20;

pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: Method,
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// Listens on loopback until dropped.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<ReceivedRequest>>>,
    connections: Arc<AtomicUsize>,
    #[expect(dead_code, reason = "held: its tasks end with it")]
    tasks: JoinSet<()>,
}

impl Upstream {
    /// Answers every request by `answer`, after recording it with its body.
    pub(crate) async fn http<A, F>(tls: Arc<ServerConfig>, answer: A) -> Self
    where
        A: Fn(ReceivedRequest) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        let seen = Arc::<Mutex<Vec<ReceivedRequest>>>::default();
        let record = seen.clone();
        Self::raw(tls, seen, move |stream| {
            let (answer, record) = (answer.clone(), record.clone());
            async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let (answer, record) = (answer.clone(), record.clone());
                    async move {
                        let request = read(request).await;
                        record.lock().unwrap().push(request.clone());
                        Ok::<_, Infallible>(answer(request).await)
                    }
                });
                let mut server = auto::Builder::new(TokioExecutor::new());
                server.http1().max_buf_size(MAX_HEAD_BYTES);
                server.http2().max_header_list_size(u32::try_from(MAX_HEAD_BYTES).unwrap());
                let _broken = server.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
            }
        })
        .await
    }

    /// Does `talk` on every connection.
    pub(crate) async fn bytes<A, F>(tls: Arc<ServerConfig>, talk: A) -> Self
    where
        A: Fn(TlsStream<TcpStream>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        Self::raw(tls, Arc::default(), talk).await
    }

    /// How many connections came so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub(crate) fn last(&self) -> ReceivedRequest {
        self.seen.lock().unwrap().last().cloned().expect("a request arrived")
    }

    async fn raw<A, F>(tls: Arc<ServerConfig>, seen: Arc<Mutex<Vec<ReceivedRequest>>>, talk: A) -> Self
    where
        A: Fn(TlsStream<TcpStream>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::<AtomicUsize>::default();
        let count = connections.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (tls, talk) = (tls.clone(), talk.clone());
                running.spawn(async move {
                    if let Ok(stream) = TlsAcceptor::from(tls).accept(stream).await {
                        talk(stream).await;
                    }
                });
            }
        });
        Self { address, seen, connections, tasks }
    }
}

/// A response with this body, whole.
pub(crate) fn whole(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}

/// A response, and the sender of its body.
pub(crate) fn streamed() -> (Sender<Bytes, io::Error>, Response<Body>) {
    let (send, body) = Channel::new(64);
    (send, Response::new(body.boxed_unsync()))
}

async fn read(request: Request<Incoming>) -> ReceivedRequest {
    let (head, body) = request.into_parts();
    let target = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    ReceivedRequest { method: head.method, target, headers: head.headers, body }
}
