//! Serves a connection to another server than the API server.
//!
//! What the client says first tells HTTP, TLS and the rest apart. The rules decide about each request of HTTP in the
//! clear, and about everything else by the server's name in the TLS hello, or by its address. TLS passes end to end.

mod http;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_request::egress::{Hello, Protocol, Visible, protocol, read_hello};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time;
use tokio::time::Instant;
use tracing::debug;

use crate::egress::{self, PodEgress};
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
    /// The connection to the server, where that was asked whether it speaks first.
    upstream: Option<TcpStream>,
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
    destination: SocketAddr,
    egress: &'a PodEgress,
    guards: &'a Arc<PodGuards>,
    /// For opening a connection to the server.
    deadline: Duration,
}

impl Server {
    /// Serves a client's connection to `destination` to its end.
    pub(super) async fn serve_egress(
        self: Rc<Self>,
        stream: TcpStream,
        destination: SocketAddr,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        let deadline = Instant::now() + self.header_timeout;
        let (egress, guards) = (&*served.egress, &served.guards);
        let mut client = Client { stream, destination, egress, guards, deadline: self.dialer.deadline };
        let opening = match Box::pin(client.opening(deadline)).await {
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
            let (stream, egress, guards) = (client.stream, served.egress.clone(), served.guards.clone());
            let client = http::Client {
                server: self,
                egress,
                guards,
                gone: served.gone,
                destination,
                resources: Rc::new(resources),
            };
            return Box::pin(client.serve(stream, opening.bytes, is_http2)).await;
        }
        let open = self.metrics.tunnel();
        client.tunnel(opening).await;
        drop((open, resources));
    }
}

impl Client<'_> {
    /// Reads until it is clear what the client speaks, until `deadline`. A server that the rules let be reached by its
    /// address may speak first, as late as it likes.
    async fn opening(&mut self, deadline: Instant) -> io::Result<Opening> {
        let mut bytes = BytesMut::new();
        let mut upstream = None;
        loop {
            if let Some(spoken) = Spoken::of(&bytes) {
                return Ok(Opening { bytes, spoken, upstream });
            }
            let is_silent = bytes.is_empty() && upstream.is_none();
            let until = if is_silent || is_word(&bytes) { Instant::now() + SILENCE } else { deadline };
            match time::timeout_at(until.min(deadline), self.stream.read_buf(&mut bytes)).await {
                Ok(Ok(0)) => return Ok(Opening { bytes, spoken: Spoken::Other, upstream }),
                Ok(read) => drop(read?),
                // A word alone is no request: some protocols have such commands.
                Err(_silent) if is_word(&bytes) => return Ok(Opening { bytes, spoken: Spoken::Other, upstream }),
                Err(_silent) if is_silent && Instant::now() < deadline => {
                    if !self.is_admitted() {
                        continue;
                    }
                    if self.server_speaks(&mut upstream).await? {
                        return Ok(Opening { bytes, spoken: Spoken::Other, upstream });
                    }
                }
                Err(elapsed) => return Err(elapsed.into()),
            }
        }
    }

    /// Whether the rules let bytes pass of which nothing is known.
    fn is_admitted(&self) -> bool {
        let address = egress::host(self.destination.ip());
        let visible = Spoken::Other.visible(&address, self.destination.port());
        self.egress.admits(&visible, self.destination.ip())
    }

    /// Whether the server speaks before the client does.
    async fn server_speaks(&self, upstream: &mut Option<TcpStream>) -> io::Result<bool> {
        let upstream = upstream.insert(self.egress.connect(self.destination, self.deadline).await?);
        tokio::select! {
            readable = upstream.readable() => readable.map(|()| true),
            readable = self.stream.readable() => readable.map(|()| false),
        }
    }

    /// Passes bytes on, as long as the rules let them pass.
    async fn tunnel(self, Opening { bytes, spoken, upstream }: Opening) {
        let Self { stream, destination, egress, guards, deadline } = self;
        let address = egress::host(destination.ip());
        let visible = spoken.visible(&address, destination.port());
        if egress.admit(&visible, destination.ip()).is_err() {
            return;
        }
        let Ok(mut probe) = guards.admit_egress(&visible).inspect_err(|refused| {
            debug!(upstream.addr = %destination, reason = %refused, "egress limited");
        }) else {
            return;
        };
        if let Some(probe) = &mut probe {
            probe.sent();
        }
        let upstream = match upstream {
            Some(upstream) => Ok(upstream),
            None => egress.connect(destination, deadline).await,
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
            _refusing = egress.refused(&visible, destination.ip()) => {}
            passed = passed => if let Err(error) = passed {
                debug!(upstream.addr = %destination, error = &error as &dyn std::error::Error, "egress broke");
            },
        }
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

    /// What is to be seen of a connection to this address and port.
    fn visible<'a>(&'a self, address: &'a str, port: u16) -> Visible<'a> {
        let (scheme, host) = match self {
            Self::Tls { server_name } => (Some(Scheme::Https), server_name.as_deref().unwrap_or(address)),
            _ => (None, address),
        };
        Visible { scheme, host, port, request: None }
    }
}
