//! The TLS settings that proxy and manager share.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::ResolvesServerCert;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ServerConfig, SupportedProtocolVersion};

pub const ALPN_HTTP2: &[u8] = b"h2";

pub const ALPN_HTTP1: &[u8] = b"http/1.1";

/// The versions that the API server itself speaks.
pub const VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13, &rustls::version::TLS12];

/// The one cryptographic library in use.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// A server that shows `certificates` and offers `protocols` by ALPN.
///
/// # Errors
/// If `provider` lacks what TLS 1.2 and 1.3 need.
pub fn server(
    provider: Arc<CryptoProvider>,
    verifier: Arc<dyn ClientCertVerifier>,
    certificates: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(VERSIONS)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificates);
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.ticketer = aws_lc_rs::Ticketer::new()?;
    Ok(config)
}
