//! Derives the authority of a namespace from one of the mesh.
//!
//! Pods of a namespace believe the mesh's authority, which signs for node proxies only, and one of their namespace,
//! which signs for the proxies inside its pods. So what is stolen from such a pod passes for the API server in its own
//! namespace only.
//!
//! Key and certificate follow from the mesh's authority and from the namespace's name, byte for byte: all replicas
//! publish the same, and nothing of it is stored. Whoever has the key of one namespace learns nothing of the others'.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use data_encoding::HEXLOWER;
use p256::ecdsa::signature::Signer as _;
use p256::ecdsa::{DerSignature, SigningKey};
use p256::pkcs8::{EncodePrivateKey as _, LineEnding};
use rcgen::{PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm};

use crate::ca::authority::{self, Authority, AuthorityError};

const COMMON_NAME: &str = "ctrlmesh namespace CA";

/// Of a seed, and of a P-256 key.
const BYTES: usize = 32;

/// What the keys of all namespaces follow from, under one authority of the mesh.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Seed([u8; BYTES]);

/// A key with which the same bytes have the same signature (RFC 6979).
struct DerivedKey {
    key: SigningKey,
    /// The point, uncompressed.
    public: Vec<u8>,
}

struct Length;

impl KeyType for Length {
    fn len(&self) -> usize {
        BYTES
    }
}

impl Seed {
    /// That of the mesh's authority with this key (PKCS #8, in PEM).
    ///
    /// # Errors
    /// Where it is no PEM.
    pub(super) fn of(key: &str) -> Result<Self, AuthorityError> {
        // However its lines are broken.
        let key = pem::parse(key).map_err(|_malformed| AuthorityError::Derived)?;
        let derived = Salt::new(HKDF_SHA256, b"ctrlmesh mesh CA").extract(key.contents());
        Ok(Self(expand(&derived, &[b"namespaces"])))
    }

    /// The authority of `namespace` under the mesh's authority with this certificate (PEM). It may sign for the same
    /// names, and for as long.
    ///
    /// # Errors
    /// Where the certificate is not one of ours.
    pub(super) fn authority(&self, certificate: &str, namespace: &str) -> Result<Authority, AuthorityError> {
        let (names, validity) = authority::claims_of(certificate)?;
        // As long as a label of DNS, it fits: 64 characters.
        let subject = authority::subject(COMMON_NAME, Some(namespace));
        let derived = DerivedKey::of(self, namespace);
        let pem = authority::self_signed(subject, &names, validity, &derived)?;
        let key = derived.key.to_pkcs8_pem(LineEnding::LF).map_err(|_unfit| AuthorityError::Derived)?;
        Authority::read(pem, key.to_string())
    }
}

impl DerivedKey {
    fn of(seed: &Seed, namespace: &str) -> Self {
        let derived = Prk::new_less_safe(HKDF_SHA256, &seed.0);
        let number = |count: u8| expand(&derived, &[b"namespace ", namespace.as_bytes(), &[count]]);
        // One number of 2^32 is no key.
        let mut keys = (0..=u8::MAX).filter_map(|count| SigningKey::from_slice(&number(count)).ok());
        #[expect(clippy::expect_used, reason = "one of 256 numbers is a key")]
        let key = keys.next().expect("a key");
        let public = key.verifying_key().to_sec1_point(false).as_bytes().to_vec();
        Self { key, public }
    }
}

impl PublicKeyData for DerivedKey {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl rcgen::SigningKey for DerivedKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature: DerSignature = self.key.try_sign(message).map_err(|_failed| rcgen::Error::RemoteKeyError)?;
        Ok(signature.as_bytes().to_vec())
    }
}

fn expand(derived: &Prk, info: &[&[u8]]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let filled = derived.expand(info, Length).and_then(|key| key.fill(&mut bytes));
    #[expect(clippy::expect_used, reason = "32 bytes are fewer than 255 digests")]
    filled.expect("32 bytes");
    bytes
}

impl fmt::Debug for Seed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Seed")
    }
}

/// In hexadecimal digits, as the Secret has it.
impl fmt::Display for Seed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl FromStr for Seed {
    type Err = AuthorityError;

    fn from_str(text: &str) -> Result<Self, AuthorityError> {
        let bytes = HEXLOWER.decode(text.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or(AuthorityError::Derived)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::ca::authority::Names;

    fn mesh() -> Authority {
        let names = Names::of(["kubernetes", "10.96.0.1"]);
        Authority::generate("ctrlmesh mesh CA", &names, Duration::from_hours(24), SystemTime::now()).unwrap()
    }

    fn of(mesh: &Authority, namespace: &str) -> Authority {
        Seed::of(mesh.key()).unwrap().authority(mesh.pem(), namespace).unwrap()
    }

    #[test]
    fn all_replicas_derive_the_same_bytes() {
        let mesh = mesh();
        let (one, other) = (of(&mesh, "team-a"), of(&mesh, "team-a"));
        assert_eq!((one.pem(), one.key()), (other.pem(), other.key()));
        let seed = Seed::of(mesh.key()).unwrap();
        assert_eq!(Seed::of(&mesh.key().replace('\n', "\r\n")).unwrap(), seed);
        assert_eq!(seed.to_string().parse::<Seed>().unwrap(), seed);
        assert_eq!(format!("{seed:?}"), "Seed");
        for wrong in ["", "0", "0g", &"00".repeat(31), &"00".repeat(33), "äöü"] {
            assert!(wrong.parse::<Seed>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_namespaces_authority_says_what_the_meshs_does() {
        let mesh = mesh();
        let derived = of(&mesh, &"n".repeat(63));
        assert_eq!((derived.names(), derived.validity()), (mesh.names(), mesh.validity()));
        assert_eq!(Authority::read(derived.pem().to_owned(), derived.key().to_owned()).unwrap().names(), mesh.names());
    }

    #[test]
    fn another_namespace_or_another_authority_is_another_key() {
        let (mesh, other) = (mesh(), mesh());
        let all = [of(&mesh, "a"), of(&mesh, "b"), of(&mesh, "a0"), of(&other, "a"), mesh, other];
        for (at, one) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|before| before.key() != one.key()), "{at}");
        }
    }
}
