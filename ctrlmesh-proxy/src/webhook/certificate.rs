//! The certificate of an operator's webhook, read from its container.

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::policy::Webhook;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::egress::PodFiles;
use crate::net::tls;

/// The name by which a proxy calls another. No webhook has it: a Service in `default` has it already.
pub(crate) const PEER_NAME: &str = "kubernetes.default.svc";

/// For so long, the files are not read again.
const KEPT: Duration = Duration::from_secs(1);

/// A larger file is none, in bytes.
const MAX_FILE_BYTES: usize = 256 << 10;

/// The certificate that was read last.
#[derive(Debug, Default)]
pub(super) struct Certificate(Mutex<Option<Last>>);

#[derive(Debug)]
struct Last {
    read_at: Instant,
    paths: [String; 2],
    /// The contents of both files.
    made_from: Option<Vec<Vec<u8>>>,
    /// Stays where the files cannot be used: they may be half replaced.
    tls: Option<Arc<ServerConfig>>,
}

/// The operator's certificate, and the mesh's for other proxies.
#[derive(Debug)]
struct Certificates {
    operator: Arc<CertifiedKey>,
    mesh: Arc<dyn ResolvesServerCert>,
}

impl Certificate {
    /// TLS with the certificate that is there now, or was there last; `None` where there has been none.
    pub(super) async fn latest(
        &self,
        pod: &str,
        webhook: &Webhook,
        files: &PodFiles,
        mesh: &Arc<dyn ResolvesServerCert>,
    ) -> Option<Arc<ServerConfig>> {
        let paths = [webhook.certificate.clone(), webhook.key.clone()];
        // Locked while it is read, so that one reads for all.
        let mut last = self.0.lock().await;
        let before = last.take().filter(|last| last.paths == paths);
        let latest = match before {
            Some(last) if last.read_at.elapsed() < KEPT => last,
            before => Last::read(before, pod, paths, files, mesh).await,
        };
        last.insert(latest).tls.clone()
    }
}

impl Last {
    async fn read(
        before: Option<Self>,
        pod: &str,
        paths: [String; 2],
        files: &PodFiles,
        mesh: &Arc<dyn ResolvesServerCert>,
    ) -> Self {
        // Where it takes too long, too.
        let read = files.read_all(paths.clone(), MAX_FILE_BYTES).await.ok().flatten();
        let (read_at, is_first) = (Instant::now(), before.is_none());
        let (made_from, tls) = before.map_or((None, None), |before| (before.made_from, before.tls));
        if read.is_none() && is_first {
            warn!(pod, files = ?paths, "the certificate of the pod's webhook is not found yet: its calls pass unread");
        }
        let Some(contents) = read.filter(|contents| made_from.as_ref() != Some(contents)) else {
            return Self { read_at, paths, made_from, tls };
        };
        let tls = match server(&contents, mesh.clone()) {
            Ok(made) => {
                info!(pod, files = ?paths, "certificate of the pod's webhook read");
                Some(Arc::new(made))
            }
            Err(error) => {
                warn!(pod, files = ?paths, error, "the certificate of the pod's webhook cannot be used");
                tls
            }
        };
        Self { read_at, paths, made_from: Some(contents), tls }
    }
}

/// # Errors
/// Says what is wrong with the files, and nothing of what is in them: the library's own error may quote a key.
fn server(contents: &[Vec<u8>], mesh: Arc<dyn ResolvesServerCert>) -> Result<ServerConfig, &'static str> {
    let [certificate, key] = contents else { return Err("there are not two files") };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
    let chain = chain.map_err(|_quotes| "the certificate is no PEM")?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_quotes| "the key is no PEM")?;
    let operator = CertifiedKey::from_der(chain, key, &tls::provider());
    let operator = operator.map_err(|_quotes| "key and certificate do not fit together")?;
    let certificates = Certificates { operator: Arc::new(operator), mesh };
    tls::server(Arc::new(certificates), &[tls::ALPN_HTTP1]).map_err(|_library| "the TLS library refuses them")
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        if hello.server_name() == Some(PEER_NAME) { self.mesh.resolve(hello) } else { Some(self.operator.clone()) }
    }
}
