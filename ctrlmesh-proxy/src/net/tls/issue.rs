//! The certificate that the proxy presents to operators.
//!
//! It comes from files, which are read again when they change, or is issued here by the mesh CA for the API server's
//! names. An issued one is valid for a day and renewed after two thirds of that. Open connections keep theirs.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use ctrlmesh_runtime::sync::{read, write};
use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose, SanType, string::Ia5String,
};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::time;
use tracing::{info, warn};

use crate::net::tls;
use crate::net::tls::TlsError;
use ctrlmesh_runtime::drain::Drain;

/// Of an issued certificate.
pub const LEAF_VALIDITY: Duration = Duration::from_hours(24);

/// Two thirds of its life, which leaves eight hours for a CA that is unavailable.
const LEAF_RENEWAL: Duration = Duration::from_hours(16);

/// A client's clock may be so far behind.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// A Secret volume takes a minute to follow its Secret anyway.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The names by which pods know the API server, in every cluster.
const API_SERVER_NAMES: &[&str] = &[
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
];

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// A chain and its key, in PEM.
    Files {
        /// The chain, leaf first.
        cert: PathBuf,
        key: PathBuf,
    },
    /// A certificate authority, in PEM, that issues for the API server's names and `names`.
    MeshCa {
        cert: PathBuf,
        key: PathBuf,
        /// DNS names and addresses beside `API_SERVER_NAMES`.
        names: Vec<String>,
    },
}

#[derive(Debug)]
pub struct ServingCertificate {
    source: Source,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    key: Arc<CertifiedKey>,
    /// The contents of both files; where they change, the certificate is replaced.
    made_from: [Vec<u8>; 2],
    made_at: SystemTime,
}

impl Source {
    fn paths(&self) -> [&Path; 2] {
        match self {
            Source::Files { cert, key } | Source::MeshCa { cert, key, .. } => [cert, key],
        }
    }

    fn read(&self) -> Result<[Vec<u8>; 2], TlsError> {
        let [cert, key] = self.paths();
        Ok([tls::read(cert)?, tls::read(key)?])
    }

    fn make(&self, [cert, key]: &[Vec<u8>; 2], now: SystemTime) -> Result<CertifiedKey, TlsError> {
        match self {
            Source::Files { .. } => self.certified(chain(self.paths()[0], cert)?, private_key(self.paths()[1], key)?),
            Source::MeshCa { names, .. } => self.issue(cert, key, names, now),
        }
    }

    fn issue(&self, cert: &[u8], key: &[u8], names: &[String], now: SystemTime) -> Result<CertifiedKey, TlsError> {
        let failed = |source| TlsError::Issue { path: self.paths()[0].to_owned(), source };
        let ca = chain(self.paths()[0], cert)?;
        let ca_key = private_key(self.paths()[1], key)?;
        let issuer = Issuer::from_ca_cert_der(&ca[0], KeyPair::try_from(&ca_key).map_err(failed)?).map_err(failed)?;
        let leaf_key = KeyPair::generate().map_err(failed)?;
        let leaf = leaf(names, now)?.signed_by(&leaf_key, &issuer).map_err(failed)?;
        let mut chain = vec![leaf.der().clone()];
        chain.extend(ca);
        self.certified(chain, PrivatePkcs8KeyDer::from(leaf_key.serialize_der()).into())
    }

    fn certified(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<CertifiedKey, TlsError> {
        CertifiedKey::from_der(chain, key, &tls::provider())
            .map_err(|source| TlsError::Refused { path: self.paths()[0].to_owned(), source })
    }
}

impl ServingCertificate {
    /// Reads or issues the first certificate.
    pub fn load(source: Source) -> Result<Self, TlsError> {
        let current = RwLock::new(load(&source)?);
        Ok(Self { source, current })
    }

    /// Follows the files and the clock until shutdown. Files that cannot be read change nothing.
    pub async fn follow(self: Arc<Self>, drain: Drain) {
        let mut ticks = time::interval(FILE_CHECK_INTERVAL);
        loop {
            tokio::select! {
                () = drain.started() => return,
                _ = ticks.tick() => self.refresh(SystemTime::now()),
            }
        }
    }

    /// Replaces the certificate if its files changed or two thirds of its life are over.
    fn refresh(&self, now: SystemTime) {
        let replaced = match self.source.read() {
            Ok(files) if self.is_stale(&files, now) => self
                .source
                .make(&files, now)
                .map(|key| Some(Current { key: Arc::new(key), made_from: files, made_at: now })),
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        };
        match replaced {
            Ok(Some(current)) => {
                *write(&self.current) = current;
                info!("serving certificate replaced");
            }
            Ok(None) => {}
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "serving certificate kept");
            }
        }
    }

    fn is_stale(&self, files: &[Vec<u8>; 2], now: SystemTime) -> bool {
        let current = read(&self.current);
        let age = now.duration_since(current.made_at).unwrap_or_default();
        let expires = matches!(self.source, Source::MeshCa { .. });
        &current.made_from != files || (expires && age >= LEAF_RENEWAL)
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(read(&self.current).key.clone())
    }
}

fn load(source: &Source) -> Result<Current, TlsError> {
    let files = source.read()?;
    let now = SystemTime::now();
    Ok(Current { key: Arc::new(source.make(&files, now)?), made_from: files, made_at: now })
}

/// The contents of a certificate for the API server's names and `names`.
pub(crate) fn leaf(names: &[String], now: SystemTime) -> Result<CertificateParams, TlsError> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + LEAF_VALIDITY).into();
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let standard = API_SERVER_NAMES.iter().copied().chain(["127.0.0.1", "::1"]);
    for name in standard.chain(names.iter().map(String::as_str)) {
        let name = san(name)?;
        if !params.subject_alt_names.contains(&name) {
            params.subject_alt_names.push(name);
        }
    }
    Ok(params)
}

fn san(name: &str) -> Result<SanType, TlsError> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    Ia5String::try_from(name).map(SanType::DnsName).map_err(|_unfit| TlsError::Name { name: name.to_owned() })
}

fn chain(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| TlsError::Pem { path: path.to_owned(), source })?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: path.to_owned() });
    }
    Ok(chain)
}

fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|source| TlsError::Pem { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{BasicConstraints, CertifiedIssuer, IsCa};
    use tempfile::TempDir;

    use super::*;

    fn authority(folder: &Path) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        fs::write(folder.join("crt"), ca.pem()).unwrap();
        fs::write(folder.join("key"), ca.key().serialize_pem()).unwrap();
    }

    fn presented(folder: &TempDir) -> ServingCertificate {
        authority(folder.path());
        let (cert, key) = (folder.path().join("crt"), folder.path().join("key"));
        ServingCertificate::load(Source::MeshCa { cert, key, names: vec!["10.96.0.1".to_owned()] }).unwrap()
    }

    fn leaf_of(presented: &ServingCertificate) -> Vec<u8> {
        presented.current.read().unwrap().key.cert[0].to_vec()
    }

    #[test]
    fn a_certificate_is_renewed_at_two_thirds_of_its_life() {
        let folder = TempDir::new().unwrap();
        let presented = presented(&folder);
        let (first, begun) = (leaf_of(&presented), SystemTime::now());
        presented.refresh(begun + LEAF_VALIDITY * 2 / 3 - Duration::from_mins(1));
        assert_eq!(leaf_of(&presented), first);
        presented.refresh(begun + LEAF_VALIDITY * 2 / 3 + Duration::from_mins(1));
        assert_ne!(leaf_of(&presented), first);
    }

    #[test]
    fn a_replaced_ca_issues_at_once_a_missing_one_never() {
        let folder = TempDir::new().unwrap();
        let presented = presented(&folder);
        let first = leaf_of(&presented);
        authority(folder.path());
        presented.refresh(SystemTime::now());
        let second = leaf_of(&presented);
        assert_ne!(second, first);
        fs::remove_file(folder.path().join("key")).unwrap();
        presented.refresh(SystemTime::now() + LEAF_VALIDITY);
        assert_eq!(leaf_of(&presented), second);
    }
}
