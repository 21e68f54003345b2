//! The certificates of the user, which the proxy presents, and of the command.
//!
//! The user's certificate is presented by the proxy, because TLS ends there. So that nobody else on this machine can
//! speak for the user by connecting to the proxy, the command gets a certificate of this run's own authority in its
//! place, and the proxy asks for that.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use ctrlmesh_runtime::sync::{read, write};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, SignatureScheme};
use tracing::warn;

use crate::run::cluster::Pem;
use ctrlmesh_proxy::net::tls;

/// How far a clock may be behind ours.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// How long a run may take: its authority ends with it.
const VALIDITY: Duration = Duration::from_hours(24 * 365 * 10);

/// The certificate authority of one run.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, PEM.
#[derive(Clone, Debug)]
pub(crate) struct Credential {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// The user's certificate, read again for every connection: credential helpers replace it.
#[derive(Debug)]
pub(crate) struct Identity {
    certificate: Pem,
    key: Pem,
    last: RwLock<Arc<CertifiedKey>>,
}

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    #[error("read `{path}`, which the kubeconfig names")]
    Read { path: PathBuf, source: io::Error },
    #[error("read the kubeconfig's {what}")]
    Pem { what: &'static str, source: rustls::pki_types::pem::Error },
    #[error("use the kubeconfig's client certificate")]
    Refused(#[source] rustls::Error),
    #[error("make the certificates of this run")]
    Make(#[source] rcgen::Error),
    #[error("ask for the certificates of this run")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
}

impl Authority {
    /// A new one, believed by nobody but the command of this run.
    pub(crate) fn new() -> Result<Self, IdentityError> {
        let mut params = valid();
        params.distinguished_name.push(DnType::CommonName, "ctrlmesh run");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().map_err(IdentityError::Make)?;
        let issuer = CertifiedIssuer::self_signed(params, key).map_err(IdentityError::Make)?;
        Ok(Self { issuer })
    }

    /// Its own certificate and key.
    pub(crate) fn credential(&self) -> Credential {
        Credential { certificate: self.issuer.pem(), key: self.issuer.key().serialize_pem() }
    }

    /// What the command proves itself with.
    pub(crate) fn issue(&self) -> Result<Credential, IdentityError> {
        let mut params = valid();
        params.distinguished_name.push(DnType::CommonName, "command");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().map_err(IdentityError::Make)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(IdentityError::Make)?;
        Ok(Credential { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// Asks clients for a certificate that was issued here.
    pub(crate) fn verifier(&self) -> Result<Arc<dyn ClientCertVerifier>, IdentityError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).map_err(IdentityError::Refused)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), tls::provider());
        verifier.build().map_err(IdentityError::Verifier)
    }
}

impl Pem {
    /// Its bytes.
    pub(crate) fn read(&self) -> Result<Vec<u8>, IdentityError> {
        match self {
            Self::Data(bytes) => Ok(bytes.clone()),
            Self::File(path) => fs::read(path).map_err(|source| IdentityError::Read { path: path.clone(), source }),
        }
    }
}

impl Identity {
    /// Reads certificate and key.
    pub(crate) fn load(certificate: Pem, key: Pem) -> Result<Self, IdentityError> {
        let last = RwLock::new(certified(&certificate, &key)?);
        Ok(Self { certificate, key, last })
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        match certified(&self.certificate, &self.key) {
            Ok(key) => *write(&self.last) = key,
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "client certificate kept");
            }
        }
        Some(read(&self.last).clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn certified(certificate: &Pem, key: &Pem) -> Result<Arc<CertifiedKey>, IdentityError> {
    let wrong = |what| move |source| IdentityError::Pem { what, source };
    let certificate = certificate.read()?;
    let chain = CertificateDer::pem_slice_iter(&certificate).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(wrong("client certificate"))?;
    let key = PrivateKeyDer::from_pem_slice(&key.read()?).map_err(wrong("client key"))?;
    CertifiedKey::from_der(chain, key, &tls::provider()).map(Arc::new).map_err(IdentityError::Refused)
}

fn valid() -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + VALIDITY).into();
    params
}
