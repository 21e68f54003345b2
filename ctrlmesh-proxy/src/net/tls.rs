//! How is TLS ended towards the operator, and begun anew towards the API server?

pub mod issue;
pub mod stream;
pub mod trust;

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ResolvesServerCert, WebPkiClientVerifier};
use rustls::{ServerConfig, SupportedProtocolVersion};
use thiserror::Error;

/// HTTP/2 as ALPN names it.
pub const ALPN_HTTP2: &[u8] = b"h2";

/// HTTP/1.1 as ALPN names it.
pub const ALPN_HTTP1: &[u8] = b"http/1.1";

/// What the API server itself speaks.
const VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13, &rustls::version::TLS12];

/// Why certificates and keys could not be made ready.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file could not be read.
    #[error("read `{path}`")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file holds no PEM of the wanted kind.
    #[error("read PEM from `{path}`")]
    Pem {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: rustls_pki_types::pem::Error,
    },
    /// A file holds no certificate at all.
    #[error("`{path}` holds no certificate")]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// A certificate could not be issued by the mesh CA.
    #[error("issue a certificate with the mesh CA `{path}`")]
    Issue {
        /// The CA's certificate.
        path: PathBuf,
        /// Why.
        #[source]
        source: rcgen::Error,
    },
    /// The TLS library refuses a certificate, a key or both together.
    #[error("use the certificates of `{path}`")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: rustls::Error,
    },
    /// A name that the certificate should carry is neither a DNS name nor an address.
    #[error("`{name}` is not a name that a certificate can carry")]
    Name {
        /// The name.
        name: String,
    },
}

/// The one cryptographic library in use.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// How the proxy presents itself to an operator that may speak `protocols`.
///
/// # Errors
///
/// Fails when the cryptographic library lacks what TLS 1.2 and 1.3 need.
pub fn server(
    certificates: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    server_for(WebPkiClientVerifier::no_client_auth(), certificates, protocols)
}

/// The same to operators whose certificates `verifier` asks for.
///
/// # Errors
///
/// Fails when the cryptographic library lacks what TLS 1.2 and 1.3 need.
pub fn server_for(
    verifier: Arc<dyn ClientCertVerifier>,
    certificates: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificates);
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.ticketer = aws_lc_rs::Ticketer::new()?;
    Ok(config)
}

/// Reads a whole file; the error names it.
fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}
