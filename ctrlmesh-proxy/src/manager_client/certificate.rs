//! The serving certificate that the manager signs.
//!
//! The proxy makes a key, which never leaves it, and keeps key and chain in one file of its state folder. It presents
//! them like any certificate from a file, so a restart without the manager continues with them. The file also names the
//! manager's CAs of that time. Where none of them is still valid for the manager, as after a new installation, the
//! proxy asks for another certificate.

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

use crate::manager_client::Endpoint;
use crate::net::tls::TlsError;
use crate::net::tls::issue::{self, Source};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::grpc::GrpcError;
use ctrlmesh_runtime::telemetry;

/// Between checks of the certificate's age and of the manager's CAs.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);

/// A certificate is renewed after two thirds of its life.
const THIRDS: u32 = 3;
const RENEWAL_THIRDS: u32 = 2;

/// The prefix of the line that names the manager's CAs.
const CA_LINE: &str = "# signed under";

/// The first wait after the manager did not sign.
const FIRST_RETRY: Duration = Duration::from_secs(2);

const LONGEST_RETRY: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct SignedCertificate {
    manager: Endpoint,
    names: Vec<String>,
    file: PathBuf,
    drain: Drain,
}

#[derive(Debug, Error)]
enum SignError {
    #[error("connect to the manager")]
    Connect(#[from] GrpcError),
    #[error("the manager says: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    #[error("make a certificate signing request")]
    Request(#[from] rcgen::Error),
    #[error(transparent)]
    Names(#[from] TlsError),
    #[error("keep the certificate")]
    Keep(#[source] io::Error),
}

impl SignedCertificate {
    /// For the API server's names and `names`.
    pub fn new(manager: Endpoint, names: Vec<String>, drain: Drain) -> Self {
        // A certificate for other names is another certificate.
        let names_digest = wire::digest(names.join(",").as_bytes());
        let file = manager.state.join(format!("serving-{names_digest:016x}.pem"));
        Self { manager, names, file, drain }
    }

    /// The certificate's files, once there is a valid one. Renews it in the background.
    pub async fn source(self) -> Source {
        let mut wait = FIRST_RETRY;
        while !self.is_good_for(THIRDS) {
            let Err(error) = Box::pin(self.renew()).await else {
                // The certificate is new, even where the clock disagrees.
                break;
            };
            let error = telemetry::chain(&error);
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
        let mut wait = FIRST_RETRY;
        loop {
            if self.is_good_for(RENEWAL_THIRDS) {
                time::sleep(CHECK_INTERVAL).await;
                continue;
            }
            match Box::pin(self.renew()).await {
                Ok(()) => {
                    wait = FIRST_RETRY;
                    // Where the clocks differ, or the CA is about to expire, it may be no better than the one before.
                    time::sleep(CHECK_INTERVAL).await;
                }
                Err(error) => {
                    let error = telemetry::chain(&error);
                    warn!(error, retry = ?wait, "certificate not renewed");
                    time::sleep(wait).await;
                    wait = (wait * 2).min(LONGEST_RETRY);
                }
            }
        }
    }

    /// Whether the file holds a certificate of a current CA, of whose life no more than `thirds` are over.
    fn is_good_for(&self, thirds: u32) -> bool {
        let now = SystemTime::now();
        let is_young = |(from, to): (SystemTime, SystemTime)| is_within(from, to, thirds, now);
        self.validity().is_some_and(is_young) && self.is_of_a_current_ca()
    }

    /// Whether one of the manager's CAs was valid already when the certificate was signed; true if they cannot be read.
    fn is_of_a_current_ca(&self) -> bool {
        let Some(current) = self.ca_digests() else { return true };
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let signed = text.lines().find_map(|line| line.strip_prefix(CA_LINE)).unwrap_or_default();
        signed.split_whitespace().any(|one| current.iter().any(|other| one == other))
    }

    fn ca_digests(&self) -> Option<Vec<String>> {
        let pem = fs::read(&self.manager.ca).ok()?;
        let all = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>().ok()?;
        let digests = all.iter().map(|one| format!("{:016x}", wire::digest(one)));
        Some(digests.collect()).filter(|all: &Vec<String>| !all.is_empty())
    }

    /// The not-before and not-after times of the certificate in the file.
    fn validity(&self) -> Option<(SystemTime, SystemTime)> {
        let certificate = CertificateDer::from_pem_slice(&fs::read(&self.file).ok()?).ok()?;
        let (_, parsed) = X509Certificate::from_der(&certificate).ok()?;
        let validity = parsed.validity();
        Some((validity.not_before.to_datetime().into(), validity.not_after.to_datetime().into()))
    }

    async fn renew(&self) -> Result<(), SignError> {
        let key = KeyPair::generate()?;
        let mut params = issue::leaf(&self.names, SystemTime::now())?;
        // The signer sets this extension.
        params.use_authority_key_identifier_extension = false;
        let request = params.serialize_request(&key)?;
        // Before the request: a CA that is added meanwhile may not be the one that signs.
        let cas = self.ca_digests().unwrap_or_default();
        let mut connection = self.manager.connect(&self.drain).await?;
        let chain = connection.sign(request.der()).await?;
        self.keep(&key, &chain, &cas).map_err(SignError::Keep)?;
        info!("certificate signed by the manager");
        Ok(())
    }

    fn keep(&self, key: &KeyPair, chain: &[CertificateDer<'_>], cas: &[String]) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.manager.state)?;
        let mut text = format!("{CA_LINE} {}\n{}", cas.join(" "), key.serialize_pem());
        for certificate in chain {
            text.push_str(&pem::encode(&pem::Pem::new("CERTIFICATE", certificate.as_ref())));
        }
        // The next process of the node may write its own at the same time.
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

/// Whether `now` is in the first `thirds` of the time; a certificate is not valid before it.
fn is_within(from: SystemTime, to: SystemTime, thirds: u32, now: SystemTime) -> bool {
    let life = to.duration_since(from).unwrap_or_default();
    now.duration_since(from).is_ok_and(|over| over < life / THIRDS * thirds)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::CertificateParams;
    use tempfile::TempDir;

    use super::*;

    fn certificate() -> (KeyPair, rcgen::Certificate) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        (key, certificate)
    }

    fn endpoint(folder: &Path) -> Endpoint {
        Endpoint {
            address: "manager.ctrlmesh-system.svc:8071".parse().unwrap(),
            service_ip: None,
            ca: folder.join("manager-ca.crt"),
            token: folder.join("token"),
            state: folder.join("state"),
        }
    }

    #[test]
    fn a_certificate_holds_while_one_of_its_cas_does() {
        let folder = TempDir::new().unwrap();
        let manager = endpoint(folder.path());
        let trust = |all: &[&rcgen::Certificate]| {
            let text: String = all.iter().map(|one| one.pem()).collect();
            fs::write(&manager.ca, text).unwrap();
        };
        let signed = SignedCertificate::new(manager.clone(), vec!["a".to_owned()], Drain::default());
        let [(key, leaf), (_, first), (_, second)] = [(); 3].map(|()| certificate());
        trust(&[&first]);
        assert!(!signed.is_good_for(THIRDS), "there is none");
        let under = signed.ca_digests().unwrap();
        signed.keep(&key, &[leaf.der().clone()], &under).unwrap();
        assert!(signed.is_good_for(THIRDS));
        trust(&[&second, &first]);
        assert!(signed.is_good_for(THIRDS), "they overlap");
        trust(&[&second]);
        assert!(!signed.is_good_for(THIRDS), "installed anew");
        fs::remove_file(&manager.ca).unwrap();
        assert!(signed.is_good_for(THIRDS), "nothing says otherwise");
        let text = fs::read(&signed.file).unwrap();
        assert_eq!(CertificateDer::pem_slice_iter(&text).count(), 1, "it can be read");
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
            (params.not_before, params.not_after) = ((now + hours(1)).into(), (now + hours(25)).into());
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
