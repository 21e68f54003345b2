//! Creates certificate authorities with name constraints, and signs with them.
//!
//! Pure but for the randomness of keys. The names that an authority may sign for are critical name constraints in its
//! certificate. They are read back from there, so no second list can disagree.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SigningKey,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use crate::ca::namespace::Seed;

mod names;

pub use names::Names;

pub const LEAF_VALIDITY: Duration = Duration::from_hours(24);

/// How far a client's clock may be behind ours.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// How far `notBefore` lies in the past. Never a large part of a short `validity`.
fn skew(validity: Duration) -> Duration {
    CLOCK_SKEW.min(validity / 8)
}

/// Bytes of a certificate signing request: a key and some dozens of names.
const MAX_REQUEST_BYTES: usize = 16 * 1024;

/// The unit in the name of an authority that has authorities of namespaces. So its certificate says it.
const WITH_NAMESPACES: &str = "authorities of namespaces";

/// Common name of leaves; clients check the alternative names only.
const LEAF_NAME: &str = "ctrlmesh";

#[derive(Clone, Debug)]
pub struct Authority {
    certificate: CertificateDer<'static>,
    pem: String,
    key: String,
    names: Names,
    not_before: SystemTime,
    not_after: SystemTime,
    has_namespaces: bool,
}

#[derive(Debug)]
pub struct Leaf {
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// PKCS #8, DER.
    pub key: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("read the certificate of an authority")]
    Certificate(#[source] rustls_pki_types::pem::Error),
    /// The certificate cannot be parsed, or has no constraints.
    #[error("the certificate of an authority is not one of ours")]
    Foreign,
    #[error("{name:?} is not a name that a certificate can carry")]
    Name { name: String },
    #[error("use the key of an authority")]
    Key(#[source] rcgen::Error),
    #[error("derive the authority of a namespace")]
    Derived,
}

#[derive(Debug, thiserror::Error)]
pub enum SignError {
    #[error("the request has {bytes} bytes, at most {MAX_REQUEST_BYTES} are read")]
    TooLarge { bytes: usize },
    /// Not a request, or not signed with its own key.
    #[error("read the request")]
    Malformed(#[source] rcgen::Error),
    #[error("the request asks for a certificate authority")]
    Authority,
    #[error(transparent)]
    Derive(#[from] AuthorityError),
    #[error("the request's key is not ECDSA P-256")]
    Key,
    #[error("the request asks for no name")]
    NoName,
    #[error("the request asks for {name:?}, which is outside what the authority may speak for")]
    Outside { name: String },
    #[error("sign the request")]
    Sign(#[source] rcgen::Error),
}

impl Authority {
    /// Creates an authority that may sign for `names` only.
    ///
    /// # Errors
    /// Where a certificate cannot carry one of the names.
    pub fn generate(
        common_name: &str,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        Self::generate_as(subject(common_name, None), names, validity, now)
    }

    /// Creates one with authorities of namespaces, which sign for pods in its place.
    ///
    /// # Errors
    /// Where a certificate cannot carry one of the names.
    pub fn generate_with_namespaces(
        common_name: &str,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        Self::generate_as(subject(common_name, Some(WITH_NAMESPACES)), names, validity, now)
    }

    fn generate_as(
        subject: DistinguishedName,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        names.alternative()?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Key)?;
        let pem = self_signed(subject, names, (now - skew(validity), now + validity), &key)?;
        Self::read(pem, key.serialize_pem())
    }

    /// Reads certificate and key, in PEM.
    ///
    /// # Errors
    /// Where they are not of an authority that [`Authority::generate`] made.
    pub fn read(pem: String, key: String) -> Result<Self, AuthorityError> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(AuthorityError::Certificate)?;
        let (names, (not_before, not_after), has_namespaces) = {
            let parsed = parse(&certificate)?;
            let mut units = parsed.subject().iter_organizational_unit();
            let has_namespaces = units.any(|unit| unit.as_str() == Ok(WITH_NAMESPACES));
            (Names::constrained(&parsed).ok_or(AuthorityError::Foreign)?, validity(&parsed), has_namespaces)
        };
        let this = Self { certificate, pem, key, names, not_before, not_after, has_namespaces };
        this.issuer().map_err(AuthorityError::Key)?;
        Ok(this)
    }

    /// What authorities of namespaces follow from; `None` where there are none, as of an authority that an earlier
    /// version made. It signs for pods itself.
    ///
    /// # Errors
    /// Where its key is no PEM.
    pub(super) fn seed(&self) -> Result<Option<Seed>, AuthorityError> {
        self.has_namespaces.then(|| Seed::of(&self.key)).transpose()
    }

    /// The one of `namespace` that follows from this one, where there are such.
    ///
    /// # Errors
    /// Where its key cannot sign.
    pub fn of_namespace(&self, namespace: &str) -> Result<Option<Self>, AuthorityError> {
        self.seed()?.map(|seed| seed.authority(&self.pem, namespace)).transpose()
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn names(&self) -> &Names {
        &self.names
    }

    /// `notBefore` and `notAfter`.
    pub fn validity(&self) -> (SystemTime, SystemTime) {
        (self.not_before, self.not_after)
    }

    pub fn made(&self) -> SystemTime {
        let life = self.not_after.duration_since(self.not_before).unwrap_or_default();
        // The inverse of `skew`.
        self.not_before + CLOCK_SKEW.min(life / 9)
    }

    /// Creates a key and a leaf for `names`.
    ///
    /// # Errors
    /// Where a certificate cannot carry a name. Constraints are not checked: clients would reject the leaf.
    pub fn issue(&self, names: &Names, now: SystemTime) -> Result<Leaf, AuthorityError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Key)?;
        let issuer = self.issuer().map_err(AuthorityError::Key)?;
        let leaf = self.leaf(names.alternative()?, now).signed_by(&key, &issuer).map_err(AuthorityError::Key)?;
        let chain = vec![leaf.der().clone(), self.certificate.clone()];
        Ok(Leaf { chain, key: key.serialize_der() })
    }

    /// Signs the key of a certificate signing request (DER). The leaf covers all names of the authority.
    ///
    /// A client may dial any of the API server's addresses, and the requester need not know all.
    ///
    /// # Errors
    /// Where it asks for a name outside the constraints.
    pub fn sign(&self, request: &[u8], now: SystemTime) -> Result<Vec<CertificateDer<'static>>, SignError> {
        if request.len() > MAX_REQUEST_BYTES {
            return Err(SignError::TooLarge { bytes: request.len() });
        }
        let request = CertificateSigningRequestDer::from(request);
        let request = CertificateSigningRequestParams::from_der(&request).map_err(SignError::Malformed)?;
        if matches!(request.params.is_ca, IsCa::Ca(_)) {
            return Err(SignError::Authority);
        }
        if request.public_key.algorithm() != &PKCS_ECDSA_P256_SHA256 {
            return Err(SignError::Key);
        }
        let names = request.params.subject_alt_names;
        if names.is_empty() {
            return Err(SignError::NoName);
        }
        if let Some(outside) = names.iter().find(|name| !self.names.permit(name)) {
            return Err(SignError::Outside { name: printed(outside) });
        }
        let issuer = self.issuer().map_err(SignError::Sign)?;
        let leaf = self
            .leaf(self.names.alternative().unwrap_or(names), now)
            .signed_by(&request.public_key, &issuer)
            .map_err(SignError::Sign)?;
        Ok(vec![leaf.der().clone(), self.certificate.clone()])
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, rcgen::Error> {
        Issuer::from_ca_cert_der(&self.certificate, KeyPair::from_pem(&self.key)?)
    }

    fn leaf(&self, names: Vec<SanType>, now: SystemTime) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, LEAF_NAME);
        params.subject_alt_names = names;
        let left = self.not_after.duration_since(now).unwrap_or_default();
        let validity = left.min(LEAF_VALIDITY);
        params.not_before = (now - skew(validity)).into();
        params.not_after = (now + validity).into();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params
    }
}

/// The name of an authority.
pub fn subject(common_name: &str, unit: Option<&str>) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, common_name);
    if let Some(unit) = unit {
        subject.push(DnType::OrganizationalUnitName, unit);
    }
    subject
}

/// Creates the certificate (PEM) of an authority with this key, which may sign for `names` from and until these times.
///
/// # Errors
/// Where the key cannot sign.
pub fn self_signed(
    subject: DistinguishedName,
    names: &Names,
    (not_before, not_after): (SystemTime, SystemTime),
    key: &impl SigningKey,
) -> Result<String, AuthorityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = subject;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.name_constraints = Some(names.constraints());
    params.not_before = not_before.into();
    params.not_after = not_after.into();
    Ok(params.self_signed(key).map_err(AuthorityError::Key)?.pem())
}

/// For which names the authority with this certificate (PEM) may sign, its `notBefore` and its `notAfter`.
///
/// # Errors
/// Where the certificate is not one of ours.
pub fn claims_of(pem: &str) -> Result<(Names, (SystemTime, SystemTime)), AuthorityError> {
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(AuthorityError::Certificate)?;
    let parsed = parse(&certificate)?;
    Ok((Names::constrained(&parsed).ok_or(AuthorityError::Foreign)?, validity(&parsed)))
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, AuthorityError> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_malformed| AuthorityError::Foreign)?;
    Ok(parsed)
}

/// `notBefore` and `notAfter`. `None` where the certificate cannot be read.
pub fn validity_of(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(validity(&parsed))
}

/// `None` where the certificate cannot be read.
pub fn begin_of(pem: &[u8]) -> Option<SystemTime> {
    Some(validity_of(&CertificateDer::from_pem_slice(pem).ok()?)?.0)
}

/// `None` where the certificate cannot be read.
pub fn end_of(pem: &[u8]) -> Option<SystemTime> {
    Some(validity_of(&CertificateDer::from_pem_slice(pem).ok()?)?.1)
}

/// Whether `pem` is an authority that [`Authority::generate`] made with this common name, with constraints.
pub fn is_ours(pem: &[u8], common_name: &str) -> bool {
    let Ok(certificate) = CertificateDer::from_pem_slice(pem) else { return false };
    let Ok((_, parsed)) = X509Certificate::from_der(&certificate) else { return false };
    let mut names = parsed.subject().iter_common_name();
    let matches = names.next().is_some_and(|name| name.as_str() == Ok(common_name));
    // Exclusions alone permit everything else.
    let may_speak = Names::constrained(&parsed).is_some_and(|names| names != Names::default());
    parsed.is_ca() && matches && may_speak
}

fn validity(certificate: &X509Certificate<'_>) -> (SystemTime, SystemTime) {
    let at = |seconds: i64| SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    let validity = certificate.validity();
    (at(validity.not_before.timestamp()), at(validity.not_after.timestamp()))
}

fn printed(name: &SanType) -> String {
    match name {
        SanType::DnsName(name) | SanType::Rfc822Name(name) | SanType::URI(name) => name.as_str().to_owned(),
        SanType::IpAddress(address) => address.to_string(),
        _ => "another kind of name".to_owned(),
    }
}

#[cfg(test)]
mod tests;
