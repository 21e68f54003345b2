//! Connections from the proxy to the API server.
//!
//! Each client connection has upstream connections of its own, in the protocol that the client chose, on the client's
//! thread. They are opened when first needed and closed with the client's. So flow control, GOAWAY and fairness of the
//! API server reach exactly the client that they are meant for.

mod http1;
mod http2;

use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use http::{Request, Response};
use rustls::{AlertDescription, ClientConfig};
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::metrics;
use crate::metrics::Metrics;
use crate::net::accept;
use crate::net::body::{Relay, UnreadBytes};
use crate::net::tls::stream::ClientStream;
use crate::net::tls::trust::Trust;
use crate::spans::ConnectionSpan;
use ctrlmesh_runtime::drain::Drain;

pub use http2::UsedConnection;

/// An API server without HTTP/2 is tried again after this time: it may have been replaced.
const HTTP1_ONLY_TTL: Duration = Duration::from_mins(10);

/// An API server.
#[derive(Clone, Debug)]
pub struct Target {
    pub address: Address,
    /// The name that its certificate must carry.
    pub name: ServerName<'static>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Address {
    Socket(SocketAddr),
    /// A DNS name and a port.
    Host(String, u16),
}

/// API servers that did not speak HTTP/2 when last tried. Read once for each client connection.
#[derive(Debug, Default)]
pub struct Http1Only(Mutex<HashMap<Address, Instant>>);

/// Opens connections; each thread has one.
#[derive(Debug)]
pub struct Dialer {
    pub trust: Arc<Trust>,
    /// For opening a connection, TLS included.
    pub deadline: Duration,
    /// An HTTP/2 connection over which nothing arrives for so long is given up. The proxy sends a PING after two
    /// thirds.
    pub silence: Duration,
    /// All threads share it.
    pub http1_only: Arc<Http1Only>,
    pub metrics: Arc<Metrics>,
    pub drain: Drain,
}

/// The API server of one client connection, and how it is reached.
#[derive(Debug)]
struct DialedTarget {
    dialer: Rc<Dialer>,
    target: Target,
    /// Of the client's connection.
    span: Option<Rc<ConnectionSpan>>,
}

/// The upstream connections of one client connection, in the client's protocol.
#[derive(Debug)]
pub enum Upstream {
    Http1(http1::Pool),
    Http2(http2::Pool),
}

/// Why the API server did not answer.
#[derive(Debug, Error)]
pub enum SendError {
    #[error("connect to the API server")]
    Connect(#[source] io::Error),
    #[error("connect to the API server within {deadline:?}")]
    ConnectTimeout { deadline: Duration },
    /// Includes a refused certificate.
    #[error("begin TLS with the API server")]
    Tls(#[source] io::Error),
    #[error("speak HTTP/2 with the API server")]
    Protocol,
    /// Another request's failed attempt to open the connection that this one waited for.
    #[error(transparent)]
    Shared(Arc<SendError>),
    #[error("send a request over HTTP/1.1")]
    Http1 {
        source: hyper::Error,
        /// Whether the connection had been used before. Then a client would try again by itself.
        reused: bool,
    },
    #[error("send a request over HTTP/2")]
    Http2(#[source] h2::Error),
    #[error("ask the API server within {deadline:?}")]
    Timeout { deadline: Duration },
}

impl Target {
    /// An HTTP/1.1 connection for the proxy's own requests, after a TLS handshake that `trust` accepts.
    pub async fn reach(&self, trust: &Trust) -> io::Result<ClientStream> {
        trust.refresh();
        let stream = self.address.connect().await?;
        accept::set_socket_options(&stream)?;
        handshake(trust.client().http1, self.name.clone(), stream).await
    }
}

impl From<SocketAddr> for Target {
    /// The API server's certificate must carry the address.
    fn from(address: SocketAddr) -> Self {
        Self { address: Address::Socket(address), name: ServerName::IpAddress(address.ip().into()) }
    }
}

impl Address {
    /// Host and port.
    fn parts(&self) -> (Cow<'_, str>, u16) {
        match self {
            Self::Socket(address) => (Cow::Owned(address.ip().to_string()), address.port()),
            Self::Host(host, port) => (Cow::Borrowed(host), *port),
        }
    }

    async fn connect(&self) -> io::Result<TcpStream> {
        match self {
            Self::Socket(address) => TcpStream::connect(address).await,
            Self::Host(host, port) => TcpStream::connect((host.as_str(), *port)).await,
        }
    }
}

impl Http1Only {
    pub fn contains(&self, address: &Address) -> bool {
        let mut known = lock(&self.0);
        known.retain(|_, since| since.elapsed() < HTTP1_ONLY_TTL);
        known.contains_key(address)
    }

    fn add(&self, address: &Address) {
        let mut known = lock(&self.0);
        known.insert(address.clone(), Instant::now());
    }
}

impl Dialer {
    /// Opens a TCP connection within the dialer's deadline.
    pub async fn connect(&self, address: &Address) -> Result<TcpStream, SendError> {
        self.connect_until(address, Instant::now() + self.deadline).await
    }

    async fn connect_until(&self, address: &Address, until: Instant) -> Result<TcpStream, SendError> {
        let stream = time::timeout_at(until, address.connect())
            .await
            .map_err(|_elapsed| self.too_late())
            .and_then(|connected| connected.map_err(SendError::Connect))
            .inspect_err(|_| self.metrics.upstream_error(metrics::UpstreamError::Connect))?;
        accept::set_socket_options(&stream).map_err(SendError::Connect)?;
        Ok(stream)
    }

    /// Opens a connection and begins TLS on it. It is reset where it is dropped after `reset`.
    async fn dial(
        &self,
        target: &Target,
        http2: bool,
        until: Instant,
        reset: &CancellationToken,
    ) -> Result<ClientStream, SendError> {
        let stream = self.connect_until(&target.address, until).await?;
        let client = self.trust.client();
        let config = if http2 { client.http2 } else { client.http1 };
        let handshake = handshake(config, target.name.clone(), stream);
        let mut stream = time::timeout_at(until, handshake)
            .await
            .map_err(|_elapsed| self.too_late())
            .and_then(|done| done.map_err(SendError::Tls))
            .map_err(|error| self.on_tls_error(error, target))?;
        if http2 && stream.protocol() != Some(crate::net::tls::ALPN_HTTP2) {
            self.http1_only.add(&target.address);
            return Err(SendError::Protocol);
        }
        debug!(upstream.name = ?target.name, http2, "connected");
        stream.reset_when(reset.clone());
        Ok(stream)
    }

    fn on_tls_error(&self, error: SendError, target: &Target) -> SendError {
        self.metrics.upstream_error(metrics::UpstreamError::Tls);
        if no_common_protocol(&error) {
            self.http1_only.add(&target.address);
            return SendError::Protocol;
        }
        // The CA may have been replaced, and its file too.
        self.trust.refresh();
        error
    }

    fn too_late(&self) -> SendError {
        SendError::ConnectTimeout { deadline: self.deadline }
    }
}

impl DialedTarget {
    /// Opens a connection, as [`Dialer::dial`] does.
    async fn dial(&self, http2: bool, until: Instant, reset: &CancellationToken) -> Result<ClientStream, SendError> {
        let dialed = self.dialer.dial(&self.target, http2, until, reset).await;
        if let Some(span) = &self.span {
            let (host, port) = self.target.address.parts();
            span.reached(&host, port, &dialed);
        }
        dialed
    }
}

impl Upstream {
    /// `leaving` is notified once the API server asks its client to go elsewhere; `unread` counts the bytes that wait
    /// to be sent to the API server. `span` ends once that is reached.
    pub fn new(
        http2: bool,
        dialer: Rc<Dialer>,
        target: Target,
        leaving: Rc<Notify>,
        unread: Rc<UnreadBytes>,
        span: Option<Rc<ConnectionSpan>>,
    ) -> Self {
        let api_server = DialedTarget { dialer, target, span };
        if http2 {
            return Upstream::Http2(http2::Pool::new(api_server, leaving, unread));
        }
        Upstream::Http1(http1::Pool::new(api_server))
    }

    /// Sends a request and returns the response once its head is there; `on_informational` gets each 1xx before that.
    /// Stores the connection in `used`.
    pub async fn send(
        &self,
        used: &UsedConnection,
        request: Request<Relay>,
        on_informational: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, SendError> {
        match self {
            Upstream::Http1(pool) => pool.send(request, used).await,
            Upstream::Http2(pool) => pool.send(request, used, on_informational).await,
        }
    }

    /// Does the same within `deadline`. A connection that misses it gets no further requests, because another may lead
    /// to another API server.
    pub async fn send_within(
        &self,
        used: &UsedConnection,
        request: Request<Relay>,
        deadline: Duration,
        on_informational: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, SendError> {
        let sending = match self {
            Upstream::Http1(pool) => Either::Left(pool.send(request, used)),
            Upstream::Http2(pool) => Either::Right(pool.send(request, used, on_informational)),
        };
        time::timeout(deadline, sending).await.unwrap_or_else(|_elapsed| {
            if let Upstream::Http2(pool) = self {
                pool.retire(used);
            }
            Err(SendError::Timeout { deadline })
        })
    }

    /// Resets a connection, so that the kernel sends nothing of it later that the API server has not got yet. Over
    /// HTTP/1.1, giving up a request without an answer does so by itself.
    pub fn reset(&self, used: &UsedConnection) {
        if let Upstream::Http2(pool) = self {
            pool.reset(used);
        }
    }
}

async fn handshake(
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    stream: TcpStream,
) -> io::Result<ClientStream> {
    TlsConnector::from(config).connect(name, stream).await.map(ClientStream::from)
}

/// Whether the API server said that it speaks none of the protocols that it was offered.
fn no_common_protocol(error: &SendError) -> bool {
    let SendError::Tls(error) = error else {
        return false;
    };
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_api_server_without_http2_is_tried_again_later() {
        let known = Http1Only::default();
        let one = Address::Host("one".to_owned(), 443);
        known.add(&one);
        assert!(known.contains(&one));
        assert!(!known.contains(&Address::Host("other".to_owned(), 443)));
        time::advance(HTTP1_ONLY_TTL).await;
        assert!(!known.contains(&one));
    }
}
