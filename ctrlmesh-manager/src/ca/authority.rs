//! Creates certificate authorities with name constraints, and signs with them.
//!
//! Pure but for the randomness of keys. The names that an authority may sign for are critical name constraints in its
//! certificate. They are read back from there, so no second list can disagree.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;

pub const LEAF_VALIDITY: Duration = Duration::from_hours(24);

/// How far a client's clock may be behind ours.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// How far `notBefore` lies in the past. Never a large part of a short `validity`.
fn skew(validity: Duration) -> Duration {
    CLOCK_SKEW.min(validity / 8)
}

/// Bytes of a certificate signing request: a key and some dozens of names.
const MAX_REQUEST_BYTES: usize = 16 * 1024;

/// Common name of leaves; clients check the alternative names only.
const LEAF_NAME: &str = "ctrlmesh";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Exact names. A constraint also permits names below them, which we never sign.
    pub dns: BTreeSet<String>,
    pub addresses: BTreeSet<IpAddr>,
}

#[derive(Clone, Debug)]
pub struct Authority {
    certificate: CertificateDer<'static>,
    pem: String,
    key: String,
    names: Names,
    not_before: SystemTime,
    not_after: SystemTime,
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
    #[error("the request's key is not ECDSA P-256")]
    Key,
    #[error("the request asks for no name")]
    NoName,
    #[error("the request asks for {name:?}, which is outside what the authority may speak for")]
    Outside { name: String },
    #[error("sign the request")]
    Sign(#[source] rcgen::Error),
}

impl Names {
    pub fn of<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> Self {
        let mut these = Self::default();
        for name in names {
            match name.as_ref().parse() {
                Ok(address) => drop(these.addresses.insert(address)),
                Err(_) => drop(these.dns.insert(name.as_ref().to_ascii_lowercase())),
            }
        }
        these
    }

    pub fn count(&self) -> usize {
        self.dns.len() + self.addresses.len()
    }

    pub fn contains_all(&self, others: &Self) -> bool {
        self.dns.is_superset(&others.dns) && self.addresses.is_superset(&others.addresses)
    }

    #[must_use]
    pub fn union(&self, others: &Self) -> Self {
        Self { dns: &self.dns | &others.dns, addresses: &self.addresses | &others.addresses }
    }

    #[must_use]
    pub fn intersection(&self, others: &Self) -> Self {
        Self { dns: &self.dns & &others.dns, addresses: &self.addresses & &others.addresses }
    }

    /// Names that `others` lack, printed.
    pub fn missing_from(&self, others: &Self) -> String {
        let dns = self.dns.difference(&others.dns).cloned();
        let addresses = self.addresses.difference(&others.addresses).map(ToString::to_string);
        dns.chain(addresses).collect::<Vec<_>>().join(", ")
    }

    fn permit(&self, name: &SanType) -> bool {
        match name {
            SanType::DnsName(name) => self.dns.contains(&name.as_str().to_ascii_lowercase()),
            SanType::IpAddress(address) => self.addresses.contains(address),
            _ => false,
        }
    }

    fn alternative(&self) -> Result<Vec<SanType>, AuthorityError> {
        let dns = self.dns.iter().map(|name| Ok(SanType::DnsName(ia5(name)?)));
        dns.chain(self.addresses.iter().map(|address| Ok(SanType::IpAddress(*address)))).collect()
    }

    /// Where no address is permitted, all are excluded: a type without constraints is permitted.
    fn constraints(&self) -> NameConstraints {
        let one = |address: &IpAddr| {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(*address, bits))
        };
        let every = |address| GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(address, 0));
        let dns = self.dns.iter().cloned().map(GeneralSubtree::DnsName);
        let excluded = if self.addresses.is_empty() {
            vec![every(Ipv4Addr::UNSPECIFIED.into()), every(Ipv6Addr::UNSPECIFIED.into())]
        } else {
            Vec::new()
        };
        NameConstraints {
            permitted_subtrees: dns.chain(self.addresses.iter().map(one)).collect(),
            excluded_subtrees: excluded,
        }
    }

    fn constrained(certificate: &X509Certificate<'_>) -> Option<Self> {
        let extension = certificate.name_constraints().ok()??;
        let mut names = Self::default();
        for subtree in extension.value.permitted_subtrees.iter().flatten() {
            match &subtree.base {
                GeneralName::DNSName(name) => drop(names.dns.insert((*name).to_owned())),
                GeneralName::IPAddress(bytes) => drop(names.addresses.insert(address(bytes)?)),
                _ => return None,
            }
        }
        extension.critical.then_some(names)
    }
}

/// The address of a constraint that permits a single one.
fn address(constraint: &[u8]) -> Option<IpAddr> {
    let (address, mask) = constraint.split_at_checked(constraint.len() / 2)?;
    if mask.iter().any(|byte| *byte != 0xff) {
        return None;
    }
    let v4 = <[u8; 4]>::try_from(address).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(address).map(IpAddr::from)).ok()
}

fn ia5(name: &str) -> Result<Ia5String, AuthorityError> {
    Ia5String::try_from(name).map_err(|_unfit| AuthorityError::Name { name: name.to_owned() })
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
        names.alternative()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.name_constraints = Some(names.constraints());
        params.not_before = (now - skew(validity)).into();
        params.not_after = (now + validity).into();
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Key)?;
        let certificate = params.self_signed(&key).map_err(AuthorityError::Key)?;
        Self::read(certificate.pem(), key.serialize_pem())
    }

    /// Reads certificate and key, in PEM.
    ///
    /// # Errors
    /// Where they are not of an authority that [`Authority::generate`] made.
    pub fn read(pem: String, key: String) -> Result<Self, AuthorityError> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(AuthorityError::Certificate)?;
        let (names, (not_before, not_after)) = {
            let (_, parsed) = X509Certificate::from_der(&certificate).map_err(|_malformed| AuthorityError::Foreign)?;
            let names = Names::constrained(&parsed).ok_or(AuthorityError::Foreign)?;
            (names, validity(&parsed))
        };
        let this = Self { certificate, pem, key, names, not_before, not_after };
        this.issuer().map_err(AuthorityError::Key)?;
        Ok(this)
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
