//! Passes HTTP in the clear, request by request.
//!
//! Each client connection has one upstream connection in the same protocol, to the address that the client dialled.
//! It is opened for the first request that passes, and again where the server has closed it between two requests. Where
//! the server cannot be reached, the client's connection breaks, or its HTTP/2 stream is refused.

mod reply;
mod upstream;

use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_request::egress::Visible;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::upgrade;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use self::reply::Answer;
use self::upstream::{Upstream, UpstreamError};
use crate::egress::{self, PodEgress};
use crate::guard::{PodGuards, Probe};
use crate::metrics::ClientError;
use crate::net::prefixed::Prefixed;
use crate::net::tunnel;
use crate::serve::unless_gone;
use crate::session::{ConnectionResources, Server};
use ctrlmesh_runtime::drain::Drain;

/// The largest head of a request. Servers take less.
const MAX_HEAD_BYTES: u32 = 1 << 20;

/// Between requests, and for the head of one.
const IDLE_TIMEOUT: Duration = Duration::from_mins(10);

/// Concurrent requests of an HTTP/2 connection.
const MAX_STREAMS: u32 = 250;

/// What may wait on its way in either direction, of one request.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// The same, of all requests of a connection.
const WINDOW_BYTES: u32 = 1 << 20;

/// The server's body, or ours.
type Body = Either<Incoming, Full<Bytes>>;

/// A client's connection.
pub(super) struct Client {
    pub(super) server: Rc<Server>,
    pub(super) egress: Arc<PodEgress>,
    pub(super) guards: Arc<PodGuards>,
    pub(super) gone: Option<CancellationToken>,
    pub(super) destination: SocketAddr,
    /// Until its tunnels have ended, too.
    pub(super) resources: Rc<ConnectionResources>,
}

/// Runs the tasks of hyper's connections on this thread.
#[derive(Clone)]
struct ThisThread(Drain);

impl<F: Future + 'static> Executor<F> for ThisThread {
    fn execute(&self, task: F) {
        self.0.spawn_part(async move { drop(task.await) });
    }
}

impl Client {
    /// Serves it to its end; `first` was read already.
    pub(super) async fn serve(self, stream: TcpStream, first: BytesMut, is_http2: bool) {
        let drain = self.server.drain.clone();
        let upstream = Upstream::new(self.egress.clone(), self.destination, is_http2, &self.server);
        let exchanges = Rc::new(Exchanges { client: self, upstream });
        let service = service_fn(move |request| Box::pin(exchanges.clone().answer(request)));
        let io = TokioIo::new(Prefixed::new(first, stream));
        let ended = if is_http2 {
            let mut builder = http2::Builder::new(ThisThread(drain.clone()));
            builder.max_concurrent_streams(MAX_STREAMS);
            builder.initial_stream_window_size(STREAM_WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
            builder.timer(TokioTimer::new()).max_header_list_size(MAX_HEAD_BYTES).auto_date_header(false);
            run(builder.serve_connection(io, service), http2::Connection::graceful_shutdown, &drain).await
        } else {
            let mut builder = http1::Builder::new();
            builder.max_buf_size(MAX_HEAD_BYTES as usize).preserve_header_case(true).auto_date_header(false);
            builder.half_close(true).timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
            let connection = builder.serve_connection(io, service).with_upgrades();
            run(connection, http1::UpgradeableConnection::graceful_shutdown, &drain).await
        };
        if let Err(error) = ended {
            debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        }
    }
}

/// Runs a connection to its end; once shutdown has begun, its present requests are the last ones.
async fn run<C: Future>(connection: C, shut_down: impl FnOnce(Pin<&mut C>), drain: &Drain) -> C::Output {
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => ended,
        () = drain.started() => {
            shut_down(connection.as_mut());
            connection.await
        }
    }
}

/// The requests of one client connection.
struct Exchanges {
    client: Client,
    upstream: Upstream,
}

/// What the rules see of a request.
struct SeenRequest {
    host: String,
    port: u16,
    method: Method,
    path: String,
}

impl SeenRequest {
    fn visible(&self) -> Visible<'_> {
        let request = Some((self.method.as_str(), self.path.as_str()));
        Visible { scheme: Some(Scheme::Http), host: &self.host, port: self.port, request }
    }
}

impl Exchanges {
    async fn answer(self: Rc<Self>, mut request: Request<Incoming>) -> Result<Response<Body>, UpstreamError> {
        let (seen, mut probe) = match self.admit(&request) {
            Ok(admitted) => admitted,
            Err(answer) => return Ok(answer.map(Either::Right)),
        };
        if let Some(probe) = &mut probe {
            probe.sent();
        }
        reply::decline_h2c(request.headers_mut());
        let is_connect = request.method() == Method::CONNECT;
        let upgrading = is_connect || request.headers().contains_key(header::UPGRADE);
        let client = upgrading.then(|| upgrade::on(&mut request));
        let mut response = self.upstream.send(request).await?;
        if let Some(probe) = probe {
            probe.answered(response.status());
        }
        let is_upgraded =
            response.status() == StatusCode::SWITCHING_PROTOCOLS || is_connect && response.status().is_success();
        if let Some(client) = client.filter(|_| is_upgraded) {
            self.tunnel(client, upgrade::on(&mut response), seen);
        }
        Ok(response.map(Either::Left))
    }

    /// Puts a request to the rules and limits: what they see of it, and the probe as which it may pass.
    fn admit<B>(&self, request: &Request<B>) -> Result<(SeenRequest, Option<Probe>), Answer> {
        let Client { server, egress, guards, destination, .. } = &self.client;
        let seen = self.seen(request).inspect_err(|_ambiguous| server.metrics.client_error(ClientError::Protocol))?;
        let visible = seen.visible();
        let refused = |rule| reply::refused(&rule, visible.host, visible.port);
        egress.admit(&visible, destination.ip()).map_err(refused)?;
        let probe = guards.admit_egress(&visible).map_err(|refused| reply::limited(&refused))?;
        Ok((seen, probe))
    }

    fn seen<B>(&self, request: &Request<B>) -> Result<SeenRequest, Answer> {
        let destination = self.client.destination;
        let host = reply::host(request)?.unwrap_or_else(|| egress::host(destination.ip()));
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        Ok(SeenRequest { host, port: destination.port(), method, path })
    }

    /// Passes the bytes of a connection that was upgraded, until it ends or the rules no longer let the request pass.
    fn tunnel(&self, client: OnUpgrade, upstream: OnUpgrade, seen: SeenRequest) {
        let (open, resources) = (self.client.server.metrics.tunnel(), self.client.resources.clone());
        let Client { gone, egress, destination, .. } = &self.client;
        let (gone, egress, address) = (gone.clone(), egress.clone(), destination.ip());
        self.client.server.drain.spawn_local(async move {
            let visible = seen.visible();
            let passing = async {
                tokio::select! {
                    _refusing = egress.refused(&visible, address) => {}
                    passed = tunnel::upgraded(client, upstream) => if let Err(error) = passed {
                        debug!(error = &error as &dyn std::error::Error, "upgraded connection broke");
                    },
                }
            };
            unless_gone(gone.as_ref(), passing).await;
            drop((open, resources));
        });
    }
}
