//! How does the manager begin TLS with those who ask it?

use std::sync::{Arc, RwLock};

use ctrlmesh_runtime::sync::{read, write};
use ctrlmesh_runtime::tls;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{CipherSuite, ServerConfig};

pub use ctrlmesh_runtime::tls::{ALPN_HTTP1, ALPN_HTTP2};

/// The certificate that is presented now. Connections keep the one that they began with.
#[derive(Debug)]
pub struct Presented(RwLock<Arc<CertifiedKey>>);

/// The one cryptographic library in use. AES-128 first: its handshake hashes by SHA-256, which processors have
/// instructions for, and ten thousand proxies may come together.
pub fn provider() -> Arc<CryptoProvider> {
    let mut provider = tls::provider();
    let suites = &mut Arc::make_mut(&mut provider).cipher_suites;
    suites.sort_by_key(|one| one.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

/// How the manager presents itself to those who may speak `protocols`.
///
/// # Errors
/// Where the cryptographic library lacks what TLS needs.
pub fn server(
    presented: Arc<Presented>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    let verifier = WebPkiClientVerifier::no_client_auth();
    let mut config = tls::server(provider(), verifier, presented, protocols)?;
    config.ignore_client_order = true;
    // Each ticket is memory on both sides, and a proxy comes back once.
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
