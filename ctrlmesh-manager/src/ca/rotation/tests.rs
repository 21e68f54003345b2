use rustls_pki_types::pem::PemObject as _;

use super::*;

mod namespaces;

const DAY: Duration = Duration::from_hours(24);
const LIFE: Duration = Duration::from_hours(24 * 400);

fn names() -> Names {
    Names::of(["kubernetes", "10.96.0.1"])
}

fn begin(now: SystemTime) -> Rotation {
    Rotation::begin(AuthorityKind::Mesh, &names(), LIFE, now, Vec::new()).unwrap()
}

/// Takes every due step on each of the days. Returns day and step.
fn live(rotation: &mut Rotation, names: &Names, start: SystemTime, days: std::ops::Range<u32>) -> Vec<(u32, Step)> {
    let mut done = Vec::new();
    for day in days {
        let now = start + DAY * day;
        while let Some(step) = rotation.due_step(names, now) {
            *rotation = rotation.clone().apply(step, AuthorityKind::Mesh, names, LIFE, now).unwrap();
            done.push((day, step));
            assert!(done.len() < 100, "{done:?}");
        }
        assert!(rotation.current.validity().1 > now, "signs on day {day} with what has ended");
    }
    done
}

#[test]
fn authorities_overlap_for_ever() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let done = live(&mut rotation, &names(), start, 0..1000);
    let expected =
        [(200, Step::Prepare), (300, Step::Promote), (400, Step::Forget), (400, Step::Prepare), (500, Step::Promote)];
    let near = |(at, step): &(u32, Step), (day, what): &(u32, Step)| at.abs_diff(*day) <= 1 && step == what;
    assert!(done.len() > 8, "{done:?}");
    for one in &expected {
        assert!(done.iter().any(|done| near(done, one)), "{one:?} in {done:?}");
    }
}

#[test]
fn a_successor_has_a_known_promotion_time() {
    let start = SystemTime::now();
    let days = |at: SystemTime| (at.duration_since(start).unwrap().as_secs() + DAY.as_secs() / 2) / DAY.as_secs();
    let mut rotation = begin(start);
    assert_eq!(rotation.successor(), None);
    live(&mut rotation, &names(), start, 0..201);
    let (made, signs) = rotation.successor().unwrap();
    assert_eq!((days(made), days(signs)), (200, 300));
    let done = live(&mut rotation, &names(), start, 201..302);
    assert!(matches!(done[..], [(299..=301, Step::Promote)]), "{done:?}");
    // An authority that was created for a new name signs for all names in its turn.
    let mut rotation = begin(start);
    live(&mut rotation, &Names::of(["kubernetes", "10.96.0.1", "new"]), start, 120..121);
    let (made, signs) = rotation.successor().unwrap();
    assert_eq!((days(made), days(signs)), (120, 300));
}

#[test]
fn an_authority_knows_when_it_was_made() {
    for life in [Duration::from_mins(2), Duration::from_hours(1), 400 * DAY] {
        let now = SystemTime::now();
        let made = Authority::generate("ctrlmesh mesh CA", &names(), life, now).unwrap().made();
        let off = now.duration_since(made).unwrap_or_else(|ahead| ahead.duration());
        assert!(off < Duration::from_secs(2), "{off:?} of {life:?}");
    }
}

fn csr(names: &[&str]) -> Vec<u8> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let params = rcgen::CertificateParams::new(names).unwrap();
    params.serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

/// The authority that signs a request for these names, in PEM.
fn signer(rotation: &Rotation, names: &[&str], now: SystemTime) -> Option<String> {
    let chain = rotation.sign(Holder::Node, &csr(names), now).ok()?;
    let is = |one: &&Authority| CertificateDer::from_pem_slice(one.pem().as_bytes()).unwrap() == chain[1];
    rotation.trusted().find(is).map(|one| one.pem().to_owned())
}

#[test]
fn a_new_address_affects_only_clients_that_dial_it() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let old = rotation.current.pem().to_owned();
    let more = Names::of(["kubernetes", "10.96.0.1", "192.0.2.1"]);
    let done = live(&mut rotation, &more, start, 0..190);
    assert_eq!(done, [(0, Step::Prepare)], "one that may speak for it, which waits its turn");
    // An operator that started before that trusts the old authority only.
    let later = start + DAY * 100;
    assert_eq!(signer(&rotation, &["kubernetes", "10.96.0.1"], later), Some(old));
    let new = rotation.next[0].pem().to_owned();
    assert_eq!(signer(&rotation, &["kubernetes", "192.0.2.1"], later), Some(new));
    assert_eq!(signer(&rotation, &["192.0.2.9"], later), None);
    assert_eq!(live(&mut rotation, &names(), start, 190..195), [], "an address less is no news");
}

#[test]
fn changing_addresses_need_few_authorities_that_sign_at_once() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let with = |address: &str| Names::of(["kubernetes", "10.96.0.1", address]);
    for hour in 0..100_u32 {
        let address = format!("192.0.2.{}", hour % 4);
        let now = start + Duration::from_hours(1) * hour;
        let names = with(&address);
        while let Some(step) = rotation.due_step(&names, now) {
            assert_eq!(step, Step::Prepare);
            rotation = rotation.clone().apply(step, AuthorityKind::Mesh, &names, LIFE, now).unwrap();
        }
        assert!(signer(&rotation, &["kubernetes", &address], now).is_some(), "{address}");
    }
    assert_eq!(rotation.next.len(), 4);
    let mut rotation = begin(start);
    for day in 0..30_u32 {
        let (now, names) = (start + DAY * 2 * day, with(&format!("192.0.2.{day}")));
        rotation = rotation.apply(Step::Prepare, AuthorityKind::Mesh, &names, LIFE, now).unwrap();
    }
    assert_eq!(rotation.next.len(), MAX_NEXT);
    assert_eq!(rotation.bundle().matches("BEGIN").count(), 31, "former signers stay trusted");
}

#[test]
fn endless_new_addresses_fill_neither_secret_nor_bundle() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let (mut made, mut dropped) = (Vec::new(), 0);
    let day = 24 * 60;
    for minute in (0..150).chain((150..12 * day).step_by(15)) {
        let now = start + Duration::from_mins(1) * minute;
        let addresses = (0..64).map(|at| format!("2001:db8::{minute:x}:{at:x}"));
        let names = Names::of(addresses.chain(["kubernetes".to_owned(), "10.96.0.1".to_owned()]));
        while let Some(step) = rotation.due_step(&names, now) {
            assert_eq!(step, Step::Prepare);
            let next = rotation.clone().apply(step, AuthorityKind::Mesh, &names, LIFE, now).unwrap();
            dropped += rotation.dropped_by(&next, now);
            rotation = next;
            made.push(minute);
        }
    }
    let expected = [0, 2, 8, 31, 121, 481, 1441];
    assert!(made.iter().zip(expected).all(|(at, wanted)| at.abs_diff(wanted) <= 15), "each four times later: {made:?}");
    assert!((42..=90).contains(&made.len()), "{made:?}");
    assert_eq!(dropped, 1 + made.len() - rotation.bundle().matches("BEGIN").count());
    assert!(rotation.previous.len() <= MAX_PREVIOUS);
    let sizes = rotation.trusted().map(|one| one.names().count()).max();
    assert!(sizes <= Some(MAX_RECENT_NAMES), "{sizes:?}");
    let mut data = Data::new();
    rotation.write(AuthorityKind::Mesh, &mut data);
    let bytes: usize = data.values().map(|value| value.0.len()).sum();
    assert!(dropped > 0 && bytes < 400_000, "{dropped}, {bytes}");
    assert!(signer(&rotation, &["kubernetes", "10.96.0.1"], start + DAY * 12).is_some());
    let renewed = rotation.apply(Step::Prepare, AuthorityKind::Mesh, &names(), LIFE, start + DAY * 200).unwrap();
    assert_eq!(renewed.next.len(), MAX_NEXT, "rotation in its turn is not held up");
}

#[test]
fn an_authority_of_a_clock_that_was_ahead_holds_nothing_up() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let with = |name: &str| Names::of(["kubernetes", "10.96.0.1", name]);
    let ahead = start + DAY * 30;
    rotation = rotation.apply(Step::Prepare, AuthorityKind::Mesh, &with("ahead"), LIFE, ahead).unwrap();
    assert_eq!(rotation.due_step(&with("new"), start), Some(Step::Prepare));
}

#[test]
fn of_a_published_bundle_those_that_signed_last_stay_trusted() {
    let start = SystemTime::now();
    let made = |day: u32| {
        let at = start + DAY * day;
        Authority::generate(AuthorityKind::Mesh.common_name(), &names(), LIFE, at).unwrap().pem().to_owned()
    };
    let bundle: Vec<String> = (0..40).rev().map(made).collect();
    let rotation = Rotation::begin(AuthorityKind::Mesh, &names(), LIFE, start, bundle.clone()).unwrap();
    assert_eq!(rotation.previous.len(), MAX_PREVIOUS);
    assert_eq!(rotation.previous.last().map(Predecessor::pem), bundle.first().map(String::as_str));
}

#[test]
fn an_authority_for_a_new_address_is_promoted_in_turn() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let more = Names::of(["kubernetes", "10.96.0.1", "192.0.2.1"]);
    live(&mut rotation, &names(), start, 0..10);
    let done = live(&mut rotation, &more, start, 10..420);
    let expected = [(10, Step::Prepare), (210, Step::Prepare), (300, Step::Promote)];
    assert_eq!(done[..3], expected);
    assert!(rotation.current.names().contains_all(&more));
}

#[test]
fn a_serving_certificate_uses_a_widely_known_authority() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let more = Names::of(["kubernetes", "10.96.0.1", "manager.example.com"]);
    let (by, of) = rotation.serving_authority(&more, start);
    assert_eq!((by.pem(), of), (rotation.current.pem(), names()), "what it may, at once");
    rotation = rotation.apply(Step::Prepare, AuthorityKind::Mesh, &more, LIFE, start).unwrap();
    assert_eq!(rotation.serving_authority(&more, start + DAY / 2).1, names());
    let (by, of) = rotation.serving_authority(&more, start + DAY);
    assert_eq!((by.pem(), of), (rotation.next[0].pem(), more), "all, once it is known");
    let (by, of) = rotation.serving_authority(&names(), start + DAY);
    assert_eq!((by.pem(), of), (rotation.current.pem(), names()));
}

#[test]
fn a_late_successor_is_promoted_before_the_old_one_ends() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let late = start + LIFE - DAY;
    rotation = rotation.apply(Step::Prepare, AuthorityKind::Mesh, &names(), LIFE, late).unwrap();
    assert_eq!(rotation.due_step(&names(), late), Some(Step::Promote));
}

#[test]
fn a_rotation_is_read_as_it_was_written() {
    let start = SystemTime::now();
    let mut rotation = begin(start);
    let mut data = Data::new();
    for step in [Step::Prepare, Step::Promote, Step::Prepare, Step::Promote, Step::Prepare] {
        rotation = rotation.apply(step, AuthorityKind::Mesh, &names(), LIFE, start).unwrap();
        rotation.write(AuthorityKind::Mesh, &mut data);
        let read = Rotation::read(AuthorityKind::Mesh, &data).unwrap();
        assert_eq!(read.bundle(), rotation.bundle());
        assert_eq!(read.current.key(), rotation.current.key());
    }
    assert_eq!(rotation.bundle().matches("BEGIN").count(), 4);
    rotation = rotation.apply(Step::Prepare, AuthorityKind::Mesh, &names(), LIFE, start).unwrap();
    rotation.write(AuthorityKind::Mesh, &mut data);
    let read = Rotation::read(AuthorityKind::Mesh, &data).unwrap();
    let keys = |rotation: &Rotation| rotation.next.iter().map(|next| next.key().to_owned()).collect::<Vec<_>>();
    assert_eq!((read.next.len(), keys(&read)), (2, keys(&rotation)));
    assert_eq!(read.bundle(), rotation.bundle());
    data.remove("mesh-next.key");
    assert!(Rotation::read(AuthorityKind::Mesh, &data).is_err());
    let error = Rotation::read(AuthorityKind::Manager, &data).unwrap_err();
    assert!(matches!(error, RotationError::Missing { key } if key == "manager.key"));
}
