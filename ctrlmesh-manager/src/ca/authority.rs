//! What may a certificate authority of ours speak for, and what does it sign?
//!
//! Pure but for the randomness of keys. What an authority may speak for stands in its own certificate, as critical
//! name constraints, and is read from there again: there is no second list that could say something else.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CidrSubnet, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;

/// How long a leaf is valid.
pub const LEAF_VALIDITY: Duration = Duration::from_hours(24);

/// How far somebody's clock may be behind ours, at most.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// How long before it is made a certificate that lives for `validity` begins: not so long that it is old when it is made.
fn skew(validity: Duration) -> Duration {
    CLOCK_SKEW.min(validity / 8)
}

/// Largest certificate signing request that is read, in bytes: a key, and some dozens of names.
const MAX_REQUEST_BYTES: usize = 16 * 1024;

/// What a leaf calls its owner; only the alternative names count.
const LEAF_NAME: &str = "ctrlmesh";

/// DNS names and addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// DNS names, each meant exactly; in a constraint it stands for the names below it too, which we never sign.
    pub dns: BTreeSet<String>,
    /// Addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// A certificate authority: its certificate and key.
#[derive(Clone, Debug)]
pub struct Authority {
    certificate: CertificateDer<'static>,
    pem: String,
    key: String,
    names: Names,
    not_before: SystemTime,
    not_after: SystemTime,
}

/// A certificate and its key.
#[derive(Debug)]
pub struct Leaf {
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// PKCS #8, DER.
    pub key: Vec<u8>,
}

/// An authority that cannot be made or read.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// What is said to be a certificate is none.
    #[error("read the certificate of an authority")]
    Certificate(#[source] rustls_pki_types::pem::Error),
    /// The certificate says nothing that could be understood, or has no constraints.
    #[error("the certificate of an authority is not one of ours")]
    Foreign,
    /// A name that no certificate can carry.
    #[error("{name:?} is not a name that a certificate can carry")]
    Name {
        /// The name.
        name: String,
    },
    /// The key does not fit, or nothing can be signed with it.
    #[error("use the key of an authority")]
    Key(#[source] rcgen::Error),
}

/// A certificate signing request that is refused.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// It is too large.
    #[error("the request has {bytes} bytes, at most {MAX_REQUEST_BYTES} are read")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// It is no request, or not signed with its own key.
    #[error("read the request")]
    Malformed(#[source] rcgen::Error),
    /// It asks for a certificate that could sign others.
    #[error("the request asks for a certificate authority")]
    Authority,
    /// A key that is not ECDSA P-256.
    #[error("the request's key is not ECDSA P-256")]
    Key,
    /// It asks for no name.
    #[error("the request asks for no name")]
    NoName,
    /// A name that the authority must not speak for.
    #[error("the request asks for {name:?}, which is outside what the authority may speak for")]
    Outside {
        /// The name.
        name: String,
    },
    /// Signing failed.
    #[error("sign the request")]
    Sign(#[source] rcgen::Error),
}

// === impl Names ===

impl Names {
    /// Sorts texts into DNS names and addresses.
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

    /// Whether all of `others` are among these.
    pub fn cover(&self, others: &Self) -> bool {
        self.dns.is_superset(&others.dns) && self.addresses.is_superset(&others.addresses)
    }

    /// These and `others`.
    #[must_use]
    pub fn and(&self, others: &Self) -> Self {
        Self { dns: &self.dns | &others.dns, addresses: &self.addresses | &others.addresses }
    }

    /// Those that are among `others` too.
    #[must_use]
    pub fn both(&self, others: &Self) -> Self {
        Self { dns: &self.dns & &others.dns, addresses: &self.addresses & &others.addresses }
    }

    /// Those that are not among `others`, printed.
    pub fn beyond(&self, others: &Self) -> String {
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

    /// As constraints. Where no address is allowed, all are forbidden: what is not constrained at all is allowed.
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

/// The address of a constraint for one address.
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

// === impl Authority ===

impl Authority {
    /// Makes an authority that may speak for `names` only.
    ///
    /// # Errors
    /// Where one of the names cannot be in a certificate.
    pub fn make(
        called: &str,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        names.alternative()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, called);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.name_constraints = Some(names.constraints());
        params.not_before = (now - skew(validity)).into();
        params.not_after = (now + validity).into();
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Key)?;
        let certificate = params.self_signed(&key).map_err(AuthorityError::Key)?;
        Self::read(certificate.pem(), key.serialize_pem())
    }

    /// Reads an authority from its certificate and key, in PEM.
    ///
    /// # Errors
    /// Where they are not what [`Authority::make`] gave.
    pub fn read(pem: String, key: String) -> Result<Self, AuthorityError> {
        let certificate =
            CertificateDer::from_pem_slice(pem.as_bytes()).map_err(AuthorityError::Certificate)?;
        let (names, (not_before, not_after)) = {
            let (_, parsed) = X509Certificate::from_der(&certificate)
                .map_err(|_malformed| AuthorityError::Foreign)?;
            let names = Names::constrained(&parsed).ok_or(AuthorityError::Foreign)?;
            (names, validity(&parsed))
        };
        let this = Self { certificate, pem, key, names, not_before, not_after };
        this.issuer().map_err(AuthorityError::Key)?;
        Ok(this)
    }

    /// The certificate, in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The key, in PEM.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What it may speak for.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// From when and until when it is valid.
    pub fn validity(&self) -> (SystemTime, SystemTime) {
        (self.not_before, self.not_after)
    }

    /// When it was made.
    pub fn made(&self) -> SystemTime {
        let life = self.not_after.duration_since(self.not_before).unwrap_or_default();
        // What `skew` says of the rest.
        self.not_before + CLOCK_SKEW.min(life / 9)
    }

    /// Makes a key and a leaf for `names`.
    ///
    /// # Errors
    /// Where a name cannot be in a certificate; whether it may is not asked, but no client would believe it.
    pub fn issue(&self, names: &Names, now: SystemTime) -> Result<Leaf, AuthorityError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Key)?;
        let issuer = self.issuer().map_err(AuthorityError::Key)?;
        let leaf = self
            .leaf(names.alternative()?, now)
            .signed_by(&key, &issuer)
            .map_err(AuthorityError::Key)?;
        let chain = vec![leaf.der().clone(), self.certificate.clone()];
        Ok(Leaf { chain, key: key.serialize_der() })
    }

    /// Signs a certificate signing request (DER): its key, and nothing else that it asks for. It is for all that the
    /// authority may speak for: a client may dial any of the API server's addresses, and who asks need not know of all.
    ///
    /// # Errors
    /// Where it asks for what the authority must not speak for.
    pub fn sign(
        &self,
        request: &[u8],
        now: SystemTime,
    ) -> Result<Vec<CertificateDer<'static>>, SignError> {
        if request.len() > MAX_REQUEST_BYTES {
            return Err(SignError::TooLarge { bytes: request.len() });
        }
        let request = CertificateSigningRequestDer::from(request);
        let request =
            CertificateSigningRequestParams::from_der(&request).map_err(SignError::Malformed)?;
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

/// When the certificate in `pem` ends; `None` where that cannot be read.
pub fn end_of(pem: &[u8]) -> Option<SystemTime> {
    let certificate = CertificateDer::from_pem_slice(pem).ok()?;
    let (_, parsed) = X509Certificate::from_der(&certificate).ok()?;
    Some(validity(&parsed).1)
}

/// Whether `pem` is the certificate of an authority as [`Authority::make`] makes them, `called` so, which may speak for its
/// names only.
pub fn is_ours(pem: &[u8], called: &str) -> bool {
    let Ok(certificate) = CertificateDer::from_pem_slice(pem) else { return false };
    let Ok((_, parsed)) = X509Certificate::from_der(&certificate) else { return false };
    let mut names = parsed.subject().iter_common_name();
    let is_called = names.next().is_some_and(|name| name.as_str() == Ok(called));
    // What only excludes some leaves all others.
    let may_speak = Names::constrained(&parsed).is_some_and(|names| names != Names::default());
    parsed.is_ca() && is_called && may_speak
}

fn validity(certificate: &X509Certificate<'_>) -> (SystemTime, SystemTime) {
    let at = |seconds: i64| {
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
    };
    let validity = certificate.validity();
    (at(validity.not_before.timestamp()), at(validity.not_after.timestamp()))
}

fn printed(name: &SanType) -> String {
    match name {
        SanType::DnsName(name) | SanType::Rfc822Name(name) | SanType::URI(name) => {
            name.as_str().to_owned()
        }
        SanType::IpAddress(address) => address.to_string(),
        _ => "another kind of name".to_owned(),
    }
}

#[cfg(test)]
mod tests;
