//! How is TLS ended towards the operator, and begun anew towards the API server?

pub mod issue;
pub mod stream;
pub mod trust;

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

/// How the proxy presents itself to an operator that may speak `protocols`.
///
/// # Errors
/// If the cryptographic library lacks what TLS 1.2 and 1.3 need.
pub fn server(
    certificates: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    server_for(WebPkiClientVerifier::no_client_auth(), certificates, protocols)
}

/// The same to operators whose certificates `verifier` asks for.
///
/// # Errors
/// If the cryptographic library lacks what TLS 1.2 and 1.3 need.
pub fn server_for(
    verifier: Arc<dyn ClientCertVerifier>,
    certificates: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    tls::server(provider(), verifier, certificates, protocols)
}

/// Reads a whole file; the error names it.
fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}
