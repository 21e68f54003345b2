//! TLS towards operators and towards the API server.

pub mod issue;
pub mod stream;
pub mod trust;
pub mod unverified;

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use ctrlmesh_runtime::tls;
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ResolvesServerCert, WebPkiClientVerifier};
use thiserror::Error;

pub use ctrlmesh_runtime::tls::{ALPN_HTTP1, ALPN_HTTP2, VERSIONS, provider};

#[derive(Debug, Error)]
pub enum TlsError {
    #[error("read `{path}`")]
    Read { path: PathBuf, source: io::Error },
    #[error("read PEM from `{path}`")]
    Pem { path: PathBuf, source: rustls_pki_types::pem::Error },
    #[error("`{path}` holds no certificate")]
    NoCertificate { path: PathBuf },
    #[error("issue a certificate with the mesh CA `{path}`")]
    Issue { path: PathBuf, source: rcgen::Error },
    /// The TLS library refuses the certificate, the key, or both together.
    #[error("use the certificates of `{path}`")]
    Refused { path: PathBuf, source: rustls::Error },
    /// A name that the certificate should carry is neither a DNS name nor an address.
    #[error("`{name}` is not a name that a certificate can carry")]
    Name { name: String },
}

/// TLS towards operators; `protocols` are offered by ALPN.
pub fn server(certificates: Arc<dyn ResolvesServerCert>, protocols: &[&[u8]]) -> Result<ServerConfig, rustls::Error> {
    server_for(WebPkiClientVerifier::no_client_auth(), certificates, protocols)
}

/// Does the same with client certificates that `verifier` checks.
pub fn server_for(
    verifier: Arc<dyn ClientCertVerifier>,
    certificates: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    tls::server(provider(), verifier, certificates, protocols)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}
