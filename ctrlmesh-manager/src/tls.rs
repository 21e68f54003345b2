//! How does the manager begin TLS with those who ask it?

use std::sync::{Arc, PoisonError, RwLock};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{CipherSuite, ServerConfig};

/// HTTP/2 as ALPN names it.
pub const ALPN_HTTP2: &[u8] = b"h2";

/// HTTP/1.1 as ALPN names it.
pub const ALPN_HTTP1: &[u8] = b"http/1.1";

/// The certificate that is presented now. Connections keep the one that they began with.
#[derive(Debug)]
pub struct Presented(RwLock<Arc<CertifiedKey>>);

/// The one cryptographic library in use. AES-128 first: its handshake hashes by SHA-256, which processors have instructions
/// for, and ten thousand proxies may come together.
pub fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites.sort_by_key(|one| one.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

/// How the manager presents itself to those who may speak `protocols`.
///
/// # Errors
/// Where the cryptographic library lacks what TLS needs.
pub fn server(
    presented: Arc<Presented>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .with_no_client_auth()
        .with_cert_resolver(presented);
    config.ignore_client_order = true;
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.ticketer = aws_lc_rs::Ticketer::new()?;
    // Each ticket is memory on both sides, and a proxy comes back once.
    config.send_tls13_tickets = 1;
    Ok(config)
}

// === impl Presented ===

impl Presented {
    /// Presents `key`.
    pub fn new(key: CertifiedKey) -> Self {
        Self(RwLock::new(Arc::new(key)))
    }

    /// Presents `key` from now on.
    pub fn replace(&self, key: CertifiedKey) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(key);
    }
}

impl ResolvesServerCert for Presented {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}
