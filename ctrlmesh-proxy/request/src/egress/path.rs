//! Brings the path of a URL into one form, so that two ways to write a path compare as the same.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The target of a request for the server itself (RFC 9112, section 3.2.4).
pub(super) const SERVER: &str = "*";

/// The path without dot segments and doubled slashes, and without escapes of what needs none (RFC 3986, section 6.2.2).
/// What is not ASCII is escaped. An escaped slash stays, and stands in its segment. A query or fragment is cut off.
pub(crate) fn normalised(path: &str) -> Cow<'_, str> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    if path == SERVER || is_normal(path) {
        return Cow::Borrowed(path);
    }
    let path = with_least_escapes(path);
    let mut segments = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            other => segments.push(other),
        }
    }
    let is_folder = matches!(path.rsplit('/').next(), Some("" | "." | ".."));
    let mut normal = String::with_capacity(path.len() + 1);
    for segment in &segments {
        normal.push('/');
        normal.push_str(segment);
    }
    if is_folder || segments.is_empty() {
        normal.push('/');
    }
    Cow::Owned(normal)
}

/// Whether nothing is to be done. Also says no of some paths that are normal.
fn is_normal(path: &str) -> bool {
    path.starts_with('/') && path.is_ascii() && !path.contains('%') && !path.contains("//") && !path.contains("/.")
}

fn with_least_escapes(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        let escaped = if *first == b'%' { hex(behind) } else { None };
        if escaped.is_some() {
            rest = &behind[2..];
        }
        match escaped.unwrap_or(*first) {
            byte if escaped.is_some() && !is_unreserved(byte) || !byte.is_ascii() => escape(&mut text, byte),
            byte => text.push(char::from(byte)),
        }
    }
    text
}

fn escape(text: &mut String, byte: u8) {
    // Writing to a string does not fail.
    write!(text, "%{byte:02X}").unwrap_or_default();
}

fn hex(text: &[u8]) -> Option<u8> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(text.first()?)? << 4 | digit(text.get(1)?)?)
}

/// RFC 3986, section 2.3.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ways_to_write_a_path_become_one() {
        for (path, expected) in [
            ("/", "/"),
            ("", "/"),
            ("*", "*"),
            ("/v1/x", "/v1/x"),
            ("/v1/x/", "/v1/x/"),
            ("v1", "/v1"),
            ("/.well-known/a.b", "/.well-known/a.b"),
            ("/public/../private", "/private"),
            ("/public/%2e%2E/private", "/private"),
            ("/public/.%2e/./private", "/private"),
            ("/public//..//private", "/private"),
            ("/../../a", "/a"),
            ("/a/..", "/"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("//a///b", "/a/b"),
            ("/a/...", "/a/..."),
            ("/%61%7e%2D", "/a~-"),
            ("/a%2fb", "/a%2Fb"),
            ("/a/..%2fb", "/a/..%2Fb"),
            ("/a%252e%252e/b", "/a%252e%252e/b"),
            ("/a%2", "/a%2"),
            ("/a%zz%", "/a%zz%"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/a?b=/../c", "/a"),
            ("/a#/../b", "/a"),
        ] {
            assert_eq!(normalised(path), expected, "{path}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn a_normal_path_stays_as_it_is(path in "(/|\\.|%2[eEfF5]|%[0-9a-f]?|[a-c*]|\u{e9}|\\?){0,24}") {
            let once = normalised(&path).into_owned();
            prop_assert_eq!(normalised(&once), once.as_str());
            let is_dot = |segment: &str| matches!(segment, "." | "..");
            prop_assert!(once == SERVER || once.starts_with('/') && !once.contains("//"));
            prop_assert!(!once.split('/').any(is_dot));
        }
    }
}
