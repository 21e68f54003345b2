//! The connection over which the requests of one client connection go on.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tracing::debug;

use super::{MAX_HEAD_BYTES, STREAM_WINDOW_BYTES, ThisThread, WINDOW_BYTES};
use crate::egress::PodEgress;
use crate::serve::idle_connection::{IdleConnection, NotAnswered};
use crate::session::Server;

/// Why a request was not answered.
#[derive(Debug, Error)]
pub(super) enum UpstreamError {
    /// Over HTTP/2 a client learns that the request was not carried out, and may be sent again.
    #[error("connect: {reason}")]
    Connect { reason: io::Error, source: h2::Error },
    #[error("send a request")]
    Ask(#[source] hyper::Error),
}

pub(super) struct Upstream {
    egress: Arc<PodEgress>,
    route: Route,
    server: Rc<Server>,
    /// A connection that is open already.
    first: RefCell<Option<TcpStream>>,
    sender: Sender,
}

/// How a server is reached.
#[derive(Clone, Debug)]
pub(super) struct Route {
    /// Tried one after the other; at least one.
    pub(super) addresses: Vec<SocketAddr>,
    /// The name that its certificate must carry, where it speaks TLS.
    pub(super) secure: Option<ServerName<'static>>,
}

/// TLS takes a kilobyte.
type Stream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

enum Sender {
    /// Requests come one after the other.
    Http1(IdleConnection<Incoming>),
    /// Locked while it is opened.
    Http2(Mutex<Option<http2::SendRequest<Incoming>>>),
}

/// Name servers give addresses in another order each time.
impl PartialEq for Route {
    fn eq(&self, other: &Self) -> bool {
        let sorted = |route: &Self| {
            let mut addresses = route.addresses.clone();
            addresses.sort_unstable();
            addresses
        };
        self.secure == other.secure && sorted(self) == sorted(other)
    }
}

impl Upstream {
    pub(super) fn new(
        egress: Arc<PodEgress>,
        route: Route,
        first: Option<TcpStream>,
        is_http2: bool,
        server: &Rc<Server>,
    ) -> Self {
        let sender = if is_http2 { Sender::Http2(Mutex::default()) } else { Sender::Http1(IdleConnection::default()) };
        Self { egress, route, server: server.clone(), first: RefCell::new(first), sender }
    }

    pub(super) fn route(&self) -> &Route {
        &self.route
    }

    /// Sends a request, and returns the response once its head is there.
    pub(super) async fn send(&self, request: Request<Incoming>) -> Result<Response<Incoming>, UpstreamError> {
        match &self.sender {
            Sender::Http1(idle) => {
                let answered = idle.send(request, async || self.open_http1().await).await;
                answered.map_err(|not_answered| match not_answered {
                    NotAnswered::Open(error) => error,
                    NotAnswered::Unsent(error) | NotAnswered::Sent(error) => UpstreamError::Ask(error),
                })
            }
            Sender::Http2(shared) => self.send_http2(shared, request).await,
        }
    }

    async fn send_http2(
        &self,
        shared: &Mutex<Option<http2::SendRequest<Incoming>>>,
        mut request: Request<Incoming>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        let mut is_first = true;
        loop {
            let mut sender = self.http2(shared).await?;
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                Err(mut error) => match error.take_message() {
                    // The server was about to close the connection: nothing of the request was sent.
                    Some(unsent) if is_first => request = unsent,
                    _ => return Err(UpstreamError::Ask(error.into_error())),
                },
            }
            is_first = false;
            *shared.lock().await = None;
        }
    }

    async fn open_http1(&self) -> Result<http1::SendRequest<Incoming>, UpstreamError> {
        let stream = TokioIo::new(self.connect().await?);
        let mut builder = http1::Builder::new();
        builder.preserve_header_case(true);
        let (sender, connection) = builder.handshake(stream).await.map_err(UpstreamError::Ask)?;
        self.run(connection.with_upgrades());
        Ok(sender)
    }

    async fn http2(
        &self,
        shared: &Mutex<Option<http2::SendRequest<Incoming>>>,
    ) -> Result<http2::SendRequest<Incoming>, UpstreamError> {
        let mut shared = shared.lock().await;
        if let Some(sender) = shared.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok(sender.clone());
        }
        let stream = TokioIo::new(self.connect().await?);
        let executor = ThisThread(self.server.drain.clone());
        let mut builder = http2::Builder::new(executor);
        builder.initial_stream_window_size(STREAM_WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
        let handshake = builder.max_header_list_size(MAX_HEAD_BYTES).handshake(stream).await;
        let (sender, connection) = handshake.map_err(UpstreamError::Ask)?;
        self.run(connection);
        *shared = Some(sender.clone());
        drop(shared);
        Ok(sender)
    }

    fn run(&self, connection: impl Future<Output = hyper::Result<()>> + 'static) {
        let open = self.server.metrics.upstream_connection();
        self.server.drain.spawn_part(async move {
            if let Err(error) = connection.await {
                debug!(error = &error as &dyn std::error::Error, "egress broke");
            }
            drop(open);
        });
    }

    async fn connect(&self) -> Result<Stream, UpstreamError> {
        let first = self.first.take();
        let connected = Box::pin(self.open(first)).await;
        let refused = || h2::Error::from(h2::Reason::REFUSED_STREAM);
        connected.map_err(|reason| UpstreamError::Connect { reason, source: refused() })
    }

    async fn open(&self, first: Option<TcpStream>) -> io::Result<Stream> {
        let deadline = self.server.dialer.deadline;
        let stream = match first {
            Some(stream) => stream,
            None => self.egress.connect(&self.route.addresses, deadline).await?,
        };
        let Some(name) = self.route.secure.clone() else { return Ok(Either::Left(stream)) };
        let secured = time::timeout(deadline, self.egress.secure(stream, name)).await;
        secured.map_err(io::Error::from).flatten().map(|secure| Either::Right(Box::new(secure)))
    }
}
