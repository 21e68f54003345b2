//! Verifies the API server by a CA file.
//!
//! Verification cannot be switched off. The file is read again when it changes; open connections stay.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use ctrlmesh_runtime::sync::{read, write};
use rustls::client::ResolvesClientCert;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::time;
use tracing::{info, warn};

use crate::net::tls;
use crate::net::tls::TlsError;
use ctrlmesh_runtime::drain::Drain;

const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The certificate authorities of the API server.
#[derive(Debug)]
pub struct Trust {
    path: PathBuf,
    identity: Option<Arc<dyn ResolvesClientCert>>,
    current: RwLock<Current>,
}

/// TLS towards the API server, for each protocol.
#[derive(Clone, Debug)]
pub struct Client {
    /// Offers HTTP/1.1 only.
    pub http1: Arc<ClientConfig>,
    /// Offers HTTP/2 only.
    pub http2: Arc<ClientConfig>,
}

#[derive(Debug)]
struct Current {
    client: Client,
    made_from: Vec<u8>,
}

impl Trust {
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        Self::load_for(path, None)
    }

    /// `identity` is the client certificate that the proxy presents.
    pub fn load_for(path: &Path, identity: Option<Arc<dyn ResolvesClientCert>>) -> Result<Self, TlsError> {
        let pem = tls::read(path)?;
        let client = client(path, &pem, identity.clone())?;
        let current = RwLock::new(Current { client, made_from: pem });
        Ok(Self { path: path.to_owned(), identity, current })
    }

    /// For the next connection.
    pub fn client(&self) -> Client {
        read(&self.current).client.clone()
    }

    /// Follows the file until shutdown. A file that cannot be read changes nothing.
    pub async fn follow(self: Arc<Self>, drain: Drain) {
        let mut ticks = time::interval(FILE_CHECK_INTERVAL);
        loop {
            tokio::select! {
                () = drain.started() => return,
                _ = ticks.tick() => self.refresh(),
            }
        }
    }

    /// Also called when the API server's certificate was refused.
    pub fn refresh(&self) {
        let replaced = tls::read(&self.path).and_then(|pem| {
            if read(&self.current).made_from == pem {
                return Ok(None);
            }
            let client = client(&self.path, &pem, self.identity.clone())?;
            Ok(Some(Current { client, made_from: pem }))
        });
        match replaced {
            Ok(Some(current)) => {
                *write(&self.current) = current;
                info!("upstream certificate authorities replaced");
            }
            Ok(None) => {}
            Err(error) => warn!(error = &error as &dyn std::error::Error, "upstream certificate authorities kept"),
        }
    }
}

fn client(path: &Path, pem: &[u8], identity: Option<Arc<dyn ResolvesClientCert>>) -> Result<Client, TlsError> {
    let refused = |source| TlsError::Refused { path: path.to_owned(), source };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|source| TlsError::Pem { path: path.to_owned(), source })?;
        roots.add(certificate).map_err(refused)?;
    }
    if roots.is_empty() {
        return Err(TlsError::NoCertificate { path: path.to_owned() });
    }
    let builder = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(tls::VERSIONS)
        .map_err(refused)?
        .with_root_certificates(roots);
    let mut http1 = match identity {
        Some(identity) => builder.with_client_cert_resolver(identity),
        None => builder.with_no_client_auth(),
    };
    let mut http2 = http1.clone();
    http1.alpn_protocols = vec![tls::ALPN_HTTP1.to_vec()];
    http2.alpn_protocols = vec![tls::ALPN_HTTP2.to_vec()];
    Ok(Client { http1: Arc::new(http1), http2: Arc::new(http2) })
}
