use proptest::prelude::*;

use super::*;

/// What OpenSSL 3 sends to `api.example.com`.
const RECORDED: &[u8] = include_bytes!("../../../tests/recorded/client-hello.tls");

/// A reserved kind of extension, which clients send so that servers ignore what they do not know (RFC 8701).
const GREASE: u16 = 0x3a3a;

const ALPN: u16 = 16;
const ECH: u16 = 0xfe0d;

/// `content` behind its length, which takes `size` bytes.
fn list(size: usize, content: &[u8]) -> Vec<u8> {
    [&content.len().to_be_bytes()[size_of::<usize>() - size..], content].concat()
}

fn extension(kind: u16, data: &[u8]) -> Vec<u8> {
    [kind.to_be_bytes().to_vec(), list(2, data)].concat()
}

fn named(name: &str) -> Vec<u8> {
    extension(SERVER_NAME, &list(2, &[vec![HOST_NAME], list(2, name.as_bytes())].concat()))
}

/// All of a hello before its extensions.
fn start() -> Vec<u8> {
    let session = list(1, &[7; 32]);
    let suites = list(2, &[GREASE.to_be_bytes(), [0x13, 1]].concat());
    [vec![3, 3], vec![5; 32], session, suites, list(1, &[0])].concat()
}

fn message(body: &[u8]) -> Vec<u8> {
    [vec![CLIENT_HELLO], list(3, body)].concat()
}

fn hello(extensions: &[Vec<u8>]) -> Vec<u8> {
    message(&[start(), list(2, &extensions.concat())].concat())
}

/// Records of so many bytes each.
fn records(message: &[u8], bytes: usize) -> Vec<u8> {
    message.chunks(bytes).flat_map(|fragment| [vec![22, 3, 1], list(2, fragment)].concat()).collect()
}

fn read(message: &[u8]) -> Hello {
    read_hello(&records(message, MAX_RECORD_BYTES))
}

const MAX_RECORD_BYTES: usize = 16 << 10;

fn name(server_name: Option<&str>) -> Hello {
    Hello::Read { server_name: server_name.map(str::to_owned) }
}

#[test]
fn the_name_is_read_in_any_place_among_the_extensions() {
    let (alpn, grease) = (extension(ALPN, &list(2, &list(1, b"h2"))), extension(GREASE, b""));
    for extensions in [
        vec![named("a.example.com")],
        vec![grease.clone(), alpn.clone(), named("A.Example.COM.")],
        vec![named("a.example.com"), alpn, grease, extension(ECH, &[0; 200])],
    ] {
        assert_eq!(read(&hello(&extensions)), name(Some("a.example.com")));
    }
}

#[test]
fn a_recorded_hello_is_read() {
    assert_eq!(read_hello(RECORDED), name(Some("api.example.com")));
    let more = [RECORDED, b"\x17\x03\x03\x00\x05early"].concat();
    assert_eq!(read_hello(&more), name(Some("api.example.com")));
}

#[test]
fn a_hello_without_a_name_that_dns_knows_names_no_server() {
    assert_eq!(read(&message(&start())), name(None));
    assert_eq!(read(&hello(&[])), name(None));
    let (label, long) = ("a".repeat(64), ["a".repeat(63).as_str(); 4].join("."));
    for wrong in ["", ".", "a..b", ".a", "a b", "a/b", "\u{e9}.com", "a\0.com", "10.0.0.1", "::1", &label, &long] {
        assert_eq!(read(&hello(&[named(wrong)])), name(None), "{wrong}");
    }
    for good in ["a", "a_b-c.0", "1.2.3", &long[..253], "xn--caf-dma.com"] {
        assert_eq!(read(&hello(&[named(good)])), name(Some(good)));
    }
}

#[test]
fn names_of_other_kinds_are_passed_over() {
    let (other, host) = ([vec![9], list(2, b"x")].concat(), [vec![HOST_NAME], list(2, b"a")].concat());
    let names = |names: &[Vec<u8>]| read(&hello(&[extension(SERVER_NAME, &list(2, &names.concat()))]));
    assert_eq!(names(&[other.clone(), host.clone()]), name(Some("a")));
    assert_eq!(names(std::slice::from_ref(&other)), name(None));
    assert_eq!(names(&[host.clone(), other, host]), Hello::NotTls);
    assert_eq!(names(&[]), Hello::NotTls);
}

#[test]
fn a_hello_that_no_server_takes_is_none() {
    let with = |at: usize, byte: u8| {
        let mut body = start();
        body[at] = byte;
        message(&body)
    };
    let behind = |more: &[u8]| message(&[start(), more.to_vec()].concat());
    for (what, message) in [
        ("kind", [vec![2], list(3, &start())].concat()),
        ("version", with(0, 2)),
        ("session", with(34, 33)),
        ("suites", with(68, 3)),
        ("twice", hello(&[extension(GREASE, b""), named("a"), extension(GREASE, b"")])),
        ("names", hello(&[named("a"), named("a")])),
        ("nothing", message(&[])),
        ("extensions", behind(&[0, 9, 0])),
        ("more", behind(&[0, 0, 1])),
        ("no name", hello(&[extension(SERVER_NAME, b"")])),
        ("behind the name", hello(&[extension(SERVER_NAME, &[0, 4, 0, 0, 1, b'a', 0])])),
        ("long", message(&[0_u8].repeat(MAX_HELLO_BYTES + 1))),
    ] {
        assert_eq!(read(&message), Hello::NotTls, "{what}");
    }
}

#[test]
fn what_is_no_record_of_a_handshake_is_told_at_once() {
    for first in [
        &b"\x17"[..],
        b"\x16\x02",
        b"\x16\x03\x05",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x41\x01",
        b"\x16\x03\x01\x00\x09\x02",
        b"\x16\x03\x01\x00\x09\x01\x01\x00\x01",
        b"\x16\x03\x01\x00\x01\x01\x14\x03",
    ] {
        assert_eq!(read_hello(first), Hello::NotTls, "{}", first.escape_ascii());
    }
    for first in [&b""[..], b"\x16", b"\x16\x03\x04\x41\x00", b"\x16\x03\x00\x00\x09\x01\x01\x00\x00"] {
        assert_eq!(read_hello(first), Hello::Incomplete, "{}", first.escape_ascii());
    }
}

#[test]
fn the_longest_hello_is_read_from_the_smallest_records() {
    let padding = MAX_HELLO_BYTES - start().len() - 2 - named("a").len() - 4;
    let longest = hello(&[extension(21, &vec![0; padding]), named("a")]);
    assert_eq!(longest.len(), HEADER_BYTES + MAX_HELLO_BYTES);
    for bytes in [1, MAX_RECORD_BYTES] {
        let records = records(&longest, bytes);
        assert_eq!(read_hello(&records[..records.len() - 1]), Hello::Incomplete);
        assert_eq!(read_hello(&records), name(Some("a")));
    }
}

proptest! {
    #[test]
    fn a_hello_is_incomplete_until_it_is_whole(
        bytes in 1_usize..120,
        host in "[a-z]{1,9}(\\.[a-z]{1,9}){0,3}",
        kinds in prop::collection::btree_set(1_u16.., 0..4),
    ) {
        let others = kinds.iter().map(|kind| extension(*kind, b"data"));
        let message = hello(&others.chain([named(&host)]).collect::<Vec<_>>());
        let records = records(&message, bytes);
        for end in 0..records.len() {
            prop_assert_eq!(read_hello(&records[..end]), Hello::Incomplete);
        }
        prop_assert_eq!(read_hello(&records), name(Some(&host)));
    }

    #[test]
    fn any_bytes_say_the_same_once_they_say_something(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        size in 1_usize..40,
        cut in 0_usize..110,
    ) {
        let body = [&start()[..cut.min(start().len())], &bytes].concat();
        for bytes in [bytes, records(&message(&body), size)] {
            let whole = read_hello(&bytes);
            for end in 0..bytes.len() {
                let prefix = read_hello(&bytes[..end]);
                prop_assert!(prefix == Hello::Incomplete || prefix == whole);
            }
        }
    }
}
