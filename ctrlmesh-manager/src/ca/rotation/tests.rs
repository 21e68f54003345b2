use rustls_pki_types::pem::PemObject as _;

use super::*;

const DAY: Duration = Duration::from_hours(24);
const LIFE: Duration = Duration::from_hours(24 * 400);

fn names() -> Names {
    Names::of(["kubernetes", "10.96.0.1"])
}

fn begin(now: SystemTime) -> Line {
    Line::begin(Kind::Mesh, &names(), LIFE, now, Vec::new()).unwrap()
}

/// Goes through the days, doing what is due; when, and what, in days since the start.
fn live(
    line: &mut Line,
    names: &Names,
    start: SystemTime,
    days: std::ops::Range<u32>,
) -> Vec<(u32, Due)> {
    let mut done = Vec::new();
    for day in days {
        let now = start + DAY * day;
        while let Some(due) = line.due(names, now) {
            *line = line.clone().step(due, Kind::Mesh, names, LIFE, now).unwrap();
            done.push((day, due));
            assert!(done.len() < 100, "{done:?}");
        }
        assert!(line.current.validity().1 > now, "signs on day {day} with what has ended");
    }
    done
}

#[test]
fn authorities_overlap_for_ever() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let done = live(&mut line, &names(), start, 0..1000);
    let expected = [
        (200, Due::Prepare),
        (300, Due::Promote),
        (400, Due::Forget),
        (400, Due::Prepare),
        (500, Due::Promote),
    ];
    let near =
        |(at, due): &(u32, Due), (day, what): &(u32, Due)| at.abs_diff(*day) <= 1 && due == what;
    assert!(done.len() > 8, "{done:?}");
    for one in &expected {
        assert!(done.iter().any(|step| near(step, one)), "{one:?} in {done:?}");
    }
}

#[test]
fn when_the_next_one_signs_is_known_as_soon_as_there_is_one() {
    let start = SystemTime::now();
    let days = |at: SystemTime| {
        (at.duration_since(start).unwrap().as_secs() + DAY.as_secs() / 2) / DAY.as_secs()
    };
    let mut line = begin(start);
    assert_eq!(line.follows(), None);
    live(&mut line, &names(), start, 0..201);
    let (made, signs) = line.follows().unwrap();
    assert_eq!((days(made), days(signs)), (200, 300));
    let done = live(&mut line, &names(), start, 201..302);
    assert!(matches!(done[..], [(299..=301, Due::Promote)]), "{done:?}");
    // One that was made for a name that is new signs for all in its turn.
    let mut line = begin(start);
    live(&mut line, &Names::of(["kubernetes", "10.96.0.1", "new"]), start, 120..121);
    let (made, signs) = line.follows().unwrap();
    assert_eq!((days(made), days(signs)), (120, 300));
}

#[test]
fn an_authority_knows_when_it_was_made() {
    for life in [Duration::from_mins(2), Duration::from_hours(1), 400 * DAY] {
        let now = SystemTime::now();
        let made = Authority::make("ctrlmesh mesh CA", &names(), life, now).unwrap().made();
        let off = now.duration_since(made).unwrap_or_else(|ahead| ahead.duration());
        assert!(off < Duration::from_secs(2), "{off:?} of {life:?}");
    }
}

fn csr(names: &[&str]) -> Vec<u8> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let params = rcgen::CertificateParams::new(names).unwrap();
    params.serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

/// By whom a request for these is signed, in PEM.
fn signer(line: &Line, names: &[&str], now: SystemTime) -> Option<String> {
    let chain = line.sign(&csr(names), now).ok()?;
    let is = |one: &&Authority| {
        CertificateDer::from_pem_slice(one.pem().as_bytes()).unwrap() == chain[1]
    };
    line.believed().find(is).map(|one| one.pem().to_owned())
}

#[test]
fn a_new_address_changes_nothing_for_those_who_do_not_dial_it() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let old = line.current.pem().to_owned();
    let more = Names::of(["kubernetes", "10.96.0.1", "192.0.2.1"]);
    let done = live(&mut line, &more, start, 0..190);
    assert_eq!(done, [(0, Due::Prepare)], "one that may speak for it, which waits its turn");
    // An operator that read its authorities before that believes the old one only.
    let later = start + DAY * 100;
    assert_eq!(signer(&line, &["kubernetes", "10.96.0.1"], later), Some(old));
    let new = line.next[0].pem().to_owned();
    assert_eq!(signer(&line, &["kubernetes", "192.0.2.1"], later), Some(new));
    assert_eq!(signer(&line, &["192.0.2.9"], later), None);
    assert_eq!(live(&mut line, &names(), start, 190..195), [], "an address less is no news");
}

#[test]
fn addresses_that_come_and_go_are_a_few_authorities_and_each_signs_at_once() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let with = |address: &str| Names::of(["kubernetes", "10.96.0.1", address]);
    for hour in 0..100_u32 {
        let address = format!("192.0.2.{}", hour % 4);
        let now = start + Duration::from_hours(1) * hour;
        let names = with(&address);
        while let Some(due) = line.due(&names, now) {
            assert_eq!(due, Due::Prepare);
            line = line.clone().step(due, Kind::Mesh, &names, LIFE, now).unwrap();
        }
        assert!(signer(&line, &["kubernetes", &address], now).is_some(), "{address}");
    }
    assert_eq!(line.next.len(), 4);
    let mut line = begin(start);
    for day in 0..30_u32 {
        let (now, names) = (start + DAY * 2 * day, with(&format!("192.0.2.{day}")));
        line = line.step(Due::Prepare, Kind::Mesh, &names, LIFE, now).unwrap();
    }
    assert_eq!(line.next.len(), MOST_NEXT);
    assert_eq!(line.bundle().matches("BEGIN").count(), 31, "what has signed is believed on");
}

#[test]
fn one_with_another_address_comes_in_its_turn_like_any() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let more = Names::of(["kubernetes", "10.96.0.1", "192.0.2.1"]);
    live(&mut line, &names(), start, 0..10);
    let done = live(&mut line, &more, start, 10..420);
    let expected = [(10, Due::Prepare), (210, Due::Prepare), (300, Due::Promote)];
    assert_eq!(done[..3], expected);
    assert!(line.current.names().cover(&more));
}

#[test]
fn who_presents_himself_does_so_for_what_those_who_ask_believe() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let more = Names::of(["kubernetes", "10.96.0.1", "manager.example.com"]);
    let (by, of) = line.presents(&more, start);
    assert_eq!((by.pem(), of), (line.current.pem(), names()), "what it may, at once");
    line = line.step(Due::Prepare, Kind::Mesh, &more, LIFE, start).unwrap();
    assert_eq!(line.presents(&more, start + DAY / 2).1, names());
    let (by, of) = line.presents(&more, start + DAY);
    assert_eq!((by.pem(), of), (line.next[0].pem(), more), "all, once it is known");
    let (by, of) = line.presents(&names(), start + DAY);
    assert_eq!((by.pem(), of), (line.current.pem(), names()));
}

#[test]
fn one_that_is_late_is_promoted_before_the_old_one_ends() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let late = start + LIFE - DAY;
    line = line.step(Due::Prepare, Kind::Mesh, &names(), LIFE, late).unwrap();
    assert_eq!(line.due(&names(), late), Some(Due::Promote));
}

#[test]
fn a_line_is_read_as_it_was_written() {
    let start = SystemTime::now();
    let mut line = begin(start);
    let mut data = Data::new();
    for due in [Due::Prepare, Due::Promote, Due::Prepare, Due::Promote, Due::Prepare] {
        line = line.step(due, Kind::Mesh, &names(), LIFE, start).unwrap();
        line.write(Kind::Mesh, &mut data);
        let read = Line::read(Kind::Mesh, &data).unwrap();
        assert_eq!(read.bundle(), line.bundle());
        assert_eq!(read.current.key(), line.current.key());
    }
    assert_eq!(line.bundle().matches("BEGIN").count(), 4);
    line = line.step(Due::Prepare, Kind::Mesh, &names(), LIFE, start).unwrap();
    line.write(Kind::Mesh, &mut data);
    let read = Line::read(Kind::Mesh, &data).unwrap();
    let keys = |line: &Line| line.next.iter().map(|next| next.key().to_owned()).collect::<Vec<_>>();
    assert_eq!((read.next.len(), keys(&read)), (2, keys(&line)));
    assert_eq!(read.bundle(), line.bundle());
    data.remove("mesh-next.key");
    assert!(Line::read(Kind::Mesh, &data).is_err());
    let error = Line::read(Kind::Manager, &data).unwrap_err();
    assert!(matches!(error, LineError::Missing { key } if key == "manager.key"));
}
