//! How does the proxy get a certificate that the manager signs?
//!
//! It makes a key, which never leaves it, asks for a signature, and keeps both in one file of its state folder. What is
//! presented is read from there, as any certificate from a file is, so a restart without the manager goes on with it. With
//! it stands who vouched for the manager then: where nobody of them does any more, its authorities are others than those
//! that signed, as after a removal and another installation, and another certificate is asked for.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire;
use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use thiserror::Error;
use tokio::time;
use tracing::{info, warn};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use crate::manager_client::{ConnectError, Manager};
use crate::net::tls::TlsError;
use crate::net::tls::issue::{self, Source};
use ctrlmesh_runtime::drain::Drain;

/// How often it is looked whether the manager's authorities are still those that signed.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// The thirds of a certificate's life, and after how many of them it is renewed.
const THIRDS: u32 = 3;
const RENEWAL_THIRDS: u32 = 2;

/// What the line begins with that names those that vouched for the manager.
const UNDER: &str = "# signed under";

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
        while !self.is_good_for(THIRDS) {
            let Err(error) = Box::pin(self.renew()).await else {
                // Whatever the clock says of it, none is newer.
                break;
            };
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(error, retry = ?wait, "no certificate yet");
            time::sleep(wait).await;
            wait = (wait * 2).min(LONGEST_RETRY);
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
            if self.is_good_for(RENEWAL_THIRDS) {
                time::sleep(LOOK_AGAIN).await;
                continue;
            }
            match Box::pin(self.renew()).await {
                Ok(()) => {
                    wait = RETRY;
                    // Where the clocks differ much, or the authority is at its end, it is no better than the one before.
                    time::sleep(LOOK_AGAIN).await;
                }
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    warn!(error, retry = ?wait, "certificate not renewed");
                    time::sleep(wait).await;
                    wait = (wait * 2).min(LONGEST_RETRY);
                }
            }
        }
    }

    /// Whether there is one of today's authorities of whose life no more than so many thirds are over. It ends with the
    /// authority's.
    fn is_good_for(&self, thirds: u32) -> bool {
        let now = SystemTime::now();
        let is_young = |(from, to): (SystemTime, SystemTime)| is_within(from, to, thirds, now);
        self.validity().is_some_and(is_young) && self.is_of_today()
    }

    /// Whether somebody vouches for the manager who did so when the one that is kept was signed; where today's cannot be
    /// read, nothing says otherwise.
    fn is_of_today(&self) -> bool {
        let Some(today) = self.authorities() else { return true };
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let then = text.lines().find_map(|line| line.strip_prefix(UNDER)).unwrap_or_default();
        then.split_whitespace().any(|one| today.iter().any(|other| one == other))
    }

    /// The digests of who vouches for the manager.
    fn authorities(&self) -> Option<Vec<String>> {
        let pem = fs::read(&self.manager.ca).ok()?;
        let all = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>().ok()?;
        let digests = all.iter().map(|one| format!("{:016x}", wire::digest(one)));
        Some(digests.collect()).filter(|all: &Vec<String>| !all.is_empty())
    }

    /// From when and until when the one is valid that is kept.
    fn validity(&self) -> Option<(SystemTime, SystemTime)> {
        let certificate = CertificateDer::from_pem_slice(&fs::read(&self.file).ok()?).ok()?;
        let (_, parsed) = X509Certificate::from_der(&certificate).ok()?;
        let validity = parsed.validity();
        Some((validity.not_before.to_datetime().into(), validity.not_after.to_datetime().into()))
    }

    async fn renew(&self) -> Result<(), SignedError> {
        let key = KeyPair::generate()?;
        let mut params = issue::leaf(&self.names, SystemTime::now())?;
        // Whoever signs says who that is.
        params.use_authority_key_identifier_extension = false;
        let request = params.serialize_request(&key)?;
        // Before it is asked: another authority that comes meanwhile may not be the one that signs.
        let under = self.authorities().unwrap_or_default();
        let mut link = self.manager.connect(&self.drain).await?;
        let chain = link.sign(request.der()).await?;
        self.keep(&key, &chain, &under).map_err(SignedError::Keep)?;
        info!("certificate signed by the manager");
        Ok(())
    }

    fn keep(
        &self,
        key: &KeyPair,
        chain: &[CertificateDer<'_>],
        under: &[String],
    ) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.manager.state)?;
        let mut text = format!("{UNDER} {}\n{}", under.join(" "), key.serialize_pem());
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

/// Whether no more than so many thirds of that time are over; before it nobody believes what is kept.
fn is_within(from: SystemTime, to: SystemTime, thirds: u32, now: SystemTime) -> bool {
    let life = to.duration_since(from).unwrap_or_default();
    now.duration_since(from).is_ok_and(|over| over < life / THIRDS * thirds)
}

#[cfg(test)]
mod tests {
    use rcgen::CertificateParams;
    use tempfile::TempDir;

    use super::*;

    fn certificate() -> (KeyPair, rcgen::Certificate) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        (key, certificate)
    }

    #[test]
    fn what_is_kept_is_presented_as_long_as_one_of_those_who_vouched_for_the_manager_does() {
        let folder = TempDir::new().unwrap();
        let manager = Manager {
            address: "manager.ctrlmesh-system.svc:8071".parse().unwrap(),
            at: None,
            ca: folder.path().join("manager-ca.crt"),
            token: folder.path().join("token"),
            state: folder.path().join("state"),
        };
        let believe = |all: &[&rcgen::Certificate]| {
            let text: String = all.iter().map(|one| one.pem()).collect();
            fs::write(&manager.ca, text).unwrap();
        };
        let signed = Signed::new(manager.clone(), vec!["a".to_owned()], Drain::default());
        let [(key, leaf), (_, first), (_, second)] = [(); 3].map(|()| certificate());
        believe(&[&first]);
        assert!(!signed.is_good_for(THIRDS), "there is none");
        let under = signed.authorities().unwrap();
        signed.keep(&key, &[leaf.der().clone()], &under).unwrap();
        assert!(signed.is_good_for(THIRDS));
        believe(&[&second, &first]);
        assert!(signed.is_good_for(THIRDS), "they overlap");
        believe(&[&second]);
        assert!(!signed.is_good_for(THIRDS), "installed anew");
        fs::remove_file(&manager.ca).unwrap();
        assert!(signed.is_good_for(THIRDS), "nothing says otherwise");
        let text = fs::read(&signed.file).unwrap();
        assert_eq!(CertificateDer::pem_slice_iter(&text).count(), 1, "it can be read");
        // It is renewed when two thirds of its life are over, and presented until then; also where its authority ends soon.
        let lives = |over: Duration, left: Duration| {
            let (mut params, now) = (CertificateParams::default(), SystemTime::now());
            (params.not_before, params.not_after) = ((now - over).into(), (now + left).into());
            let leaf = params.self_signed(&key).unwrap();
            signed.keep(&key, &[leaf.der().clone()], &under).unwrap();
            (signed.is_good_for(RENEWAL_THIRDS), signed.is_good_for(THIRDS))
        };
        let hours = Duration::from_hours;
        let later = {
            let (mut params, now) = (CertificateParams::default(), SystemTime::now());
            (params.not_before, params.not_after) =
                ((now + hours(1)).into(), (now + hours(25)).into());
            params.self_signed(&key).unwrap()
        };
        signed.keep(&key, &[later.der().clone()], &under).unwrap();
        assert!(!signed.is_good_for(THIRDS), "nobody believes it yet");
        assert_eq!(lives(hours(15), hours(9)), (true, true));
        assert_eq!(lives(hours(17), hours(7)), (false, true));
        assert_eq!(lives(hours(3), hours(3)), (true, true));
        assert_eq!(lives(hours(5), hours(1)), (false, true));
        assert_eq!(lives(hours(25), Duration::ZERO), (false, false));
        fs::write(&signed.file, "").unwrap();
        assert!(!signed.is_good_for(THIRDS), "it cannot be read");
    }
}
