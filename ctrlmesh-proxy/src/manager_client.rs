//! The gRPC connection to the manager.
//!
//! It runs over HTTP/2 and TLS, is verified by the manager's own CA, and carries the pod's token in every call. Token
//! and CA are read again for each connection, because both change while a proxy runs.

use std::future::{self, Future};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::wire::{self, Report, SignRequest, Signed, Update};
use http::uri::{PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::time;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;
use tracing::debug;

use ctrlmesh_runtime::drain::Drain;

mod args;
pub mod certificate;

pub use args::{Address, AddressError, ManagerArgs, ServiceAddress};

/// For connecting by the manager's name, and for the HTTP/2 preface.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For the TLS handshake. A manager that is back has ten thousand others to serve, and each aborted handshake costs it
/// work.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// For connecting to the Service's address, before its name is tried.
const SERVICE_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// For the beginning of an answer: the manager may have to ask the API server about the token.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Between HTTP/2 PINGs to a silent manager, and for its PONG.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// How to reach the manager, and the files that this takes.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub address: Address,
    /// The Service's address, which is tried before the name.
    pub service_ip: Option<IpAddr>,
    /// The CA of the manager's certificate, PEM.
    pub ca: PathBuf,
    /// The pod's token for the manager.
    pub token: PathBuf,
    /// The folder for policies and certificates from the manager.
    pub state: PathBuf,
}

/// A connection to the manager.
#[derive(Debug)]
pub struct Connection {
    grpc: Grpc<Channel>,
    authorization: MetadataValue<Ascii>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("read `{path}`")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("read a certificate authority from `{path}`")]
    Ca { path: PathBuf },
    #[error("`{path}` holds no token")]
    Token { path: PathBuf },
    /// The host is neither a DNS name nor an address.
    #[error("`{host}` is no host")]
    Host { host: String },
    #[error("set up TLS")]
    Library(#[source] rustls::Error),
    /// Includes a refused certificate.
    #[error("connect to the manager")]
    Connect(#[source] io::Error),
    #[error("connect to the manager in time")]
    Late,
    #[error("begin HTTP/2 with the manager")]
    Http(#[source] hyper::Error),
}

#[derive(Debug)]
struct Channel(http2::SendRequest<Body>);

impl Endpoint {
    /// The connection's tasks run on `drain`.
    pub async fn connect(&self, drain: &Drain) -> Result<Connection, ConnectError> {
        Box::pin(self.open(None, drain)).await
    }

    /// Uses a TCP connection that the caller has opened, for example from another address.
    pub async fn connect_over(&self, stream: TcpStream, drain: &Drain) -> Result<Connection, ConnectError> {
        Box::pin(self.open(Some(stream), drain)).await
    }

    async fn open(&self, tcp: Option<TcpStream>, drain: &Drain) -> Result<Connection, ConnectError> {
        let tls = self.tls()?;
        let authorization = self.authorization()?;
        let Address { host, port } = &self.address;
        let unfit = || ConnectError::Host { host: host.clone() };
        let name = ServerName::try_from(host.clone()).map_err(|_unfit| unfit())?;
        let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let origin = Uri::builder().scheme(Scheme::HTTPS).authority(authority).path_and_query("/");
        let origin = origin.build().map_err(|_unfit| unfit())?;
        let stream = match tcp {
            Some(stream) => secured(future::ready(Ok(stream)), CONNECT_TIMEOUT, &tls, &name).await,
            None => self.reach(&tls, &name).await,
        };
        let stream = stream.map_err(ConnectError::Connect)?;
        let mut http2 = http2::Builder::new(drain.clone());
        http2
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true);
        let begun = Box::pin(http2.handshake(TokioIo::new(stream)));
        let begun = time::timeout(CONNECT_TIMEOUT, begun).await.map_err(|_elapsed| ConnectError::Late)?;
        let (sender, connection) = begun.map_err(ConnectError::Http)?;
        drain.spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = &error as &dyn std::error::Error, "connection to the manager broke");
            }
        });
        let grpc = Grpc::with_origin(Channel(sender), origin).max_decoding_message_size(wire::MAX_UPDATE_BYTES);
        Ok(Connection { grpc, authorization })
    }

    /// Tries the Service's address first. Where that fails, the name may lead to a Service that was created anew.
    async fn reach(&self, tls: &TlsConnector, name: &ServerName<'static>) -> io::Result<TlsStream<TcpStream>> {
        let Address { host, port } = &self.address;
        let by_name = || secured(TcpStream::connect((host.as_str(), *port)), CONNECT_TIMEOUT, tls, name);
        let Some(address) = self.service_ip else { return by_name().await };
        match secured(TcpStream::connect((address, *port)), SERVICE_CONNECT_TIMEOUT, tls, name).await {
            Ok(stream) => Ok(stream),
            Err(there) => by_name()
                .await
                .map_err(|error| io::Error::new(error.kind(), format!("at {address}: {there}; by its name: {error}"))),
        }
    }

    fn tls(&self) -> Result<TlsConnector, ConnectError> {
        let failed = || ConnectError::Ca { path: self.ca.clone() };
        let pem = read(&self.ca)?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|_unfit| failed())?;
            roots.add(certificate).map_err(|_unfit| failed())?;
        }
        if roots.is_empty() {
            return Err(failed());
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(ConnectError::Library)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(TlsConnector::from(Arc::new(config)))
    }

    fn authorization(&self) -> Result<MetadataValue<Ascii>, ConnectError> {
        let failed = || ConnectError::Token { path: self.token.clone() };
        let text = read(&self.token)?;
        let text = std::str::from_utf8(&text).map_err(|_unfit| failed())?.trim();
        let value = (!text.is_empty()).then(|| format!("Bearer {text}").parse().ok()).flatten();
        let mut value: MetadataValue<Ascii> = value.ok_or_else(failed)?;
        value.set_sensitive(true);
        Ok(value)
    }
}

fn read(path: &PathBuf) -> Result<Vec<u8>, ConnectError> {
    std::fs::read(path).map_err(|source| ConnectError::Read { path: path.clone(), source })
}

impl Connection {
    /// Begins the stream of policies. `reports` begins with a hello; `ticket` is the manager's last one, or empty.
    pub async fn follow(
        &mut self,
        reports: ReceiverStream<Report>,
        ticket: &[u8],
    ) -> Result<Streaming<Update>, Status> {
        let mut request = self.request(reports);
        if (1..=wire::MAX_REVIEW_TICKET_BYTES).contains(&ticket.len()) {
            let mut value = MetadataValue::from_bytes(ticket);
            value.set_sensitive(true);
            request.metadata_mut().insert_bin(wire::REVIEW_TICKET, value);
        }
        self.ready().await?;
        let codec = ProstCodec::<Report, Update>::default();
        let path = PathAndQuery::from_static(wire::FOLLOW);
        in_time(self.grpc.streaming(request, path, codec)).await
    }

    /// Has a certificate signing request (DER) signed; returns the chain, leaf first.
    pub async fn sign(&mut self, request: &[u8]) -> Result<Vec<CertificateDer<'static>>, Status> {
        let request = self.request(SignRequest { request: Bytes::copy_from_slice(request) });
        self.ready().await?;
        let codec = ProstCodec::<SignRequest, Signed>::default();
        let path = PathAndQuery::from_static(wire::SIGN);
        let signed = in_time(self.grpc.unary(request, path, codec)).await?;
        Ok(signed.chain.into_iter().map(|one| CertificateDer::from(one.to_vec())).collect())
    }

    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("authorization", self.authorization.clone());
        request
    }

    async fn ready(&mut self) -> Result<(), Status> {
        self.grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))
    }
}

/// Connects within `timeout`, and verifies that the peer is `name`.
async fn secured(
    reach: impl Future<Output = io::Result<TcpStream>>,
    timeout: Duration,
    tls: &TlsConnector,
    name: &ServerName<'static>,
) -> io::Result<TlsStream<TcpStream>> {
    let late = |_elapsed| io::Error::from(io::ErrorKind::TimedOut);
    let stream = time::timeout(timeout, reach).await.map_err(late)??;
    stream.set_nodelay(true)?;
    time::timeout(HANDSHAKE_TIMEOUT, Box::pin(tls.connect(name.clone(), stream))).await.map_err(late)?
}

async fn in_time<T>(call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Status> {
    match time::timeout(ANSWER_TIMEOUT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_elapsed) => Err(Status::deadline_exceeded("the manager does not answer")),
    }
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
