use std::sync::Arc;

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls_pki_types::{ServerName, UnixTime};

use super::*;
use crate::tls;

const DAY: Duration = Duration::from_hours(24);

fn names() -> Names {
    Names::of(["kubernetes.default.svc", "10.96.0.1", "::1"])
}

fn authority() -> Authority {
    Authority::generate("mesh", &names(), 365 * DAY, SystemTime::now()).unwrap()
}

/// Whether a client that trusts only `authority` accepts `chain` for `name`.
fn is_trusted(authority: &Authority, chain: &[CertificateDer<'static>], name: &str) -> bool {
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate.clone()).unwrap();
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), tls::provider()).build();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    verifier.unwrap().verify_server_cert(&chain[0], &chain[1..], &name, &[], UnixTime::now()).is_ok()
}

fn request(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    change(&mut params);
    params.serialize_request(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

#[test]
fn name_constraints_are_critical_in_the_certificate() {
    let made = authority();
    let read = Authority::read(made.pem().to_owned(), made.key().to_owned()).unwrap();
    assert_eq!(read.names(), &names());
    let (_, parsed) = X509Certificate::from_der(&made.certificate).unwrap();
    assert!(parsed.name_constraints().unwrap().unwrap().critical);
    assert_eq!(parsed.basic_constraints().unwrap().unwrap().value.path_len_constraint, Some(0));
}

#[test]
fn clients_trust_its_leaves_for_its_names_only() {
    let authority = authority();
    let leaf = authority.issue(&names(), SystemTime::now()).unwrap();
    for name in ["kubernetes.default.svc", "10.96.0.1", "::1"] {
        assert!(is_trusted(&authority, &leaf.chain, name), "{name}");
    }
    // A thief of the key could sign these, but clients enforce the constraints.
    for foreign in ["example.com", "10.96.0.2", "192.0.2.1"] {
        let leaf = authority.issue(&Names::of([foreign]), SystemTime::now()).unwrap();
        assert!(!is_trusted(&authority, &leaf.chain, foreign), "{foreign}");
    }
}

#[test]
fn an_authority_without_addresses_speaks_for_none() {
    let names = Names::of(["ctrlmesh-manager.ctrlmesh-system.svc"]);
    let authority = Authority::generate("manager", &names, DAY, SystemTime::now()).unwrap();
    for address in ["10.0.0.1", "fd00::1"] {
        let leaf = authority.issue(&Names::of([address]), SystemTime::now()).unwrap();
        assert!(!is_trusted(&authority, &leaf.chain, address), "{address}");
    }
}

#[test]
fn a_permitted_request_is_signed_for_all_names_and_a_day() {
    let authority = authority();
    let now = SystemTime::now();
    let chain = authority.sign(&request(&["kubernetes.default.svc"], |_| {}), now).unwrap();
    for name in ["kubernetes.default.svc", "10.96.0.1", "::1"] {
        assert!(is_trusted(&authority, &chain, name), "{name}");
    }
    let (_, leaf) = X509Certificate::from_der(&chain[0]).unwrap();
    let left = validity(&leaf).1.duration_since(now).unwrap();
    assert!(left <= LEAF_VALIDITY && left > LEAF_VALIDITY / 2);
    assert!(!leaf.is_ca());
}

#[test]
fn a_request_for_more_is_refused() {
    let authority = authority();
    let sign = |request: &[u8]| authority.sign(request, SystemTime::now()).unwrap_err();
    for outside in ["example.com", "*.kubernetes.default.svc", "a.kubernetes.default.svc", "10.96.0.2"] {
        let error = sign(&request(&["kubernetes.default.svc", outside], |_| {}));
        assert!(matches!(&error, SignError::Outside { name } if name == outside), "{error}");
    }
    let ca = request(&["kubernetes.default.svc"], |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    assert!(matches!(sign(&ca), SignError::Authority));
    assert!(matches!(sign(&request(&[], |_| {})), SignError::NoName));
    assert!(matches!(sign(b"nonsense"), SignError::Malformed(_)));
    assert!(matches!(sign(&vec![0; MAX_REQUEST_BYTES + 1]), SignError::TooLarge { .. }));
    let mut forged = request(&["kubernetes.default.svc"], |_| {});
    let last = forged.len() - 1;
    forged[last] ^= 1;
    assert!(matches!(sign(&forged), SignError::Malformed(_)));
    let other_key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let params = CertificateParams::new(["kubernetes.default.svc".to_owned()]).unwrap();
    let request = params.serialize_request(&other_key).unwrap();
    assert!(matches!(sign(request.der()), SignError::Key));
}

#[test]
fn an_email_address_is_outside() {
    let request = request(&[], |params| {
        params.subject_alt_names = vec![SanType::Rfc822Name("a@kubernetes".try_into().unwrap())];
    });
    let error = authority().sign(&request, SystemTime::now()).unwrap_err();
    assert!(matches!(error, SignError::Outside { .. }), "{error}");
}

#[test]
fn a_leaf_does_not_outlive_its_authority() {
    let short = Authority::generate("mesh", &names(), DAY / 4, SystemTime::now()).unwrap();
    let leaf = short.issue(&names(), SystemTime::now()).unwrap();
    let (_, leaf) = X509Certificate::from_der(&leaf.chain[0]).unwrap();
    assert!(validity(&leaf).1 <= short.validity().1);
}

#[test]
fn a_certificate_without_constraints_is_not_ours() {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let pem = params.self_signed(&key).unwrap().pem();
    let error = Authority::read(pem, key.serialize_pem()).unwrap_err();
    assert!(matches!(error, AuthorityError::Foreign));
}
