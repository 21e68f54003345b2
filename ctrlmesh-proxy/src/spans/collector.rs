//! The connection to the OpenTelemetry collector: OTLP over gRPC, in the clear or with TLS by the scheme of its URL.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::traces::CollectorUrl;
use http::Uri;
use hyper_util::rt::TokioIo;
use opentelemetry_otlp::{RetryPolicy, SpanExporter, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tonic::transport::{Channel, Endpoint};

use super::SpanError;
use crate::net::tls;
use crate::net::tls::trust::Trust;

/// For opening a connection, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For one export.
pub(super) const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The port of OTLP over gRPC.
const PORT: u16 = 4317;

/// Who vouches for a collector's certificate.
#[derive(Clone, Debug)]
enum Authority {
    File(Arc<Trust>),
    /// Mozilla's CAs.
    Public(Arc<ClientConfig>),
}

/// A connection to a collector.
type Stream = TokioIo<Either<TcpStream, TlsStream<TcpStream>>>;

/// An exporter to the collector at `url`, whose certificate is signed by one of the CAs in the file `authority`.
/// It connects when it is first used, and again whenever a connection broke. An export that fails is not repeated.
pub(super) fn exporter(
    url: &CollectorUrl,
    authority: Option<&Path>,
    resource: &Resource,
    drain: &Drain,
) -> Result<SpanExporter, SpanError> {
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_channel(channel(url, authority, drain)?)
        .with_timeout(EXPORT_TIMEOUT)
        .with_retry_policy(RetryPolicy::disabled());
    let mut exporter = exporter.build()?;
    exporter.set_resource(resource);
    Ok(exporter)
}

impl Authority {
    fn new(file: Option<&Path>) -> Result<Self, SpanError> {
        if let Some(path) = file {
            return Ok(Self::File(Arc::new(Trust::load(path)?)));
        }
        let roots = webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect::<RootCertStore>();
        let builder = ClientConfig::builder_with_provider(tls::provider()).with_protocol_versions(tls::VERSIONS)?;
        let mut client = builder.with_root_certificates(roots).with_no_client_auth();
        client.alpn_protocols = vec![tls::ALPN_HTTP2.to_vec()];
        Ok(Self::Public(Arc::new(client)))
    }

    /// TLS for a connection that begins now.
    fn client(&self) -> Arc<ClientConfig> {
        match self {
            Self::File(trust) => {
                trust.refresh();
                trust.client().http2
            }
            Self::Public(client) => client.clone(),
        }
    }
}

/// The tasks of its connections run on `drain`.
fn channel(url: &CollectorUrl, authority: Option<&Path>, drain: &Drain) -> Result<Channel, SpanError> {
    let authority = url.is_secure().then(|| Authority::new(authority)).transpose()?;
    let endpoint = Endpoint::from(url.uri().clone()).executor(drain.clone());
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |url: Uri| open(url, authority.clone()))))
}

async fn open(url: Uri, authority: Option<Authority>) -> io::Result<Stream> {
    time::timeout(CONNECT_TIMEOUT, Box::pin(connect(url, authority))).await?
}

async fn connect(url: Uri, authority: Option<Authority>) -> io::Result<Stream> {
    let host = url.host().unwrap_or_default();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let stream = TcpStream::connect((host, url.port_u16().unwrap_or(PORT))).await?;
    stream.set_nodelay(true)?;
    let Some(authority) = authority else { return Ok(TokioIo::new(Either::Left(stream))) };
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let stream = TlsConnector::from(authority.client()).connect(name, stream).await?;
    Ok(TokioIo::new(Either::Right(stream)))
}
