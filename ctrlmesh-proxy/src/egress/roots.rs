//! The certificate authorities by which servers are verified that the proxy itself speaks TLS to.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::sync::Mutex;
use tokio::task;
use tokio::time::Instant;

use super::pod_files::PodFiles;
use crate::net::tls;

/// Where systems keep them: Debian and Alpine, Fedora, openSUSE, and others (Go's `crypto/x509/root_linux.go`).
static BUNDLES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A larger bundle is not read, in bytes. Mozilla's has some 220,000.
const MAX_BUNDLE_BYTES: usize = 1 << 20;

/// For so long, a bundle is not read again.
const KEPT: Duration = Duration::from_mins(1);

/// The authorities that a pod's image trusts; Mozilla's where it has none.
#[derive(Debug, Default)]
pub(super) struct Roots(Mutex<Option<(Instant, Arc<ClientConfig>)>>);

impl Roots {
    /// For a connection that begins now.
    ///
    /// # Errors
    /// If the bundle cannot be read in time.
    pub(super) async fn client(&self, files: &PodFiles) -> io::Result<Arc<ClientConfig>> {
        // Locked while it is read, so that one reads for all.
        let mut last = self.0.lock().await;
        if let Some((_, client)) = last.as_ref().filter(|(read, _)| read.elapsed() < KEPT) {
            return Ok(client.clone());
        }
        let bundle = files.read(&BUNDLES, MAX_BUNDLE_BYTES).await?;
        let made = task::spawn_blocking(move || client(bundle.as_deref())).await.map_err(io::Error::other)?;
        let made = Arc::new(made.map_err(io::Error::other)?);
        *last = Some((Instant::now(), made.clone()));
        drop(last);
        Ok(made)
    }
}

/// Certificates that cannot be read are left out, as other programs do.
fn client(bundle: Option<&[u8]>) -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    match bundle {
        Some(bundle) => drop(roots.add_parsable_certificates(CertificateDer::pem_slice_iter(bundle).flatten())),
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    let builder = ClientConfig::builder_with_provider(tls::provider()).with_protocol_versions(tls::VERSIONS)?;
    let mut client = builder.with_root_certificates(roots).with_no_client_auth();
    client.alpn_protocols = vec![tls::ALPN_HTTP1.to_vec()];
    Ok(client)
}
