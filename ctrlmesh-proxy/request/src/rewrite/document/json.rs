//! Finds JSON values.
//!
//! Well-formed text is read exactly. For other text, which the server refuses, only termination is promised.

use std::borrow::Cow;
use std::ops::Range;

use super::Node;

/// The one value of a text.
pub(super) fn root(text: &[u8]) -> Option<Range<usize>> {
    let start = behind_space(text, 0);
    let end = value_end(text, start)?;
    (behind_space(text, end) == text.len()).then_some(start..end)
}

/// The values of the key `name` in the object at `at`; none where it is no object.
pub(super) fn fields(text: &[u8], at: Range<usize>, name: &str) -> Option<Vec<Range<usize>>> {
    let mut found = Vec::new();
    if text.get(at.start) != Some(&b'{') {
        return Some(found);
    }
    let mut next = behind_space(text, at.start + 1);
    while text.get(next) != Some(&b'}') {
        let key = next..value_end(text, next)?;
        let colon = behind_space(text, key.end);
        let start = (text.get(colon) == Some(&b':')).then(|| behind_space(text, colon + 1))?;
        let value = start..value_end(text, start)?;
        if self::text(&text[key])? == name {
            found.push(value.clone());
        }
        next = behind_comma(text, value.end, b'}')?;
    }
    Some(found)
}

/// The value at `path`; of a key that stands twice, the first. Reading ends there, so that a large object costs no more
/// than the bytes before its version.
pub(in crate::rewrite) fn early(text: &[u8], path: &[&str]) -> Option<Range<usize>> {
    let start = path.iter().try_fold(behind_space(text, 0), |at, name| first(text, at, name))?;
    Some(start..value_end(text, start)?)
}

/// Where the value of the key `name` begins in the object that begins at `object`.
fn first(text: &[u8], object: usize, name: &str) -> Option<usize> {
    let mut next = (text.get(object) == Some(&b'{')).then(|| behind_space(text, object + 1))?;
    while text.get(next) != Some(&b'}') {
        let key = next..value_end(text, next)?;
        let colon = behind_space(text, key.end);
        let value = (text.get(colon) == Some(&b':')).then(|| behind_space(text, colon + 1))?;
        if self::text(&text[key])? == name {
            return Some(value);
        }
        next = behind_comma(text, value_end(text, value)?, b'}')?;
    }
    None
}

/// The values of the array at `at`; none where it is no array.
pub(super) fn elements(text: &[u8], at: Range<usize>) -> Option<Vec<Range<usize>>> {
    let mut found = Vec::new();
    if text.get(at.start) != Some(&b'[') {
        return Some(found);
    }
    let mut next = behind_space(text, at.start + 1);
    while text.get(next) != Some(&b']') {
        let end = value_end(text, next)?;
        found.push(next..end);
        next = behind_comma(text, end, b']')?;
    }
    Some(found)
}

/// The text that a string spells.
pub(in crate::rewrite) fn text(string: &[u8]) -> Option<Cow<'_, str>> {
    let inside = string.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if !inside.contains(&b'\\') {
        return Some(String::from_utf8_lossy(inside));
    }
    // A string that is no Unicode text, such as half a surrogate pair, is no name that a policy can hold.
    Some(Cow::Owned(serde_json::from_slice(string).unwrap_or_default()))
}

/// A string that spells `text`.
pub(super) fn quoted(text: &str) -> Vec<u8> {
    serde_json::Value::from(text).to_string().into_bytes()
}

/// What to cut so that the removed elements go, with a comma each.
pub(super) fn removals(items: &[Node], removed: &[bool]) -> Vec<Range<usize>> {
    let mut cuts = Vec::new();
    let mut at = 0;
    while at < items.len() {
        let run = removed[at..].iter().take_while(|removed| **removed).count();
        let end = at + run;
        if run > 0 {
            cuts.push(match (items.get(end), at.checked_sub(1)) {
                (Some(next), _) => items[at].at.start..next.at.start,
                (None, Some(before)) => items[before].at.end..items[end - 1].at.end,
                (None, None) => items[at].at.start..items[end - 1].at.end,
            });
        }
        at = end.max(at + 1);
    }
    cuts
}

/// The text without the white space between its words.
pub(in crate::rewrite) fn compacted(text: &[u8]) -> Vec<u8> {
    let mut compact = Vec::with_capacity(text.len());
    let (mut quoted, mut escaped) = (false, false);
    for byte in text {
        if quoted || !byte.is_ascii_whitespace() {
            compact.push(*byte);
        }
        quoted ^= *byte == b'"' && !escaped;
        escaped = quoted && *byte == b'\\' && !escaped;
    }
    compact
}

fn behind_space(text: &[u8], from: usize) -> usize {
    let rest = text.get(from..).unwrap_or_default();
    from + rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count()
}

/// The start of the next value, or of the closing sign.
fn behind_comma(text: &[u8], from: usize, closing: u8) -> Option<usize> {
    let at = behind_space(text, from);
    match *text.get(at)? {
        b',' => Some(behind_space(text, at + 1)),
        byte if byte == closing => Some(at),
        _ => None,
    }
}

/// The end of the value that begins at `start`.
fn value_end(text: &[u8], start: usize) -> Option<usize> {
    match *text.get(start)? {
        b'"' => string_end(text, start),
        b'{' | b'[' => container_end(text, start),
        b'-' | b'0'..=b'9' | b'a'..=b'z' => {
            let word = |byte: &&u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.');
            Some(start + text[start..].iter().take_while(word).count())
        }
        _ => None,
    }
}

fn string_end(text: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

fn container_end(text: &[u8], start: usize) -> Option<usize> {
    let (mut at, mut depth) = (start, 0_usize);
    loop {
        match *text.get(at)? {
            b'"' => {
                at = string_end(text, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            return Some(at);
        }
    }
}
