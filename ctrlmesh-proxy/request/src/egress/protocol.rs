//! Tells from the first bytes of a connection what the client speaks.

/// The longest method that is taken for one, in bytes. The longest registered one has 17.
const MAX_METHOD_BYTES: usize = 32;

/// What a client sends first that speaks HTTP/2 without having asked (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How an SSH client begins (RFC 4253, section 4.2). Its line may hold a space, and then looks like a request.
const SSH: &[u8] = b"SSH-";

/// A record of the handshake, of any version since SSL 3.0.
const TLS: &[u8] = &[0x16, 3];

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Tls,
    Http1,
    Http2,
    /// Neither TLS nor HTTP.
    Other,
}

/// What a connection speaks that begins so; `None` where that takes more bytes. At most 34 are needed.
pub fn protocol(first: &[u8]) -> Option<Protocol> {
    for (start, protocol) in [(TLS, Protocol::Tls), (HTTP2_PREFACE, Protocol::Http2), (SSH, Protocol::Other)] {
        if first.starts_with(start) {
            return Some(protocol);
        }
        if start.starts_with(first) {
            return None;
        }
    }
    http1(first)
}

/// A method, a space and how a request target begins (RFC 9112, section 3).
fn http1(first: &[u8]) -> Option<Protocol> {
    let method = first.iter().position(|byte| !is_token(*byte)).unwrap_or(first.len());
    if method > MAX_METHOD_BYTES {
        return Some(Protocol::Other);
    }
    match &first[method..] {
        [b' ', ..] if method == 0 => Some(Protocol::Other),
        [] | [b' '] => None,
        [b' ', target, ..] if begins_target(*target) => Some(Protocol::Http1),
        _ => Some(Protocol::Other),
    }
}

/// A `tchar` of RFC 9110, section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A path, the server itself, a URL or a host.
fn begins_target(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"/*[".contains(&byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_client_speaks_is_told_from_its_first_bytes() {
        let longest = format!("{} /", "M".repeat(MAX_METHOD_BYTES));
        for (first, expected) in [
            (&b"\x16\x03\x01\x02\x00\x01"[..], Protocol::Tls),
            (b"\x16\x02", Protocol::Other),
            (b"\x80\x2e\x01\x03\x01", Protocol::Other),
            (HTTP2_PREFACE, Protocol::Http2),
            (b"PRI * HTTP/1.1\r\n", Protocol::Http1),
            (b"PRI /", Protocol::Http1),
            (b"GET / HTTP/1.1\r\n", Protocol::Http1),
            (b"M-SEARCH * HTTP/1.1\r\n", Protocol::Http1),
            (b"GET http://a/ HTTP/1.1\r\n", Protocol::Http1),
            (b"CONNECT [::1]:443 HTTP/1.1\r\n", Protocol::Http1),
            (b"CONNECT a:443 HTTP/1.1\r\n", Protocol::Http1),
            (longest.as_bytes(), Protocol::Http1),
            (b"GET  / HTTP/1.1\r\n", Protocol::Other),
            (b"GET\t/ HTTP/1.1\r\n", Protocol::Other),
            (b" / HTTP/1.1\r\n", Protocol::Other),
            (b"\r\nGET / HTTP/1.1\r\n", Protocol::Other),
            (b"SSH-2.0-OpenSSH_9.6p1 Debian-3\r\n", Protocol::Other),
            (b"*1\r\n$4\r\nPING\r\n", Protocol::Other),
            (b"\0\0\0\x08\x04\xd2\x16\x2f", Protocol::Other),
            (&[b'M'; 33], Protocol::Other),
        ] {
            assert_eq!(protocol(first), Some(expected), "{}", first.escape_ascii());
        }
    }

    #[test]
    fn more_bytes_are_asked_for_as_long_as_they_could_tell() {
        for first in [&b""[..], b"\x16", b"G", b"GET", b"GET ", b"PRI *", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", b"SSH"] {
            assert_eq!(protocol(first), None, "{}", first.escape_ascii());
        }
        assert_eq!(protocol(&[b'M'; 32]), None);
        assert_eq!(protocol(b"SS /"), Some(Protocol::Http1));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn a_prefix_says_nothing_else_than_the_whole(
            start in prop::sample::select(vec!["", "\u{16}\u{3}", "PRI * HTTP/2.0\r\n\r\nSM\r\n", "GET ", "SSH-", "A"]),
            rest in prop_oneof![prop::collection::vec(any::<u8>(), 0..80), "[A-Z]{0,40} [/a*\\[]".prop_map(Vec::from)],
        ) {
            let whole = [start.as_bytes(), &rest].concat();
            let told = protocol(&whole);
            prop_assert!(told.is_some() || whole.len() < 34);
            for end in 0..whole.len() {
                let prefix = protocol(&whole[..end]);
                prop_assert!(prefix.is_none() || prefix == told);
            }
        }
    }
}
