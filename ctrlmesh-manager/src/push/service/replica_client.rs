//! A gRPC client for another replica.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ctrlmesh_common::wire::{self, Receipts, Relayed, ShardReply, ShardRequest};
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

use crate::drain::Drain;
use crate::telemetry;
use crate::tls;

/// TLS handshake included.
const CONNECT: Duration = Duration::from_secs(5);

/// Interval of HTTP/2 pings, and how long their answer may take.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// One connection; clones share it.
#[derive(Clone, Debug)]
pub(super) struct ReplicaClient {
    grpc: Grpc<Channel>,
    token: Arc<Path>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReplicaClientError {
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

#[derive(Clone, Debug)]
struct Channel(http2::SendRequest<Body>);

impl ReplicaClient {
    /// Connects to `address`. The peer must have a certificate for `name`, signed by an authority of `bundle` (PEM).
    pub(super) async fn connect(
        address: &str,
        name: &str,
        bundle: &str,
        token: &Path,
        drain: &Drain,
    ) -> Result<Self, ReplicaClientError> {
        // Fails early without a token.
        authorization(token)?;
        let unfit = |text: &str| ReplicaClientError::Unfit { text: text.to_owned() };
        let host = ServerName::try_from(name.to_owned()).map_err(|_unfit| unfit(name))?;
        let origin: Uri = format!("https://{name}").parse().map_err(|_unfit| unfit(name))?;
        let tls = connector(bundle)?;
        let open = async {
            let stream = TcpStream::connect(address).await.map_err(ReplicaClientError::Connect)?;
            Box::pin(tls.connect(host, stream)).await.map_err(ReplicaClientError::Connect)
        };
        let stream = time::timeout(CONNECT, open).await.map_err(|_elapsed| ReplicaClientError::Late)??;
        let mut http2 = http2::Builder::new(drain.clone());
        http2.timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE);
        let begun = Box::pin(http2.handshake(TokioIo::new(stream))).await;
        let (sender, connection) = begun.map_err(ReplicaClientError::Http)?;
        drain.spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = telemetry::chain(&error), "connection to another replica broke");
            }
        });
        Ok(Self { grpc: Grpc::with_origin(Channel(sender), origin), token: Arc::from(token) })
    }

    /// Sends receipts until the channel closes or the peer ends the call.
    pub(super) async fn relay(&mut self, receipts: mpsc::Receiver<Receipts>) -> Result<(), ReplicaClientError> {
        let request = self.signed(ReceiverStream::new(receipts))?;
        self.grpc.ready().await.map_err(ReplicaClientError::Http)?;
        let codec = ProstCodec::<Receipts, Relayed>::default();
        let path = PathAndQuery::from_static(wire::RELAY);
        self.grpc.client_streaming(request, path, codec).await?;
        Ok(())
    }

    pub(super) async fn assign_shard(&mut self, pod: ShardRequest) -> Result<ShardReply, ReplicaClientError> {
        let request = self.signed(pod)?;
        self.grpc.ready().await.map_err(ReplicaClientError::Http)?;
        let codec = ProstCodec::<ShardRequest, ShardReply>::default();
        let path = PathAndQuery::from_static(wire::ASSIGN_SHARD);
        Ok(self.grpc.unary(request, path, codec).await?.into_inner())
    }

    /// Reads the token again: the connection may outlive it.
    fn signed<T>(&self, what: T) -> Result<tonic::Request<T>, ReplicaClientError> {
        let mut request = tonic::Request::new(what);
        request.metadata_mut().insert("authorization", authorization(&self.token)?);
        Ok(request)
    }
}

/// The `authorization` header with this replica's token.
fn authorization(token: &Path) -> Result<MetadataValue<Ascii>, ReplicaClientError> {
    let text = std::fs::read_to_string(token)
        .map_err(|source| ReplicaClientError::Token { path: token.to_owned(), source })?;
    let unfit = |_| ReplicaClientError::Unfit { text: "the content of the file".to_owned() };
    format!("Bearer {}", text.trim()).parse().map_err(unfit)
}

fn connector(bundle: &str) -> Result<TlsConnector, ReplicaClientError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        let unfit = |_| ReplicaClientError::Unfit { text: "the authority".to_owned() };
        roots.add(certificate.map_err(unfit)?).map_err(ReplicaClientError::Library)?;
    }
    let mut config = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(ReplicaClientError::Library)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![tls::ALPN_HTTP2.to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
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
