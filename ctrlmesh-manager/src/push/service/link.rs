//! How does one replica call another?

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ctrlmesh_common::wire::{self, Receipts, Relayed, Seat, Seated};
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::metadata::{Ascii, MetadataValue};
use tonic_prost::ProstCodec;
use tracing::debug;

use super::Tasks;
use crate::drain::Drain;
use crate::telemetry;
use crate::tls;

/// How long it may take to connect, TLS included.
const CONNECT: Duration = Duration::from_secs(5);

/// How often a silent leader is asked whether it is still there, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// A connection to another replica; clones share it.
#[derive(Clone, Debug)]
pub(super) struct Link {
    grpc: Grpc<Channel>,
    token: Arc<Path>,
}

/// Why another replica was not told.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("read the token `{path}`")]
    Token {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("`{text}` is no token, host or authority")]
    Unfit { text: String },
    #[error("set up TLS")]
    Library(#[source] rustls::Error),
    #[error("connect")]
    Connect(#[source] io::Error),
    #[error("connect in time")]
    Late,
    #[error("begin HTTP/2")]
    Http(#[source] hyper::Error),
    #[error("it says: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
}

/// What sends gRPC calls.
#[derive(Clone, Debug)]
struct Channel(http2::SendRequest<Body>);

// === impl Link ===

impl Link {
    /// Connects to `address`, where one that is called `name` is to be, and `bundle` (PEM) vouches for it.
    pub(super) async fn connect(
        address: &str,
        name: &str,
        bundle: &str,
        token: &Path,
        drain: &Drain,
    ) -> Result<Self, LinkError> {
        // Who cannot say who it is need not connect.
        authorization(token)?;
        let unfit = |text: &str| LinkError::Unfit { text: text.to_owned() };
        let host = ServerName::try_from(name.to_owned()).map_err(|_unfit| unfit(name))?;
        let origin: Uri = format!("https://{name}").parse().map_err(|_unfit| unfit(name))?;
        let tls = connector(bundle)?;
        let open = async {
            let stream = TcpStream::connect(address).await.map_err(LinkError::Connect)?;
            Box::pin(tls.connect(host, stream)).await.map_err(LinkError::Connect)
        };
        let stream = time::timeout(CONNECT, open).await.map_err(|_elapsed| LinkError::Late)??;
        let mut http2 = http2::Builder::new(Tasks(drain.clone()));
        http2.timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE);
        let begun = Box::pin(http2.handshake(TokioIo::new(stream))).await;
        let (sender, connection) = begun.map_err(LinkError::Http)?;
        drain.spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = telemetry::chain(&error), "connection to another replica broke");
            }
        });
        Ok(Self { grpc: Grpc::with_origin(Channel(sender), origin), token: Arc::from(token) })
    }

    /// Sends what comes, until it ends or the other replica wants no more.
    pub(super) async fn relay(
        &mut self,
        receipts: mpsc::Receiver<Receipts>,
    ) -> Result<(), LinkError> {
        let request = self.signed(ReceiverStream::new(receipts))?;
        self.grpc.ready().await.map_err(LinkError::Http)?;
        let codec = ProstCodec::<Receipts, Relayed>::default();
        let path = PathAndQuery::from_static(wire::RELAY);
        self.grpc.client_streaming(request, path, codec).await?;
        Ok(())
    }

    /// Asks the other replica for a shard.
    pub(super) async fn seat(&mut self, pod: Seat) -> Result<Seated, LinkError> {
        let request = self.signed(pod)?;
        self.grpc.ready().await.map_err(LinkError::Http)?;
        let codec = ProstCodec::<Seat, Seated>::default();
        let path = PathAndQuery::from_static(wire::SEAT);
        Ok(self.grpc.unary(request, path, codec).await?.into_inner())
    }

    /// With the token as it is now: the connection may outlive it.
    fn signed<T>(&self, what: T) -> Result<tonic::Request<T>, LinkError> {
        let mut request = tonic::Request::new(what);
        request.metadata_mut().insert("authorization", authorization(&self.token)?);
        Ok(request)
    }
}

/// What says who this replica is, by its token.
fn authorization(token: &Path) -> Result<MetadataValue<Ascii>, LinkError> {
    let text = std::fs::read_to_string(token)
        .map_err(|source| LinkError::Token { path: token.to_owned(), source })?;
    let unfit = |_| LinkError::Unfit { text: "the content of the file".to_owned() };
    format!("Bearer {}", text.trim()).parse().map_err(unfit)
}

fn connector(bundle: &str) -> Result<TlsConnector, LinkError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        let unfit = |_| LinkError::Unfit { text: "the authority".to_owned() };
        roots.add(certificate.map_err(unfit)?).map_err(LinkError::Library)?;
    }
    let mut config = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(LinkError::Library)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![tls::ALPN_HTTP2.to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
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
