//! How does the proxy get a certificate that the manager signs?
//!
//! It makes a key, which never leaves it, asks for a signature, and keeps both in one file of its state folder. What is
//! presented is read from there, as any certificate from a file is, so a restart without the manager goes on with it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire;
use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use thiserror::Error;
use tokio::time;
use tracing::{info, warn};

use crate::drain::Drain;
use crate::manager::{ConnectError, Manager};
use crate::tls::TlsError;
use crate::tls::issue::{self, LEAF_RENEWAL, LEAF_VALIDITY, Source};

/// How long to wait after the manager did not sign.
const RETRY: Duration = Duration::from_secs(2);

/// The longest wait.
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// A certificate that the manager signs.
#[derive(Clone, Debug)]
pub struct Signed {
    manager: Manager,
    names: Vec<String>,
    file: PathBuf,
    drain: Drain,
}

/// Why there is no certificate.
#[derive(Debug, Error)]
enum SignedError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the manager says: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    #[error("make a certificate signing request")]
    Request(#[from] rcgen::Error),
    #[error(transparent)]
    Names(#[from] TlsError),
    #[error("keep the certificate")]
    Keep(#[source] io::Error),
}

// === impl Signed ===

impl Signed {
    /// For the API server's names and `names`.
    pub fn new(manager: Manager, names: Vec<String>, drain: Drain) -> Self {
        // A certificate for other names is another certificate.
        let names_digest = wire::digest(names.join(",").as_bytes());
        let file = manager.state.join(format!("serving-{names_digest:016x}.pem"));
        Self { manager, names, file, drain }
    }

    /// Where it is read from, as soon as it is there. It may be one that was kept; then it is renewed in its time.
    pub async fn source(self) -> Source {
        let mut wait = RETRY;
        while self.age().is_none_or(|age| age >= LEAF_VALIDITY) {
            if let Err(error) = Box::pin(self.renew()).await {
                let error = format!("{:#}", anyhow::Error::from(error));
                warn!(error, retry = ?wait, "no certificate yet");
                time::sleep(wait).await;
                wait = (wait * 2).min(LONGEST_RETRY);
            }
        }
        let source = Source::Files { cert: self.file.clone(), key: self.file.clone() };
        let drain = self.drain.clone();
        drain.clone().spawn(async move {
            tokio::select! {
                // Shutdown.
                () = drain.started() => {}
                () = self.follow() => {}
            }
        });
        source
    }

    async fn follow(self) {
        let mut wait = RETRY;
        loop {
            let age = self.age().unwrap_or(LEAF_VALIDITY);
            time::sleep(LEAF_RENEWAL.saturating_sub(age)).await;
            match Box::pin(self.renew()).await {
                Ok(()) => wait = RETRY,
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    warn!(error, retry = ?wait, "certificate not renewed");
                    time::sleep(wait).await;
                    wait = (wait * 2).min(LONGEST_RETRY);
                }
            }
        }
    }

    /// How old the one is that is kept.
    fn age(&self) -> Option<Duration> {
        let made = fs::metadata(&self.file).ok()?.modified().ok()?;
        // One from the future is as old as it can be.
        Some(SystemTime::now().duration_since(made).unwrap_or(LEAF_VALIDITY))
    }

    async fn renew(&self) -> Result<(), SignedError> {
        let key = KeyPair::generate()?;
        let mut params = issue::leaf(&self.names, SystemTime::now())?;
        // Whoever signs says who that is.
        params.use_authority_key_identifier_extension = false;
        let request = params.serialize_request(&key)?;
        let mut link = self.manager.connect(&self.drain).await?;
        let chain = link.sign(request.der()).await?;
        self.keep(&key, &chain).map_err(SignedError::Keep)?;
        info!("certificate signed by the manager");
        Ok(())
    }

    fn keep(&self, key: &KeyPair, chain: &[CertificateDer<'_>]) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.manager.state)?;
        let mut text = key.serialize_pem();
        for certificate in chain {
            text.push_str(&pem::encode(&pem::Pem::new("CERTIFICATE", certificate.as_ref())));
        }
        // Another process of the node may follow this one, and keep its own.
        let directory = File::open(&self.manager.state)?;
        directory.lock()?;
        let next = self.file.with_extension("next");
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&next)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(next, &self.file)
    }
}
