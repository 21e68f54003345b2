//! What pods of namespaces believe.

use std::sync::Arc;

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls_pki_types::{ServerName, UnixTime};

use super::*;
use crate::tls;

type Chain = Vec<CertificateDer<'static>>;

fn believes(bundle: &str, chain: &Chain, now: SystemTime) -> bool {
    let mut roots = RootCertStore::empty();
    for one in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(one.unwrap()).unwrap();
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), tls::provider()).build().unwrap();
    let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap());
    let name = ServerName::try_from("kubernetes").unwrap();
    verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], now).is_ok()
}

fn of_pod(rotation: &Rotation, namespace: &str, now: SystemTime) -> Chain {
    rotation.sign(Holder::Pod { namespace }, &csr(&["kubernetes", "10.96.0.1"]), now).unwrap()
}

fn of_node(rotation: &Rotation, now: SystemTime) -> Chain {
    rotation.sign(Holder::Node, &csr(&["kubernetes", "10.96.0.1"]), now).unwrap()
}

#[test]
fn a_pods_certificate_is_good_in_its_namespace_only() {
    let now = SystemTime::now();
    let rotation = begin(now);
    let [a, b] = ["a", "b"].map(|namespace| rotation.bundle_of(namespace).unwrap());
    let (pod, node) = (of_pod(&rotation, "a", now), of_node(&rotation, now));
    assert!(believes(&a, &pod, now) && !believes(&b, &pod, now) && !believes(&rotation.bundle(), &pod, now));
    for bundle in [&a, &b, &rotation.bundle()] {
        assert!(believes(bundle, &node, now));
    }
}

#[test]
fn what_was_signed_before_a_rotation_stays_good_in_its_namespace() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    live(&mut rotation, &names(), start, 0..299);
    let read_once = rotation.bundle_of("a").unwrap();
    let before = start + DAY * 299;
    let signed = of_pod(&rotation, "a", before);
    let done = live(&mut rotation, &names(), start, 299..302);
    assert!(matches!(done[..], [(_, Step::Promote)]), "{done:?}");
    let mut data = Data::new();
    rotation.write(AuthorityKind::Mesh, &mut data);
    let read = Rotation::read(AuthorityKind::Mesh, &data).unwrap();
    assert_eq!(read.bundle_of("a").unwrap(), rotation.bundle_of("a").unwrap());
    let (a, b) = (read.bundle_of("a").unwrap(), read.bundle_of("b").unwrap());
    let later = before + DAY / 2;
    assert!(believes(&a, &signed, later) && !believes(&b, &signed, later), "to who reads it now");
    let now = start + DAY * 302;
    assert!(believes(&read_once, &of_pod(&read, "a", now), now), "to who read it before");
    // An earlier version takes no notice of them, and adds one without.
    let mut other = begin(start);
    other.previous.extend([rotation.current.pem().to_owned().into(), read.previous[0].pem().to_owned().into()]);
    let mut changed = Data::new();
    other.write(AuthorityKind::Mesh, &mut changed);
    changed.insert("mesh-previous.seeds".to_owned(), data["mesh-previous.seeds"].clone());
    let changed = Rotation::read(AuthorityKind::Mesh, &changed).unwrap();
    assert!(believes(&changed.bundle_of("a").unwrap(), &signed, later));
    assert_eq!(changed.bundle_of("a").unwrap().matches("BEGIN").count(), 3 + 2);
}

#[test]
fn a_manager_has_no_seeds() {
    let start = SystemTime::now();
    let mut rotation = Rotation::begin(AuthorityKind::Manager, &names(), LIFE, start, Vec::new()).unwrap();
    for step in [Step::Prepare, Step::Promote] {
        rotation = rotation.apply(step, AuthorityKind::Manager, &names(), LIFE, start).unwrap();
    }
    let mut data = Data::new();
    rotation.write(AuthorityKind::Manager, &mut data);
    assert!(data.contains_key("manager-previous.crt") && !data.contains_key("manager-previous.seeds"));
}

#[test]
fn an_authority_of_an_earlier_version_signs_for_pods_until_its_turn_is_over() {
    let start = SystemTime::now();
    let current = Authority::generate(AuthorityKind::Mesh.common_name(), &names(), LIFE, start).unwrap();
    let mut rotation = Rotation { current, ..begin(start) };
    let signed = of_pod(&rotation, "a", start);
    assert!(believes(&rotation.bundle(), &signed, start), "as its pods read once");
    live(&mut rotation, &names(), start, 0..201);
    let read_once = rotation.bundle_of("a").unwrap();
    assert_eq!(read_once.matches("BEGIN").count(), 3, "the next one has one for the namespace");
    live(&mut rotation, &names(), start, 201..302);
    let now = start + DAY * 302;
    let signed = of_pod(&rotation, "a", now);
    assert!(believes(&read_once, &signed, now) && !believes(&rotation.bundle_of("b").unwrap(), &signed, now));
    let mut data = Data::new();
    rotation.write(AuthorityKind::Mesh, &mut data);
    assert!(!data.contains_key("mesh-previous.seeds"), "it never had any");
}
