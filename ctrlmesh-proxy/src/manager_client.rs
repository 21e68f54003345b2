//! How is the manager reached?
//!
//! Over HTTP/2 and TLS, believed by a certificate authority of its own, with the pod's token in every call. The token
//! and the authority are read anew for each connection: both change under a proxy that runs for long.

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

pub use args::{Address, AddressError, ManagerArgs, Told};

/// How long it may take to connect where the manager's name leads.
const CONNECT: Duration = Duration::from_secs(5);

/// How long TLS may take then: a manager that is back has ten thousand others to begin with, and who gives up costs it what
/// was done until then.
const SECURE: Duration = Duration::from_secs(10);

/// How long until somebody is where the manager was when the proxy began.
const REACH: Duration = Duration::from_secs(2);

/// How long the manager may take to begin an answer: it may have to ask the API server about the token.
const ANSWER: Duration = Duration::from_secs(15);

/// How often a silent manager is asked whether it is still there, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// How the manager is reached.
#[derive(Clone, Debug)]
pub struct Manager {
    /// Where it is, and what it is called.
    pub address: Address,
    /// Where it is looked for before its name is.
    pub at: Option<IpAddr>,
    /// Who vouches for it.
    pub ca: PathBuf,
    /// Who the proxy is.
    pub token: PathBuf,
    /// Where what it said is kept.
    pub state: PathBuf,
}

/// A connection to the manager.
#[derive(Debug)]
pub struct Link {
    grpc: Grpc<Channel>,
    authorization: MetadataValue<Ascii>,
}

/// Why the manager was not reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A file cannot be read.
    #[error("read `{path}`")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The authority's file holds none.
    #[error("read a certificate authority from `{path}`")]
    Ca {
        /// Which.
        path: PathBuf,
    },
    /// The token's file holds none.
    #[error("`{path}` holds no token")]
    Token {
        /// Which.
        path: PathBuf,
    },
    /// The host is neither a DNS name nor an address.
    #[error("`{host}` is no host")]
    Host {
        /// What it is.
        host: String,
    },
    /// The TLS library does not do what is needed.
    #[error("set up TLS")]
    Library(#[source] rustls::Error),
    /// The manager cannot be connected to, or is not who it should be.
    #[error("connect to the manager")]
    Connect(#[source] io::Error),
    /// It did not answer in time.
    #[error("connect to the manager in time")]
    Late,
    /// It does not speak HTTP/2.
    #[error("begin HTTP/2 with the manager")]
    Http(#[source] hyper::Error),
}

/// What sends gRPC calls.
#[derive(Debug)]
struct Channel(http2::SendRequest<Body>);

// === impl Manager ===

impl Manager {
    /// Connects; what the connection is made of ends with `drain`.
    ///
    /// # Errors
    /// Where the manager is not there, or not who it should be.
    pub async fn connect(&self, drain: &Drain) -> Result<Link, ConnectError> {
        Box::pin(self.open(None, drain)).await
    }

    /// The same, over a connection to the manager that somebody else has made: from another address, say.
    ///
    /// # Errors
    /// Where the manager is not who it should be.
    pub async fn connect_over(
        &self,
        stream: TcpStream,
        drain: &Drain,
    ) -> Result<Link, ConnectError> {
        Box::pin(self.open(Some(stream), drain)).await
    }

    async fn open(&self, made: Option<TcpStream>, drain: &Drain) -> Result<Link, ConnectError> {
        let tls = self.tls()?;
        let authorization = self.authorization()?;
        let Address { host, port } = &self.address;
        let unfit = || ConnectError::Host { host: host.clone() };
        let name = ServerName::try_from(host.clone()).map_err(|_unfit| unfit())?;
        let authority =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let origin = Uri::builder().scheme(Scheme::HTTPS).authority(authority).path_and_query("/");
        let origin = origin.build().map_err(|_unfit| unfit())?;
        let stream = match made {
            Some(stream) => secured(future::ready(Ok(stream)), CONNECT, &tls, &name).await,
            None => self.reach(&tls, &name).await,
        };
        let stream = stream.map_err(ConnectError::Connect)?;
        let mut http2 = http2::Builder::new(Tasks(drain.clone()));
        http2
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true);
        let begun = Box::pin(http2.handshake(TokioIo::new(stream)));
        let begun = time::timeout(CONNECT, begun).await.map_err(|_elapsed| ConnectError::Late)?;
        let (sender, connection) = begun.map_err(ConnectError::Http)?;
        drain.spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = &error as &dyn std::error::Error, "connection to the manager broke");
            }
        });
        let grpc = Grpc::with_origin(Channel(sender), origin)
            .max_decoding_message_size(wire::MAX_UPDATE_BYTES);
        Ok(Link { grpc, authorization })
    }

    /// Connects to the address that it had; where nobody is there, or another, it is looked for by its name, which leads
    /// to a Service that was made anew.
    async fn reach(
        &self,
        tls: &TlsConnector,
        name: &ServerName<'static>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let Address { host, port } = &self.address;
        let by_name = || secured(TcpStream::connect((host.as_str(), *port)), CONNECT, tls, name);
        let Some(address) = self.at else { return by_name().await };
        match secured(TcpStream::connect((address, *port)), REACH, tls, name).await {
            Ok(stream) => Ok(stream),
            Err(there) => by_name().await.map_err(|error| {
                io::Error::new(error.kind(), format!("at {address}: {there}; by its name: {error}"))
            }),
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

// === impl Link ===

impl Link {
    /// Begins to be told policies; `reports` begins with a hello. `voucher` is the last that the manager gave, or empty.
    ///
    /// # Errors
    /// Where the manager refuses, or is not there any more.
    pub async fn follow(
        &mut self,
        reports: ReceiverStream<Report>,
        voucher: &[u8],
    ) -> Result<Streaming<Update>, Status> {
        let mut request = self.request(reports);
        if (1..=wire::MAX_VOUCHER_BYTES).contains(&voucher.len()) {
            let mut value = MetadataValue::from_bytes(voucher);
            value.set_sensitive(true);
            request.metadata_mut().insert_bin(wire::VOUCHER, value);
        }
        self.ready().await?;
        let codec = ProstCodec::<Report, Update>::default();
        let path = PathAndQuery::from_static(wire::FOLLOW);
        in_time(self.grpc.streaming(request, path, codec)).await
    }

    /// Has a certificate signing request (DER) signed; gives the chain, in DER, leaf first.
    ///
    /// # Errors
    /// Where the manager refuses, or is not there any more.
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

/// A connection to whoever proves to be `name`, where somebody is reached `within` that time.
async fn secured(
    reach: impl Future<Output = io::Result<TcpStream>>,
    within: Duration,
    tls: &TlsConnector,
    name: &ServerName<'static>,
) -> io::Result<TlsStream<TcpStream>> {
    let late = |_elapsed| io::Error::from(io::ErrorKind::TimedOut);
    let stream = time::timeout(within, reach).await.map_err(late)??;
    stream.set_nodelay(true)?;
    time::timeout(SECURE, Box::pin(tls.connect(name.clone(), stream))).await.map_err(late)?
}

async fn in_time<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match time::timeout(ANSWER, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_elapsed) => Err(Status::deadline_exceeded("the manager does not answer")),
    }
}

// === impl Channel ===

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

/// Runs the parts of a connection.
#[derive(Clone, Debug)]
struct Tasks(Drain);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}
