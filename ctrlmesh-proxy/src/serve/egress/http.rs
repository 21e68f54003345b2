//! Passes HTTP in the clear, request by request.
//!
//! Each client connection has one upstream connection in the same protocol, to the address that the client dialled.
//! It is opened for the first request that passes, and again where the server has closed it between two requests. Where
//! the server cannot be reached, the client's connection breaks, or its HTTP/2 stream is refused.

mod reply;
mod upstream;
mod forward;

use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_request::egress::{ServiceAccountToken, Visible};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
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
use self::upstream::{Route, Upstream, UpstreamError};
use crate::egress::{self, PodEgress, RefusingRule};
use crate::fault::PodFaults;
use crate::guard::{PodGuards, Probe};
use crate::metrics::ClientError;
use crate::net::prefixed::Prefixed;
use crate::net::tunnel;
use crate::serve::egress::Destination;
use crate::serve::unless_gone;
use crate::session::{ConnectionResources, ServedPod, Server};
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
    server: Rc<Server>,
    egress: Arc<PodEgress>,
    guards: Arc<PodGuards>,
    faults: Arc<PodFaults>,
    gone: Option<CancellationToken>,
    /// Until its tunnels have ended, too.
    resources: Rc<ConnectionResources>,
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
    pub(super) fn new(server: Rc<Server>, pod: ServedPod, resources: ConnectionResources) -> Self {
        let ServedPod { egress, guards, faults, gone, .. } = pod;
        Self { server, egress, guards, faults, gone, resources: Rc::new(resources) }
    }

    /// Serves it to its end; `first` was read already.
    pub(super) async fn serve(self, stream: TcpStream, first: BytesMut, destination: Destination, is_http2: bool) {
        let drain = self.server.drain.clone();
        let Destination { address, connection, named } = destination;
        let route = Route { addresses: vec![address], secure: None };
        let upstream = Upstream::new(self.egress.clone(), route, connection, is_http2, &self.server);
        let exchanges = Rc::new(Exchanges { client: self, address, named, upstream });
        let service = service_fn(move |request| Box::pin(exchanges.clone().answer(request)));
        let io = TokioIo::new(Prefixed::new(first, stream));
        let ended = if is_http2 {
            let mut builder = http2::Builder::new(ThisThread(drain.clone()));
            builder.max_concurrent_streams(MAX_STREAMS);
            builder.initial_stream_window_size(STREAM_WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
            builder.timer(TokioTimer::new()).max_header_list_size(MAX_HEAD_BYTES).auto_date_header(false);
            run(builder.serve_connection(io, service), http2::Connection::graceful_shutdown, drain.started()).await
        } else {
            let connection = http1_builder().serve_connection(io, service).with_upgrades();
            run(connection, http1::UpgradeableConnection::graceful_shutdown, drain.started()).await
        };
        if let Err(error) = ended {
            debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        }
    }

    /// Sends a request on, if rules and limits let it pass.
    async fn exchange(
        &self,
        upstream: &Upstream,
        seen: SeenRequest,
        mut request: Request<Incoming>,
    ) -> Result<Response<Body>, UpstreamError> {
        let mut probe = match Box::pin(self.admit(&seen, &request)).await {
            Ok(probe) => probe,
            Err(answer) => return Ok(answer.map(Either::Right)),
        };
        if let Some(probe) = &mut probe {
            probe.sent();
        }
        reply::decline_h2c(request.headers_mut());
        let is_connect = request.method() == Method::CONNECT;
        let upgrading = is_connect || request.headers().contains_key(header::UPGRADE);
        let client = upgrading.then(|| upgrade::on(&mut request));
        let mut response = upstream.send(request).await?;
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

    /// Puts a request to the rules, faults and limits: the probe as which it may pass.
    async fn admit<B>(&self, seen: &SeenRequest, request: &Request<B>) -> Result<Option<Probe>, Answer> {
        let visible = seen.visible();
        let refused = |rule| reply::refused(&rule, visible.host, visible.port);
        seen.admitted_by(&self.egress).map_err(refused)?;
        let met = self.faults.meet_egress(&visible, Some(request.headers()), &self.server.drain).await;
        if met.map_err(|aborting| reply::aborted(&aborting))? {
            // While it waited, rules may have come that refuse it.
            seen.admitted_by(&self.egress).map_err(refused)?;
        }
        self.guards.admit_egress(&visible).map_err(|refused| reply::limited(&refused))
    }

    /// Refuses a request that would give a token for the API server to somebody else.
    async fn check_tokens(&self, headers: &HeaderMap, host: &str) -> Result<(), Answer> {
        for token in headers.values().flat_map(|value| ServiceAccountToken::in_header(value.as_bytes())) {
            // Where it cannot be told, it is one.
            let is_for_api_server = match self.egress.mounted_tokens().await {
                Ok(mounted) => token.is_for_api_server(&mounted),
                Err(_late) => true,
            };
            if is_for_api_server {
                let text = format!("ctrlmesh-proxy: a token for the API server is not sent to {host}\n");
                return Err(self.never("service-account-token", &text));
            }
        }
        Ok(())
    }

    /// Counts what no rule lets pass.
    fn never(&self, reason: &'static str, text: &str) -> Answer {
        self.egress.never(reason);
        reply::ours(StatusCode::FORBIDDEN, text.to_owned())
    }

    /// Passes the bytes of a connection that was upgraded, until it ends or the rules no longer let the request pass.
    fn tunnel(&self, client: OnUpgrade, upstream: OnUpgrade, seen: SeenRequest) {
        let (open, resources) = (self.server.metrics.tunnel(), self.resources.clone());
        let (gone, egress) = (self.gone.clone(), self.egress.clone());
        self.server.drain.spawn_local(async move {
            let visible = seen.visible();
            let passing = async {
                let refused = seen.addresses.iter().map(|address| Box::pin(egress.refused(&visible, *address)));
                tokio::select! {
                    _refusing = first(refused.collect()) => {}
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

/// Completes with the first of these.
async fn first<F: Future + Unpin>(mut all: Vec<F>) -> F::Output {
    std::future::poll_fn(|cx| {
        let ready = all.iter_mut().find_map(|one| match Pin::new(one).poll(cx) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

pub(in crate::serve) fn http1_builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD_BYTES as usize).preserve_header_case(true).auto_date_header(false);
    builder.half_close(true).timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
    builder
}

/// Runs a connection to its end; once shutdown has begun, its present requests are the last ones.
pub(in crate::serve) async fn run<C: Future>(
    connection: C,
    shut_down: impl FnOnce(Pin<&mut C>),
    closing: impl Future<Output = ()>,
) -> C::Output {
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => ended,
        () = closing => {
            shut_down(connection.as_mut());
            connection.await
        }
    }
}

/// The requests of one client connection.
struct Exchanges {
    client: Client,
    /// That the client dialled.
    address: SocketAddr,
    /// The host that it has named to the forward proxy.
    named: Option<String>,
    upstream: Upstream,
}

/// What the rules see of a request.
struct SeenRequest {
    scheme: Scheme,
    host: String,
    port: u16,
    method: Method,
    path: String,
    /// All to which it may go.
    addresses: Vec<IpAddr>,
}

impl SeenRequest {
    /// Whether the rules let it pass to any of its addresses.
    fn admitted_by(&self, egress: &PodEgress) -> Result<(), RefusingRule> {
        self.addresses.iter().try_for_each(|address| egress.admit(&self.visible(), *address))
    }

    fn visible(&self) -> Visible<'_> {
        let request = Some((self.method.as_str(), self.path.as_str()));
        Visible { scheme: Some(self.scheme), host: &self.host, port: self.port, request }
    }
}

impl Exchanges {
    async fn answer(self: Rc<Self>, request: Request<Incoming>) -> Result<Response<Body>, UpstreamError> {
        let seen = match self.seen(&request) {
            Ok(seen) => seen,
            Err(ambiguous) => {
                self.client.server.metrics.client_error(ClientError::Protocol);
                return Ok(ambiguous.map(Either::Right));
            }
        };
        if self.named.is_some()
            && let Err(refused) = Box::pin(self.client.check_tokens(request.headers(), &seen.host)).await
        {
            return Ok(refused.map(Either::Right));
        }
        self.client.exchange(&self.upstream, seen, request).await
    }

    fn seen<B>(&self, request: &Request<B>) -> Result<SeenRequest, Answer> {
        let address = self.address.ip();
        let host = reply::host(request)?;
        let host = match &self.named {
            None => host.unwrap_or_else(|| egress::host(address)),
            Some(named) if host.as_ref().is_none_or(|host| host.eq_ignore_ascii_case(named)) => named.clone(),
            Some(_) => return Err(reply::other_host()),
        };
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        Ok(SeenRequest {
            scheme: Scheme::Http,
            host,
            port: self.address.port(),
            method,
            path,
            addresses: vec![address],
        })
    }
}
