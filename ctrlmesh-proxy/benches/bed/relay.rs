//! A bare hyper relay: the least that a proxy can do with hyper.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use http::Request;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::rt::Executor;
use hyper::server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::task;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::pki;

#[derive(Clone, Copy)]
struct Local;

impl<F: Future + 'static> Executor<F> for Local {
    fn execute(&self, future: F) {
        task::spawn_local(future);
    }
}

/// Relays until it is killed. To be run on a current-thread runtime.
pub(crate) async fn run(address: SocketAddr, dir: &Path, backend: SocketAddr) {
    let listener = TcpListener::bind(address).await.unwrap();
    let acceptor = TlsAcceptor::from(pki::server_of(dir, &["h2", "http/1.1"]));
    let [http2, http1] = ["h2", "http/1.1"].map(|protocol| pki::client_of(&[dir.join("real.crt")], &[protocol]));
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let (acceptor, http1, http2) = (acceptor.clone(), http1.clone(), http2.clone());
        task::spawn_local(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                relay2(TokioIo::new(stream), connect(backend, http2).await).await;
            } else {
                relay1(TokioIo::new(stream), connect(backend, http1).await).await;
            }
        });
    }
}

type Client = TokioIo<tokio_rustls::server::TlsStream<TcpStream>>;
type Upstream = TokioIo<tokio_rustls::client::TlsStream<TcpStream>>;

async fn connect(backend: SocketAddr, config: Arc<ClientConfig>) -> Upstream {
    let stream = TcpStream::connect(backend).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TokioIo::new(TlsConnector::from(config).connect(name, stream).await.unwrap())
}

async fn relay2(client: Client, upstream: Upstream) {
    let mut builder = http2::Builder::new(Local);
    builder.initial_stream_window_size(1 << 20).initial_connection_window_size(16 << 20);
    let (send, connection) = builder.handshake(upstream).await.unwrap();
    task::spawn_local(connection);
    let service = service_fn(move |request: Request<Incoming>| {
        let mut send = send.clone();
        async move { send.send_request(request).await }
    });
    let mut builder = server::conn::http2::Builder::new(Local);
    builder.max_concurrent_streams(250);
    let _broken = builder.serve_connection(client, service).await;
}

async fn relay1(client: Client, upstream: Upstream) {
    let (send, connection) = http1::handshake(upstream).await.unwrap();
    task::spawn_local(connection);
    let send = Rc::new(Mutex::new(send));
    let service = service_fn(move |request: Request<Incoming>| {
        let send = send.clone();
        async move {
            let mut send = send.lock().await;
            send.ready().await?;
            send.send_request(request).await
        }
    });
    let _broken = server::conn::http1::Builder::new().timer(TokioTimer::new()).serve_connection(client, service).await;
}
