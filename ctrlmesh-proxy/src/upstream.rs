//! How does a client connection reach the API server?
//!
//! Over connections of its own, opened when first needed and closed with it, in the protocol that the client chose, on
//! the client's thread. So the API server's flow control, GOAWAY and fairness reach the client that they are meant
//! for, and nobody else.

mod http1;
mod http2;

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
use tracing::debug;

use crate::drain::Drain;
use crate::metrics;
use crate::metrics::{Metrics, Open};
use crate::net::accept;
use crate::net::body::{Relay, Unread};
use crate::net::tls::stream::ClientStream;
use crate::net::tls::trust::Trust;

/// How long it is believed that an API server speaks no HTTP/2: it may be replaced by one that does.
const HTTP1_BELIEVED: Duration = Duration::from_mins(10);

/// Which API server.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it listens.
    pub address: Address,
    /// The name that its certificate must carry.
    pub name: ServerName<'static>,
}

/// Where an API server listens.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Address {
    /// There.
    Socket(SocketAddr),
    /// At any address of a host.
    Host(String, u16),
}

/// The API servers that did not speak HTTP/2 when they were last asked. Looked at once for each connection of a client.
#[derive(Debug, Default)]
pub struct Http1Only(Mutex<HashMap<Address, Instant>>);

/// What opening connections takes; one a thread.
#[derive(Debug)]
pub struct Dialer {
    /// Whom to believe.
    pub trust: Arc<Trust>,
    /// How long a connection may take to open, TLS included.
    pub deadline: Duration,
    /// How long nothing may come over an HTTP/2 connection: after two thirds of that the API server is asked.
    pub silence: Duration,
    /// The API servers that turned out not to speak HTTP/2; all threads share it.
    pub http1_only: Arc<Http1Only>,
    /// Where connections and failures are counted.
    pub metrics: Arc<Metrics>,
    /// Waits for the connections at shutdown.
    pub drain: Drain,
}

/// The connections to the API server that one client connection uses.
#[derive(Debug)]
pub enum Upstream {
    /// For a client that speaks HTTP/1.1.
    Http1(http1::Pool),
    /// For a client that speaks HTTP/2.
    Http2(http2::Pool),
}

/// Why the API server did not answer.
#[derive(Debug, Error)]
pub enum SendError {
    /// No connection could be opened.
    #[error("connect to the API server")]
    Connect(#[source] io::Error),
    /// It could not be done in time.
    #[error("connect to the API server within {deadline:?}")]
    ConnectTimeout {
        /// How long was tried.
        deadline: Duration,
    },
    /// No TLS came about; a refused certificate counts here.
    #[error("begin TLS with the API server")]
    Tls(#[source] io::Error),
    /// The API server does not speak the client's protocol.
    #[error("speak HTTP/2 with the API server")]
    Protocol,
    /// Somebody else tried to open a connection for this request too.
    #[error(transparent)]
    Shared(Arc<SendError>),
    /// An HTTP/1.1 connection broke before it answered.
    #[error("send a request over HTTP/1.1")]
    Http1 {
        /// How it broke.
        #[source]
        source: hyper::Error,
        /// Whether it had been used before: then the client may try again, as it would by itself.
        reused: bool,
    },
    /// An HTTP/2 stream was reset, or its connection broke, before it answered.
    #[error("send a request over HTTP/2")]
    Http2(#[source] h2::Error),
    /// It did not begin to answer in time.
    #[error("ask the API server within {deadline:?}")]
    Timeout {
        /// How long was waited.
        deadline: Duration,
    },
}

// === impl Target ===

impl Target {
    /// A connection to it, by HTTP/1.1, that has shown its certificate; for those who ask on their own behalf.
    ///
    /// # Errors
    /// Fails where nobody listens there, or whoever does is not believed.
    pub async fn reach(&self, trust: &Trust) -> io::Result<ClientStream> {
        trust.refresh();
        let stream = self.address.connect().await?;
        accept::prepare(&stream)?;
        handshake(trust.client().http1, self.name.clone(), stream).await
    }
}

impl From<SocketAddr> for Target {
    /// The API server at an address, which its certificate must carry.
    fn from(address: SocketAddr) -> Self {
        Self { address: Address::Socket(address), name: ServerName::IpAddress(address.ip().into()) }
    }
}

// === impl Address ===

impl Address {
    async fn connect(&self) -> io::Result<TcpStream> {
        match self {
            Self::Socket(address) => TcpStream::connect(address).await,
            Self::Host(host, port) => TcpStream::connect((host.as_str(), *port)).await,
        }
    }
}

// === impl Http1Only ===

impl Http1Only {
    /// Whether a client is not to be offered HTTP/2, because this API server does not speak it.
    pub fn contains(&self, address: &Address) -> bool {
        let mut known = lock(&self.0);
        known.retain(|_, since| since.elapsed() < HTTP1_BELIEVED);
        known.contains_key(address)
    }

    fn add(&self, address: &Address) {
        let mut known = lock(&self.0);
        known.insert(address.clone(), Instant::now());
    }
}

// === impl Dialer ===

impl Dialer {
    /// Opens a TCP connection.
    ///
    /// # Errors
    ///
    /// Fails when nobody listens there, or not in time.
    pub async fn connect(&self, address: &Address) -> Result<TcpStream, SendError> {
        self.connect_until(address, Instant::now() + self.deadline).await
    }

    async fn connect_until(
        &self,
        address: &Address,
        until: Instant,
    ) -> Result<TcpStream, SendError> {
        let stream = time::timeout_at(until, address.connect())
            .await
            .map_err(|_elapsed| self.too_late())
            .and_then(|connected| connected.map_err(SendError::Connect))
            .inspect_err(|_| self.metrics.upstream_error(metrics::UpstreamError::Connect))?;
        accept::prepare(&stream).map_err(SendError::Connect)?;
        Ok(stream)
    }

    /// Opens a connection and begins TLS on it.
    async fn dial(
        &self,
        target: &Target,
        http2: bool,
        until: Instant,
    ) -> Result<ClientStream, SendError> {
        let stream = self.connect_until(&target.address, until).await?;
        let client = self.trust.client();
        let config = if http2 { client.http2 } else { client.http1 };
        let handshake = handshake(config, target.name.clone(), stream);
        let stream = time::timeout_at(until, handshake)
            .await
            .map_err(|_elapsed| self.too_late())
            .and_then(|done| done.map_err(SendError::Tls))
            .map_err(|error| self.on_tls_error(error, target))?;
        if http2 && stream.protocol() != Some(crate::net::tls::ALPN_HTTP2) {
            self.http1_only.add(&target.address);
            return Err(SendError::Protocol);
        }
        debug!(upstream.name = ?target.name, http2, "connected");
        Ok(stream)
    }

    fn on_tls_error(&self, error: SendError, target: &Target) -> SendError {
        self.metrics.upstream_error(metrics::UpstreamError::Tls);
        if no_common_protocol(&error) {
            self.http1_only.add(&target.address);
            return SendError::Protocol;
        }
        // Perhaps the CA was replaced, and the file with it.
        self.trust.refresh();
        error
    }

    fn too_late(&self) -> SendError {
        SendError::ConnectTimeout { deadline: self.deadline }
    }
}

// === impl Upstream ===

impl Upstream {
    /// No connection yet. `leaving` is notified once the API server asks its client to go elsewhere.
    /// What waits to be sent to it counts as `unread`.
    pub fn new(
        http2: bool,
        dialer: Rc<Dialer>,
        target: Target,
        leaving: Rc<Notify>,
        unread: Rc<Unread>,
    ) -> Self {
        if http2 {
            return Upstream::Http2(http2::Pool::new(dialer, target, leaving, unread));
        }
        Upstream::Http1(http1::Pool::new(dialer, target))
    }

    /// Sends a request and returns the head of its response; `informed` hears of each 1xx before it.
    ///
    /// # Errors
    ///
    /// Fails when the API server cannot be reached, or breaks off.
    pub async fn send(
        &self,
        request: Request<Relay>,
        informed: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, SendError> {
        match self {
            Upstream::Http1(pool) => pool.send(request).await,
            Upstream::Http2(pool) => pool.send(request, &http2::Asked::default(), informed).await,
        }
    }

    /// The same for what is to be answered within a `deadline`. A connection on which that did not happen gets no further
    /// request: another may lead to another API server.
    ///
    /// # Errors
    ///
    /// Fails as that does, and when the deadline is over.
    pub async fn send_within(
        &self,
        request: Request<Relay>,
        deadline: Duration,
        informed: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, SendError> {
        let asked = http2::Asked::default();
        let asking = match self {
            Upstream::Http1(pool) => Either::Left(pool.send(request)),
            Upstream::Http2(pool) => Either::Right(pool.send(request, &asked, informed)),
        };
        time::timeout(deadline, asking).await.unwrap_or_else(|_elapsed| {
            if let Upstream::Http2(pool) = self {
                pool.retire(&asked);
            }
            Err(SendError::Timeout { deadline })
        })
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

/// What a connection's task holds: the count of it.
fn count(dialer: &Dialer) -> Open {
    dialer.metrics.upstream_connection()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_api_server_without_http2_is_known_by_its_address_and_asked_again_one_day() {
        let known = Http1Only::default();
        let one = Address::Host("one".to_owned(), 443);
        known.add(&one);
        assert!(known.contains(&one));
        assert!(!known.contains(&Address::Host("other".to_owned(), 443)));
        time::advance(HTTP1_BELIEVED).await;
        assert!(!known.contains(&one));
    }
}
