//! A gRPC client: HTTP/2 over TLS 1.3, with a bearer token in every call.
//!
//! The token is read for each call, because it changes while a process runs.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::time;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{IntoRequest, IntoStreamingRequest, Status, Streaming};
use tonic_prost::ProstCodec;
use tonic_prost::prost::Message;
use tracing::debug;

use crate::drain::Drain;
use crate::telemetry;
use crate::tls;

/// For a TCP connection, and for the HTTP/2 preface.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For the TLS handshake. A manager that is back has ten thousand proxies to serve, and each aborted handshake costs it
/// work.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// After how long an HTTP/2 PING goes to a silent peer, whichever side it is, and how long its answer may take. A
/// process that stands still for longer loses its connections.
pub const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// A server, and what proves the two sides to each other.
#[derive(Clone, Debug)]
pub struct Peer {
    name: ServerName<'static>,
    origin: Uri,
    tls: Arc<ClientConfig>,
    token: Arc<Path>,
}

/// Where the certificate authorities of a peer are.
#[derive(Clone, Copy, Debug)]
pub enum Authorities<'a> {
    File(&'a Path),
    Pem(&'a str),
}

/// One connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    grpc: Grpc<Channel>,
    token: Arc<Path>,
}

#[derive(Debug, thiserror::Error)]
pub enum GrpcError {
    #[error("read `{path}`")]
    Read { path: PathBuf, source: io::Error },
    #[error("read a certificate authority from {origin}")]
    Authority { origin: String },
    #[error("`{path}` holds no token")]
    Token { path: PathBuf },
    /// Neither a DNS name nor an address.
    #[error("`{host}` is no host")]
    Host { host: String },
    #[error("set up TLS")]
    Library(#[source] rustls::Error),
    /// Includes a refused certificate.
    #[error("open a TLS connection")]
    Connect(#[source] io::Error),
    #[error("begin HTTP/2 in time")]
    Late,
    #[error("begin HTTP/2")]
    Http(#[source] hyper::Error),
    #[error("the answer is: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] Status),
}

#[derive(Clone, Debug)]
struct Channel(http2::SendRequest<Body>);

impl Peer {
    /// A server whose certificate is for `host`, a DNS name or an address, and signed by one of `authorities`. `token`
    /// is the file with the token that calls carry.
    ///
    /// # Errors
    /// If a file cannot be read, or holds something else.
    pub fn new(host: &str, authorities: Authorities<'_>, token: &Path) -> Result<Self, GrpcError> {
        // Fails early without a token.
        authorization(token)?;
        let unfit = || GrpcError::Host { host: host.to_owned() };
        let name = ServerName::try_from(host.to_owned()).map_err(|_unfit| unfit())?;
        let origin = if host.contains(':') { format!("https://[{host}]") } else { format!("https://{host}") };
        let origin = origin.parse().map_err(|_unfit| unfit())?;
        let mut config = ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(GrpcError::Library)?
            .with_root_certificates(authorities.read()?)
            .with_no_client_auth();
        config.alpn_protocols = vec![tls::ALPN_HTTP2.to_vec()];
        Ok(Self { name, origin, tls: Arc::new(config), token: Arc::from(token) })
    }

    /// Connects to `address`. The connection's tasks run on `drain`.
    ///
    /// # Errors
    /// If nobody answers in time, or not the peer.
    pub async fn connect(&self, address: impl ToSocketAddrs, drain: &Drain) -> Result<Connection, GrpcError> {
        let stream = self.reach(address, CONNECT_TIMEOUT).await.map_err(GrpcError::Connect)?;
        self.begin(stream, drain).await
    }

    /// Opens a TCP connection to `address` within `timeout`, and then TLS.
    ///
    /// # Errors
    /// If nobody answers in time, or not the peer.
    pub async fn reach(&self, address: impl ToSocketAddrs, timeout: Duration) -> io::Result<TlsStream<TcpStream>> {
        self.secure(time::timeout(timeout, TcpStream::connect(address)).await??).await
    }

    /// Opens TLS over a TCP connection.
    ///
    /// # Errors
    /// If the other side does not answer in time, or is not the peer.
    pub async fn secure(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        stream.set_nodelay(true)?;
        let handshake = TlsConnector::from(self.tls.clone()).connect(self.name.clone(), stream);
        time::timeout(HANDSHAKE_TIMEOUT, Box::pin(handshake)).await?
    }

    /// Begins HTTP/2. The connection's tasks run on `drain`.
    ///
    /// # Errors
    /// If the peer does not answer in time, or does not speak HTTP/2.
    pub async fn begin(&self, stream: TlsStream<TcpStream>, drain: &Drain) -> Result<Connection, GrpcError> {
        let mut http2 = http2::Builder::new(drain.clone());
        http2
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true);
        let begun = time::timeout(CONNECT_TIMEOUT, Box::pin(http2.handshake(TokioIo::new(stream)))).await;
        let (sender, connection) = begun.map_err(|_elapsed| GrpcError::Late)?.map_err(GrpcError::Http)?;
        let peer = self.origin.clone();
        drain.spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = telemetry::chain(&error), %peer, "gRPC connection broke");
            }
        });
        Ok(Connection { grpc: Grpc::with_origin(Channel(sender), self.origin.clone()), token: self.token.clone() })
    }
}

impl Authorities<'_> {
    fn read(self) -> Result<RootCertStore, GrpcError> {
        let unfit = || GrpcError::Authority {
            origin: match self {
                Self::File(path) => format!("`{}`", path.display()),
                Self::Pem(_) => "the given PEM".to_owned(),
            },
        };
        let text = match self {
            Self::File(path) => read(path)?,
            Self::Pem(text) => text.as_bytes().to_vec(),
        };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&text) {
            let certificate = certificate.map_err(|_unfit| unfit())?;
            roots.add(certificate).map_err(|_unfit| unfit())?;
        }
        if roots.is_empty() { Err(unfit()) } else { Ok(roots) }
    }
}

/// The methods fail with the peer's status. It is `unauthenticated` if the token cannot be read, and `unavailable` if
/// the connection is broken.
impl Connection {
    /// The most bytes that a message of the peer may have.
    #[must_use]
    pub fn max_message_bytes(self, bytes: usize) -> Self {
        Self { grpc: self.grpc.max_decoding_message_size(bytes), ..self }
    }

    /// Sends one message, and waits for one.
    ///
    /// # Errors
    /// The peer's status.
    pub async fn unary<A, B>(&mut self, path: &'static str, message: impl IntoRequest<A>) -> Result<B, Status>
    where
        A: Message + 'static,
        B: Message + Default + 'static,
    {
        let request = self.prepare(message.into_request()).await?;
        let codec = ProstCodec::<A, B>::default();
        Ok(self.grpc.unary(request, PathAndQuery::from_static(path), codec).await?.into_inner())
    }

    /// Sends all messages, and waits for one.
    ///
    /// # Errors
    /// The peer's status.
    pub async fn client_streaming<A, B>(
        &mut self,
        path: &'static str,
        messages: impl IntoStreamingRequest<Message = A>,
    ) -> Result<B, Status>
    where
        A: Message + 'static,
        B: Message + Default + 'static,
    {
        let request = self.prepare(messages.into_streaming_request()).await?;
        let codec = ProstCodec::<A, B>::default();
        Ok(self.grpc.client_streaming(request, PathAndQuery::from_static(path), codec).await?.into_inner())
    }

    /// Sends messages while others come.
    ///
    /// # Errors
    /// The peer's status.
    pub async fn streaming<A, B>(
        &mut self,
        path: &'static str,
        messages: impl IntoStreamingRequest<Message = A>,
    ) -> Result<Streaming<B>, Status>
    where
        A: Message + 'static,
        B: Message + Default + 'static,
    {
        let request = self.prepare(messages.into_streaming_request()).await?;
        let codec = ProstCodec::<A, B>::default();
        Ok(self.grpc.streaming(request, PathAndQuery::from_static(path), codec).await?.into_inner())
    }

    /// Adds the token, and waits until the connection takes a call.
    async fn prepare<T>(&mut self, mut request: tonic::Request<T>) -> Result<tonic::Request<T>, Status> {
        let value = authorization(&self.token).map_err(|error| Status::unauthenticated(telemetry::chain(&error)))?;
        request.metadata_mut().insert("authorization", value);
        self.grpc.ready().await.map_err(|error| Status::unavailable(telemetry::chain(&error)))?;
        Ok(request)
    }
}

fn authorization(token: &Path) -> Result<MetadataValue<Ascii>, GrpcError> {
    let unfit = || GrpcError::Token { path: token.to_owned() };
    let text = read(token)?;
    let text = str::from_utf8(&text).map_err(|_unfit| unfit())?.trim();
    let value = (!text.is_empty()).then(|| format!("Bearer {text}").parse().ok()).flatten();
    let mut value: MetadataValue<Ascii> = value.ok_or_else(unfit)?;
    value.set_sensitive(true);
    Ok(value)
}

fn read(path: &Path) -> Result<Vec<u8>, GrpcError> {
    std::fs::read(path).map_err(|source| GrpcError::Read { path: path.to_owned(), source })
}

impl GrpcService<Body> for Channel {
    type ResponseBody = Incoming;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::NamedTempFile;

    use super::*;

    fn file(text: &str) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn a_token_is_one_line_with_or_without_a_line_break() {
        for good in ["token", "token\n"] {
            assert_eq!(authorization(file(good).path()).unwrap(), "Bearer token");
        }
        for wrong in ["", "\n", "to\nken"] {
            let refused = authorization(file(wrong).path());
            assert!(matches!(refused, Err(GrpcError::Token { .. })), "{wrong:?}");
        }
    }

    #[test]
    fn a_peer_needs_a_host_an_authority_and_a_token() {
        let (token, none) = (file("token"), file("-----BEGIN NOTHING-----\n"));
        let refused = Peer::new("a", Authorities::File(none.path()), token.path()).unwrap_err();
        assert!(matches!(refused, GrpcError::Authority { .. }), "{refused}");
        let refused = Peer::new("a b", Authorities::Pem(""), token.path()).unwrap_err();
        assert!(matches!(refused, GrpcError::Host { .. }), "{refused}");
        let missing = token.path().with_extension("missing");
        let refused = Peer::new("a", Authorities::Pem(""), &missing).unwrap_err();
        assert!(matches!(refused, GrpcError::Read { .. }), "{refused}");
    }
}
