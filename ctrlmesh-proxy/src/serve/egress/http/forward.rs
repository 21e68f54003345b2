//! Serves the forward proxy: clients that say with each request where it goes.
//!
//! A request is in absolute form, or names its URL in the header `Mesh-Real-Endpoint`; then the proxy itself speaks TLS
//! to servers of `https`. After `CONNECT`, the connection is served as if the client had dialled the server: rules see
//! what is in it, and one to the API server is limited as any other.

mod url;

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use bytes::BytesMut;
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_request::egress::Visible;
use http::{Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tracing::debug;

use self::url::Url;
use super::reply::{self, Answer};
use super::upstream::{Route, Upstream, UpstreamError};
use super::{Body, Client, SeenRequest, http1_builder, run};
use crate::metrics::{ClientError, EgressProtocol};
use crate::serve::egress::Destination;
use crate::session::{ConnectionResources, ServedPod, Server};
use crate::upstream::Target;

/// The requests of one client connection.
struct Forward {
    client: Client,
    /// The last server's connection: requests come one after the other.
    upstream: RefCell<Option<Rc<Upstream>>>,
    /// What follows on the connection itself.
    connect: RefCell<Option<Connect>>,
}

/// A connection that the client has made with `CONNECT`.
struct Connect {
    upgrade: OnUpgrade,
    to: Connected,
}

enum Connected {
    ApiServer(Target),
    Server(Destination),
}

/// Whom a host's name means.
enum Found {
    ApiServer(Target),
    /// At least one.
    Addresses(Vec<IpAddr>),
}

impl Server {
    /// Serves a client of the forward proxy to its end.
    pub(in crate::serve) async fn serve_forward(
        self: Rc<Self>,
        stream: TcpStream,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        self.metrics.egress.connected(EgressProtocol::Forward);
        let client = Client::new(self.clone(), served.clone(), resources);
        let forward = Rc::new(Forward { client, upstream: RefCell::default(), connect: RefCell::default() });
        let requests = forward.clone();
        let service = service_fn(move |request| Box::pin(requests.clone().answer(request)));
        let connection = http1_builder().serve_connection(TokioIo::new(stream), service).with_upgrades();
        let ended =
            Box::pin(run(connection, http1::UpgradeableConnection::graceful_shutdown, self.drain.started())).await;
        if let Err(error) = ended {
            debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        }
        // The service has ended with its connection.
        let Some(Forward { client, connect, .. }) = Rc::into_inner(forward) else { return };
        let Some((connect, resources)) = connect.into_inner().zip(Rc::into_inner(client.resources)) else { return };
        if let Err(error) = Box::pin(self.serve_connected(connect, served, resources)).await {
            debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        }
    }

    /// Serves what follows a `CONNECT`.
    async fn serve_connected(
        self: Rc<Self>,
        Connect { upgrade, to }: Connect,
        served: ServedPod,
        resources: ConnectionResources,
    ) -> hyper::Result<()> {
        // It is the connection that was served here.
        let Ok(parts) = upgrade.await?.downcast::<TokioIo<TcpStream>>() else { return Ok(()) };
        let (stream, first) = (parts.io.into_inner(), BytesMut::from(parts.read_buf));
        match to {
            Connected::Server(destination) => self.serve_to(destination, stream, first, served, resources).await,
            Connected::ApiServer(target) if first.is_empty() => {
                self.serve_api(stream, target, served, resources).await;
            }
            // Whoever sends before the answer is no TLS client of the API server.
            Connected::ApiServer(_) => self.metrics.client_error(ClientError::Protocol),
        }
        Ok(())
    }
}

impl Forward {
    async fn answer(self: Rc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let answered = match Url::of(&request) {
            // A connection may outlive what the policy said when it began.
            Ok(_) if !self.client.egress.forwards() => {
                Err(reply::ours(StatusCode::FORBIDDEN, "ctrlmesh-proxy: this pod has no forward proxy any more\n"))
            }
            Ok(url) if request.method() == Method::CONNECT => self.connect(url, request).await,
            Ok(url) => Box::pin(self.forward(url, request)).await,
            Err(error) => {
                self.client.server.metrics.client_error(ClientError::Protocol);
                Err(reply::ours(StatusCode::BAD_REQUEST, format!("ctrlmesh-proxy: {error}\n")))
            }
        };
        Ok(answered.unwrap_or_else(|answer| answer.map(Either::Right)))
    }

    /// Opens the connection that a client asks for. It is refused here where nothing that it may carry would pass.
    async fn connect(&self, url: Url, mut request: Request<Incoming>) -> Result<Response<Body>, Answer> {
        let visible = |scheme| Visible { scheme, host: &url.host, port: url.port, request: None };
        let tls = visible(Some(Scheme::Https));
        let to = match self.find(&url, &tls).await? {
            Found::ApiServer(target) => Connected::ApiServer(target),
            Found::Addresses(addresses) => {
                let addresses = self.admitted(&addresses, &[tls, visible(None)], &url)?;
                let connected = self.client.egress.connect(&addresses, self.client.server.dialer.deadline).await;
                let connected = connected.and_then(|connection| Ok((connection.peer_addr()?, connection)));
                let (address, connection) = connected.map_err(|error| unreachable(&url, &error))?;
                let (named, connection) = (Some(url.host.clone()), Some(connection));
                Connected::Server(Destination { address, named, connection })
            }
        };
        let upgrade = upgrade::on(&mut request);
        self.connect.replace(Some(Connect { upgrade, to }));
        Ok(Response::new(Either::Right(Full::default())))
    }

    /// Sends a request on.
    async fn forward(&self, url: Url, mut request: Request<Incoming>) -> Result<Response<Body>, Answer> {
        let Url { scheme, path, .. } = &url;
        let (method, path) = (request.method().clone(), path.path().to_owned());
        let visible = Visible {
            scheme: Some(*scheme),
            host: &url.host,
            port: url.port,
            request: Some((method.as_str(), path.as_str())),
        };
        let Found::Addresses(addresses) = self.find(&url, &visible).await? else {
            let text = "ctrlmesh-proxy: the API server is reached with CONNECT only\n";
            return Err(self.client.never("api-server", text));
        };
        self.client.check_tokens(request.headers(), &url.host).await?;
        let addresses = self.admitted(&addresses, &[visible], &url)?;
        let seen = SeenRequest {
            scheme: *scheme,
            host: url.host.clone(),
            port: url.port,
            method,
            path,
            addresses: addresses.iter().map(SocketAddr::ip).collect(),
        };
        let upstream = self.upstream(&url, addresses)?;
        url.write_to(&mut request);
        let exchanged = self.client.exchange(&upstream, seen, request).await;
        let exchanged = exchanged.map(|mut response| {
            // What the server says to its next hop is said to this proxy.
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                reply::remove_hop_by_hop(response.headers_mut());
            }
            response
        });
        exchanged.map_err(|error| match error {
            UpstreamError::Connect { reason, .. } => unreachable(&url, &reason),
            UpstreamError::Ask(source) => unreachable(&url, &io::Error::other(source)),
        })
    }

    /// Finds the addresses of a host. Those that tell a machine who it is are found only if a rule names them, and not
    /// the host: whoever owns a name says what it means.
    async fn find(&self, url: &Url, visible: &Visible<'_>) -> Result<Found, Answer> {
        let (egress, deadline) = (&self.client.egress, self.client.server.dialer.deadline);
        let unreachable = |error| unreachable(url, &error);
        let mut addresses = egress.resolve(&url.host, deadline).await.map_err(unreachable)?;
        let api_server = egress.api_server(&url.host, url.port, &addresses, deadline).await;
        if let Some(target) = api_server.map_err(unreachable)? {
            return Ok(Found::ApiServer(target));
        }
        addresses.retain(|address| !url::is_own(SocketAddr::new(*address, url.port)));
        if addresses.is_empty() {
            return Err(self.client.never("own-address", "ctrlmesh-proxy: this is an address of the proxy itself\n"));
        }
        addresses.retain(|address| {
            let host = crate::egress::host(*address);
            !url::is_metadata(*address) || egress.names(&Visible { host: &host, ..*visible })
        });
        if addresses.is_empty() {
            let text = format!(
                "ctrlmesh-proxy: {} is a link-local or metadata address, and no trafficInterceptRule names that address\n",
                url.host
            );
            return Err(self.client.never("metadata-address", &text));
        }
        Ok(Found::Addresses(addresses))
    }

    /// The addresses that the rules let be talked to in any of these ways.
    fn admitted(&self, addresses: &[IpAddr], ways: &[Visible<'_>], url: &Url) -> Result<Vec<SocketAddr>, Answer> {
        let egress = &self.client.egress;
        let passes = |address: &&IpAddr| ways.iter().any(|visible| egress.admits(visible, **address));
        let admitted: Vec<SocketAddr> =
            addresses.iter().filter(passes).map(|address| SocketAddr::new(*address, url.port)).collect();
        if !admitted.is_empty() {
            return Ok(admitted);
        }
        let mut all = ways.iter().flat_map(|visible| addresses.iter().map(move |address| (visible, *address)));
        match all.find_map(|(visible, address)| egress.admit(visible, address).err()) {
            Some(rule) => Err(reply::refused(&rule, &url.host, url.port)),
            // The rules have changed meanwhile.
            None => Ok(addresses.iter().map(|address| SocketAddr::new(*address, url.port)).collect()),
        }
    }

    /// The last server's connection, if it is to the same.
    fn upstream(&self, url: &Url, addresses: Vec<SocketAddr>) -> Result<Rc<Upstream>, Answer> {
        let secure = match url.scheme {
            Scheme::Http => None,
            Scheme::Https => {
                let name = ServerName::try_from(url.host.clone());
                Some(name.map_err(|error| unreachable(url, &io::Error::other(error)))?)
            }
        };
        let route = Route { addresses, secure };
        let mut last = self.upstream.borrow_mut();
        if let Some(upstream) = last.as_ref().filter(|last| *last.route() == route) {
            return Ok(upstream.clone());
        }
        let Client { server, egress, .. } = &self.client;
        let upstream = Rc::new(Upstream::new(egress.clone(), route, None, false, server));
        *last = Some(upstream.clone());
        drop(last);
        Ok(upstream)
    }
}

impl Url {
    /// Has a request name its server as one that is sent there directly does. What is meant for this proxy alone goes.
    fn write_to<B>(&self, request: &mut Request<B>) {
        let mut parts = http::uri::Parts::default();
        parts.path_and_query = Some(self.path.clone());
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        *request.version_mut() = Version::HTTP_11;
        reply::remove_hop_by_hop(request.headers_mut());
        request.headers_mut().remove(url::REAL_ENDPOINT);
        request.headers_mut().insert(header::HOST, self.authority.clone());
    }
}

fn unreachable(url: &Url, error: &io::Error) -> Answer {
    let status = match error.kind() {
        io::ErrorKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::BAD_GATEWAY,
    };
    reply::ours(status, format!("ctrlmesh-proxy: {}:{} is not reached: {error}\n", url.host, url.port))
}
