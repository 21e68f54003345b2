//! Serves a connection to another server than the API server.
//!
//! What the client says first tells HTTP, TLS and the rest apart. The rules decide about each request of HTTP in the
//! clear, and about everything else by the server's name in the TLS hello, or by its address. TLS passes end to end.

pub(super) mod http;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_request::egress::{Hello, Protocol, Visible, protocol, read_hello};
use ctrlmesh_runtime::drain::Drain;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time;
use tokio::time::Instant;
use tracing::debug;

use crate::egress::{self, PodEgress};
use crate::fault::PodFaults;
use crate::guard::PodGuards;
use crate::metrics::{ClientError, EgressProtocol};
use crate::net::tunnel::{self, TunnelError};
use crate::serve::TLS_HANDSHAKE;
use crate::session::{ConnectionResources, ServedPod, Server};

/// Where a client says nothing for so long, the server may be the one to speak first, as those of mail and of some
/// databases are.
const SILENCE: Duration = Duration::from_secs(1);

/// What a client says first, as far as it is read.
#[derive(Debug)]
struct Opening {
    bytes: BytesMut,
    spoken: Spoken,
}

/// Where a connection goes.
#[derive(Debug)]
struct Destination {
    address: SocketAddr,
    /// The host that the client has named, where it did not dial an address.
    named: Option<String>,
    /// The connection there, if it is open.
    connection: Option<TcpStream>,
}

/// What a client speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Spoken {
    Http1,
    Http2,
    Tls { server_name: Option<String> },
    Other,
}

/// A client's connection to another server than the API server.
struct Client<'a> {
    stream: TcpStream,
    destination: Destination,
    egress: &'a PodEgress,
    guards: &'a Arc<PodGuards>,
    faults: &'a Arc<PodFaults>,
    drain: &'a Drain,
    /// For opening a connection to the server.
    deadline: Duration,
}

impl Server {
    /// Serves a client's connection to `address` to its end.
    pub(super) async fn serve_egress(
        self: Rc<Self>,
        stream: TcpStream,
        address: SocketAddr,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        let destination = Destination { address, named: None, connection: None };
        self.serve_to(destination, stream, BytesMut::new(), served, resources).await;
    }

    /// Serves it to its end; `first` was read already.
    async fn serve_to(
        self: Rc<Self>,
        destination: Destination,
        stream: TcpStream,
        first: BytesMut,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        let until = Instant::now() + self.header_timeout;
        let ServedPod { egress, guards, faults, .. } = &served;
        let (drain, deadline) = (&self.drain, self.dialer.deadline);
        let mut client = Client { stream, destination, egress, guards, faults, drain, deadline };
        let opening = match Box::pin(client.opening(first, until)).await {
            Ok(opening) => opening,
            Err(error) => {
                if error.kind() == io::ErrorKind::TimedOut {
                    self.metrics.client_error(ClientError::Slow);
                }
                debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
                return drop(client.stream.set_zero_linger());
            }
        };
        self.metrics.egress.connected(opening.spoken.protocol());
        if matches!(opening.spoken, Spoken::Http1 | Spoken::Http2) {
            let is_http2 = opening.spoken == Spoken::Http2;
            let Client { stream, destination, .. } = client;
            let client = http::Client::new(self, served, resources);
            return Box::pin(client.serve(stream, opening.bytes, destination, is_http2)).await;
        }
        let open = self.metrics.tunnel();
        client.tunnel(opening).await;
        drop((open, resources));
    }
}

impl Client<'_> {
    /// Reads until it is clear what the client speaks, until `deadline`. A server that the rules let be reached by its
    /// address may speak first, as late as it likes.
    async fn opening(&mut self, mut bytes: BytesMut, deadline: Instant) -> io::Result<Opening> {
        let mut is_server_asked = false;
        loop {
            if let Some(spoken) = Spoken::of(&bytes) {
                return Ok(Opening { bytes, spoken });
            }
            let is_silent = bytes.is_empty() && !is_server_asked;
            let until = if is_silent || is_word(&bytes) { Instant::now() + SILENCE } else { deadline };
            match time::timeout_at(until.min(deadline), self.stream.read_buf(&mut bytes)).await {
                Ok(Ok(0)) => return Ok(Opening { bytes, spoken: Spoken::Other }),
                Ok(read) => drop(read?),
                // A word alone is no request: some protocols have such commands.
                Err(_silent) if is_word(&bytes) => return Ok(Opening { bytes, spoken: Spoken::Other }),
                Err(_silent) if is_silent && Instant::now() < deadline => {
                    if !self.is_admitted() {
                        continue;
                    }
                    is_server_asked = true;
                    if self.server_speaks().await? {
                        return Ok(Opening { bytes, spoken: Spoken::Other });
                    }
                }
                Err(elapsed) => return Err(elapsed.into()),
            }
        }
    }

    /// Whether the rules let bytes pass of which nothing is known.
    fn is_admitted(&self) -> bool {
        let Destination { address, .. } = self.destination;
        let host = self.destination.host();
        self.egress.admits(&Spoken::Other.visible(&host, address.port()), address.ip())
    }

    /// Whether the server speaks before the client does.
    async fn server_speaks(&mut self) -> io::Result<bool> {
        let upstream = match self.destination.connection.take() {
            Some(upstream) => upstream,
            None => self.egress.connect(&[self.destination.address], self.deadline).await?,
        };
        let upstream = self.destination.connection.insert(upstream);
        tokio::select! {
            readable = upstream.readable() => readable.map(|()| true),
            readable = self.stream.readable() => readable.map(|()| false),
        }
    }

    /// Passes bytes on, as long as the rules let them pass.
    async fn tunnel(self, Opening { bytes, spoken }: Opening) {
        let Self { stream, destination, egress, guards, faults, drain, deadline } = self;
        let host = destination.host();
        let Destination { address, connection, .. } = destination;
        let visible = spoken.visible(&host, address.port());
        if egress.admit(&visible, address.ip()).is_err() {
            return;
        }
        match faults.meet_egress(&visible, None, drain).await {
            // Meanwhile rules may have come that refuse it.
            Ok(true) if egress.admit(&visible, address.ip()).is_err() => return,
            Ok(_) => {}
            // The client sees that its connection broke, and not that it ended.
            Err(_aborting) => return drop(stream.set_zero_linger()),
        }
        let Ok(mut probe) = guards.admit_egress(&visible).inspect_err(|refused| {
            debug!(upstream.addr = %address, reason = %refused, "egress limited");
        }) else {
            return;
        };
        if let Some(probe) = &mut probe {
            probe.sent();
        }
        let upstream = match connection {
            Some(upstream) => Ok(upstream),
            None => egress.connect(&[address], deadline).await,
        };
        let Ok(mut upstream) = upstream else {
            // The client sees that its connection broke, and not that it ended.
            return drop(stream.set_zero_linger());
        };
        if let Some(probe) = probe {
            probe.reached();
        }
        let passed = async {
            upstream.write_all(&bytes).await.map_err(TunnelError::Broken)?;
            tunnel::opaque(stream, upstream).await
        };
        tokio::select! {
            _refusing = egress.refused(&visible, address.ip()) => {}
            passed = passed => if let Err(error) = passed {
                debug!(upstream.addr = %address, error = &error as &dyn std::error::Error, "egress broke");
            },
        }
    }
}

impl Destination {
    /// The server, as far as it is known without what the client sends.
    fn host(&self) -> String {
        self.named.clone().unwrap_or_else(|| egress::host(self.address.ip()))
    }
}

/// Whether these bytes may become a request of HTTP/1.1, and are none yet.
fn is_word(bytes: &[u8]) -> bool {
    !bytes.is_empty() && protocol(bytes).is_none() && bytes[0] != TLS_HANDSHAKE
}

impl Spoken {
    /// `None` where more bytes are needed.
    fn of(first: &[u8]) -> Option<Self> {
        match protocol(first)? {
            Protocol::Http1 => Some(Self::Http1),
            Protocol::Http2 => Some(Self::Http2),
            Protocol::Other => Some(Self::Other),
            Protocol::Tls => match read_hello(first) {
                Hello::Incomplete => None,
                Hello::NotTls => Some(Self::Other),
                Hello::Read { server_name } => Some(Self::Tls { server_name }),
            },
        }
    }

    fn protocol(&self) -> EgressProtocol {
        match self {
            Self::Http1 => EgressProtocol::Http1,
            Self::Http2 => EgressProtocol::Http2,
            Self::Tls { .. } => EgressProtocol::Tls,
            Self::Other => EgressProtocol::Other,
        }
    }

    /// What is to be seen of a connection to this host and port.
    fn visible<'a>(&'a self, host: &'a str, port: u16) -> Visible<'a> {
        let (scheme, host) = match self {
            Self::Tls { server_name } => (Some(Scheme::Https), server_name.as_deref().unwrap_or(host)),
            _ => (None, host),
        };
        Visible { scheme, host, port, request: None }
    }
}
