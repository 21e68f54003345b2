//! The certificate of an operator's webhook, read from its container.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::policy::Webhook;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::{MappedMutexGuard, Mutex, MutexGuard};
use tokio::time;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::egress::PodFiles;
use crate::net::tls;

/// The name by which a proxy calls another. No webhook has it: a Service in `default` has it already.
pub(crate) const PEER_NAME: &str = "kubernetes.default.svc";

/// For so long, files that were found are not read again.
const KEPT: Duration = Duration::from_secs(1);

/// Between two looks for files that are not there yet. A connection that comes meanwhile waits for the next look: what
/// passes unread does so to its end, and an API server keeps its connections.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A larger file is none, in bytes.
const MAX_FILE_BYTES: usize = 256 << 10;

/// Said while no certificate has been found.
pub(super) const NOT_FOUND: &str = "no container of the pod has both files, of 256 KiB at most";

/// The certificate that was read last.
#[derive(Debug, Default)]
pub(super) struct Certificate(Mutex<Option<Last>>);

#[derive(Debug)]
struct Last {
    read_at: Instant,
    paths: [String; 2],
    /// The contents of both files.
    made_from: Option<Vec<Vec<u8>>>,
    /// What is wrong with these contents.
    unusable: Option<&'static str>,
    /// Why the files were not read, the last time.
    unread: Option<&'static str>,
    /// Stays where the files cannot be used: they may be half replaced.
    operator: Option<Arc<CertifiedKey>>,
    /// With the certificate of `operator`, once a connection has needed it.
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
        self.read(pod, webhook, files, LOOK_AGAIN).await.tls(pod, mesh)
    }

    /// Looks for a certificate.
    ///
    /// # Errors
    /// If there is none, and has been none. Says why, and nothing of what is in the files.
    pub(super) async fn check(&self, pod: &str, webhook: &Webhook, files: &PodFiles) -> Result<(), &'static str> {
        let last = self.read(pod, webhook, files, Duration::ZERO).await;
        match last.operator {
            Some(_) => Ok(()),
            None => Err(last.unread.or(last.unusable).unwrap_or(NOT_FOUND)),
        }
    }

    /// Reads the files, unless they were found just now. Looks for files that are not there `after` the last look.
    async fn read(
        &self,
        pod: &str,
        webhook: &Webhook,
        files: &PodFiles,
        after: Duration,
    ) -> MappedMutexGuard<'_, Last> {
        let paths = [webhook.certificate.clone(), webhook.key.clone()];
        let asked_at = Instant::now();
        // Locked while it is read, so that one reads for all.
        let mut last = self.0.lock().await;
        let is_recent = |last: &Last| {
            let is_kept = last.operator.is_some() && last.read_at.elapsed() < KEPT;
            // Another one has looked since.
            last.paths == paths && (is_kept || last.read_at >= asked_at)
        };
        if !last.as_ref().is_some_and(is_recent)
            && let Some(last) = &*last
        {
            time::sleep_until(last.read_at + after).await;
        }
        let before = last.take().filter(|last| last.paths == paths);
        let latest = match before {
            Some(last) if is_recent(&last) => last,
            before => Last::read(before, pod, paths, files).await,
        };
        MutexGuard::map(last, |last| last.insert(latest))
    }
}

impl Last {
    async fn read(before: Option<Self>, pod: &str, paths: [String; 2], files: &PodFiles) -> Self {
        let read = files.read_all(paths.clone(), MAX_FILE_BYTES).await;
        let (read_at, is_first) = (Instant::now(), before.is_none());
        let nothing = Self { read_at, paths, made_from: None, unusable: None, unread: None, operator: None, tls: None };
        let mut last = Self { read_at, unread: None, ..before.unwrap_or(nothing) };
        match read {
            Ok(Some(contents)) => last.take(pod, contents),
            Ok(None) => last.unread = Some(NOT_FOUND),
            Err(_late) => last.unread = Some("reading the files takes too long"),
        }
        if last.unread.is_some() && is_first {
            let files = &last.paths;
            warn!(pod, ?files, "the certificate of the pod's webhook is not found yet: its calls pass unread");
        }
        last
    }

    /// Takes the contents of the files, if they are new.
    fn take(&mut self, pod: &str, contents: Vec<Vec<u8>>) {
        if self.made_from.as_ref() == Some(&contents) {
            return;
        }
        let (made, files) = (certified(&contents), &self.paths);
        self.unusable = made.as_ref().err().copied();
        match made {
            Ok(operator) => {
                info!(pod, ?files, "certificate of the pod's webhook read");
                (self.operator, self.tls) = (Some(Arc::new(operator)), None);
            }
            Err(error) => warn!(pod, ?files, error, "the certificate of the pod's webhook cannot be used"),
        }
        self.made_from = Some(contents);
    }

    fn tls(&mut self, pod: &str, mesh: &Arc<dyn ResolvesServerCert>) -> Option<Arc<ServerConfig>> {
        if self.tls.is_none() {
            let certificates = Certificates { operator: self.operator.clone()?, mesh: mesh.clone() };
            match tls::server(Arc::new(certificates), &[tls::ALPN_HTTP1]) {
                Ok(made) => self.tls = Some(Arc::new(made)),
                Err(error) => warn!(pod, error = &error as &dyn Error, "serve TLS for the pod's webhook"),
            }
        }
        self.tls.clone()
    }
}

/// # Errors
/// Says what is wrong with the files, and nothing of what is in them: the library's own error may quote a key.
fn certified(contents: &[Vec<u8>]) -> Result<CertifiedKey, &'static str> {
    let [certificate, key] = contents else { return Err("there are not two files") };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
    let chain = chain.map_err(|_quotes| "the certificate is no PEM")?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_quotes| "the key is no PEM")?;
    CertifiedKey::from_der(chain, key, &tls::provider()).map_err(|_quotes| "key and certificate do not fit together")
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        if hello.server_name() == Some(PEER_NAME) { self.mesh.resolve(hello) } else { Some(self.operator.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::num::NonZeroU16;

    use ctrlmesh_common::policy::webhook::OnUnowned;
    use rcgen::{CertificateParams, KeyPair};
    use tempfile::tempdir;

    use super::*;

    #[tokio::test]
    async fn a_call_right_after_a_look_in_vain_has_the_files_looked_for() {
        let folder = tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (port, on_unowned, peers) = (NonZeroU16::MIN, OnUnowned::Local, Vec::new());
        let webhook = Webhook { port, certificate: path("tls.crt"), key: path("tls.key"), on_unowned, peers };
        let (certificate, files) = (Certificate::default(), PodFiles::own());
        assert_eq!(certificate.check("ops/a", &webhook, &files).await, Err(NOT_FOUND));
        let key = KeyPair::generate().unwrap();
        let chain = CertificateParams::new(["a".to_owned()]).unwrap().self_signed(&key).unwrap().pem();
        fs::write(&webhook.certificate, chain).unwrap();
        fs::write(&webhook.key, key.serialize_pem()).unwrap();
        let found = certificate.read("ops/a", &webhook, &files, LOOK_AGAIN).await.operator.clone();
        assert!(found.is_some());
    }
}
