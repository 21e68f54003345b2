//! How does a client connection reach the API server?
//!
//! Over connections of its own, opened when first needed and closed with it, in the protocol that the client chose, on
//! the client's thread. So the API server's flow control, GOAWAY and fairness reach the client that they are meant
//! for, and nobody else.

mod http1;
mod http2;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, Response};
use rustls::{AlertDescription, ClientConfig};
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time;
use tokio_rustls::TlsConnector;
use tracing::debug;

use crate::accept;
use crate::body::Relay;
use crate::drain::Drain;
use crate::metrics;
use crate::metrics::{Metrics, Open};
use crate::tls::stream::ClientStream;
use crate::tls::trust::Trust;

/// Which API server.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it listens.
    pub address: Address,
    /// The name that its certificate must carry.
    pub name: ServerName<'static>,
}

/// Where an API server listens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Address {
    /// There.
    Socket(SocketAddr),
    /// At any address of a host.
    Host(String, u16),
}

/// What opening connections takes; one a thread.
#[derive(Debug)]
pub struct Dialer {
    /// Whom to believe.
    pub trust: Arc<Trust>,
    /// How long a connection may take to open, TLS included.
    pub deadline: Duration,
    /// Set once the API server turned out not to speak HTTP/2; all threads share it.
    pub http1_only: Arc<AtomicBool>,
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
}

// === impl Target ===

impl From<SocketAddr> for Target {
    /// The API server at an address, which its certificate must carry.
    fn from(address: SocketAddr) -> Self {
        Self { address: Address::Socket(address), name: ServerName::IpAddress(address.ip().into()) }
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
        let connecting = async {
            match address {
                Address::Socket(address) => TcpStream::connect(address).await,
                Address::Host(host, port) => TcpStream::connect((host.as_str(), *port)).await,
            }
        };
        let stream = time::timeout(self.deadline, connecting)
            .await
            .map_err(|_elapsed| SendError::ConnectTimeout { deadline: self.deadline })
            .and_then(|connected| connected.map_err(SendError::Connect))
            .inspect_err(|_| self.metrics.upstream_error(metrics::UpstreamError::Connect))?;
        accept::prepare(&stream).map_err(SendError::Connect)?;
        Ok(stream)
    }

    /// Opens a connection and begins TLS on it.
    async fn dial(&self, target: &Target, http2: bool) -> Result<ClientStream, SendError> {
        let stream = self.connect(&target.address).await?;
        let client = self.trust.client();
        let config = if http2 { client.http2 } else { client.http1 };
        let handshake = handshake(config, target.name.clone(), stream);
        let stream = time::timeout(self.deadline, handshake)
            .await
            .map_err(|_elapsed| SendError::ConnectTimeout { deadline: self.deadline })
            .and_then(|done| done.map_err(SendError::Tls))
            .inspect_err(|error| self.on_tls_error(error))?;
        if http2 && stream.protocol() != Some(crate::tls::ALPN_HTTP2) {
            self.http1_only.store(true, Ordering::Relaxed);
            return Err(SendError::Protocol);
        }
        debug!(upstream.name = ?target.name, http2, "connected");
        Ok(stream)
    }

    fn on_tls_error(&self, error: &SendError) {
        self.metrics.upstream_error(metrics::UpstreamError::Tls);
        if no_common_protocol(error) {
            self.http1_only.store(true, Ordering::Relaxed);
        }
        // Perhaps the CA was replaced, and the file with it.
        self.trust.refresh();
    }
}

// === impl Upstream ===

impl Upstream {
    /// No connection yet. `leaving` is notified once the API server asks its client to go elsewhere.
    pub fn new(http2: bool, dialer: Rc<Dialer>, target: Target, leaving: Rc<Notify>) -> Self {
        if http2 {
            return Upstream::Http2(http2::Pool::new(dialer, target, leaving));
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
            Upstream::Http2(pool) => pool.send(request, informed).await,
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

/// What a connection's task holds: the count of it.
fn count(dialer: &Dialer) -> Open {
    dialer.metrics.upstream_connection()
}
