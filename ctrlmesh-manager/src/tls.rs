//! The TLS settings of the manager's servers.

use std::sync::{Arc, RwLock};

use ctrlmesh_runtime::sync::{read, write};
use ctrlmesh_runtime::tls;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{CipherSuite, ServerConfig};

pub use ctrlmesh_runtime::tls::{ALPN_HTTP1, ALPN_HTTP2};

/// The current serving certificate. Open connections keep the one that they began with.
#[derive(Debug)]
pub struct Presented(RwLock<Arc<CertifiedKey>>);

/// Prefers AES-128: its handshake hashes with SHA-256, for which processors have instructions, and ten thousand proxies
/// may connect together.
pub fn provider() -> Arc<CryptoProvider> {
    let mut provider = tls::provider();
    let suites = &mut Arc::make_mut(&mut provider).cipher_suites;
    suites.sort_by_key(|one| one.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

/// A server without client certificates, which offers `protocols` by ALPN.
///
/// # Errors
/// If the cryptographic library lacks what TLS needs.
pub fn server(presented: Arc<Presented>, protocols: &[&[u8]]) -> Result<ServerConfig, rustls::Error> {
    let verifier = WebPkiClientVerifier::no_client_auth();
    let mut config = tls::server(provider(), verifier, presented, protocols)?;
    config.ignore_client_order = true;
    // Each ticket takes memory on both sides, and a proxy resumes once.
    config.send_tls13_tickets = 1;
    Ok(config)
}

impl Presented {
    pub fn new(key: CertifiedKey) -> Self {
        Self(RwLock::new(Arc::new(key)))
    }

    pub fn replace(&self, key: CertifiedKey) {
        *write(&self.0) = Arc::new(key);
    }
}

impl ResolvesServerCert for Presented {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(read(&self.0).clone())
    }
}
