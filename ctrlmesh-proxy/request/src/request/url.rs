//! Splits a request target into path and query, and decodes percent escapes.
//!
//! As Go's `net/url.ParseRequestURI` reads it, because that is what the API server calls.

use std::borrow::Cow;
use std::net::Ipv6Addr;

/// A target that the server answers with 400.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    #[error("the method is not a token")]
    Method,
    #[error("the target is empty")]
    Empty,
    #[error("the target holds a control character or a space")]
    Control,
    #[error("the target is neither a path nor an absolute URI")]
    NotAPath,
    #[error("the target holds a malformed percent escape")]
    Escape,
    #[error("the authority of the target is malformed")]
    Authority,
    /// The path ends with the verb `watch` or `proxy`.
    #[error("the path ends behind its verb")]
    NothingBehindVerb,
    /// By the templates of paths that lead to member clusters.
    #[error("the path leads to a member cluster or to none, as one reads it: use no empty, dotted or escaped segments")]
    AmbiguousMember,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target<'a> {
    /// Empty where the URI is opaque.
    pub(super) raw_path: &'a [u8],
    pub(super) raw_query: &'a [u8],
    /// Whether the target is the path itself, as it is in every request that is not for a forward proxy.
    pub(super) origin_form: bool,
}

pub(super) fn split<'a>(method: &[u8], target: &'a [u8]) -> Result<Target<'a>, TargetError> {
    if !is_token(method) {
        return Err(TargetError::Method);
    }
    if target.iter().any(|byte| *byte <= b' ' || *byte == 0x7f) {
        return Err(TargetError::Control);
    }
    if target.is_empty() && method != b"CONNECT" {
        return Err(TargetError::Empty);
    }
    let authority_only = method == b"CONNECT" && !target.starts_with(b"/");
    if target == b"*" && !authority_only {
        return Ok(Target { raw_path: target, raw_query: b"", origin_form: false });
    }
    let (scheme, rest): (&[u8], &[u8]) = if authority_only { (b"http", target) } else { scheme(target)? };
    let (rest, raw_query) = cut(rest, b'?');
    if authority_only {
        return Ok(Target { raw_path: authority(b"http", rest)?, raw_query, origin_form: false });
    }
    if !rest.starts_with(b"/") {
        let opaque = Target { raw_path: b"", raw_query, origin_form: false };
        return if scheme.is_empty() { Err(TargetError::NotAPath) } else { Ok(opaque) };
    }
    let raw_path = match rest.strip_prefix(b"//") {
        Some(rest) if !scheme.is_empty() => authority(scheme, rest)?,
        _ => rest,
    };
    Ok(Target { raw_path, raw_query, origin_form: scheme.is_empty() })
}

/// Decodes percent escapes, and `plus` where that is to stand for another byte.
pub(super) fn unescape(text: &[u8], plus: u8) -> Result<Cow<'_, [u8]>, TargetError> {
    if !text.iter().any(|byte| *byte == b'%' || (*byte == b'+' && plus != b'+')) {
        return Ok(Cow::Borrowed(text));
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        decoded.push(match first {
            b'%' => {
                let (byte, behind) = hex(rest).ok_or(TargetError::Escape)?;
                rest = behind;
                byte
            }
            b'+' => plus,
            other => *other,
        });
    }
    Ok(Cow::Owned(decoded))
}

/// Text as Go's JSON encoder prints it: each byte that is no UTF-8 becomes U+FFFD.
pub(super) fn text(bytes: Cow<'_, [u8]>) -> Cow<'_, str> {
    match bytes {
        Cow::Borrowed(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => Cow::Borrowed(text),
            Err(_) => Cow::Owned(replaced(bytes)),
        },
        Cow::Owned(bytes) => Cow::Owned(String::from_utf8(bytes).unwrap_or_else(|error| replaced(error.as_bytes()))),
    }
}

/// Splits at the first `separator`; the second half is empty where there is none.
pub(super) fn cut(text: &[u8], separator: u8) -> (&[u8], &[u8]) {
    match text.iter().position(|byte| *byte == separator) {
        Some(at) => (&text[..at], &text[at + 1..]),
        None => (text, b""),
    }
}

fn replaced(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    text
}

fn hex(text: &[u8]) -> Option<(u8, &[u8])> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (high, low) = (digit(text.first()?)?, digit(text.get(1)?)?);
    Some((high << 4 | low, &text[2..]))
}

fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// The scheme (empty where there is none) and what is behind it.
fn scheme(target: &[u8]) -> Result<(&[u8], &[u8]), TargetError> {
    for (at, byte) in target.iter().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => {}
            b'0'..=b'9' | b'+' | b'-' | b'.' if at > 0 => {}
            b':' if at == 0 => return Err(TargetError::NotAPath),
            b':' => return Ok((&target[..at], &target[at + 1..])),
            _ => break,
        }
    }
    Ok((b"", target))
}

/// Checks the authority and gives what is behind it.
fn authority<'a>(scheme: &[u8], rest: &'a [u8]) -> Result<&'a [u8], TargetError> {
    let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host = match authority.iter().rposition(|byte| *byte == b'@') {
        None => authority,
        Some(at) => {
            check_user(&authority[..at])?;
            &authority[at + 1..]
        }
    };
    check_host(scheme, host)?;
    Ok(path)
}

fn check_user(user: &[u8]) -> Result<(), TargetError> {
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._:~!$&'()*+,;=%@".contains(byte);
    if !user.iter().all(allowed) {
        return Err(TargetError::Authority);
    }
    let (name, password) = cut(user, b':');
    unescape(name, b'+')?;
    unescape(password, b'+')?;
    Ok(())
}

fn check_host(scheme: &[u8], host: &[u8]) -> Result<(), TargetError> {
    match host.iter().rposition(|byte| *byte == b'[') {
        Some(0) => return check_bracketed(&host[1..]),
        Some(_) => return Err(TargetError::Authority),
        None => {}
    }
    let strict = scheme.eq_ignore_ascii_case(b"http") || scheme.eq_ignore_ascii_case(b"https");
    let mut colons = host.iter();
    let colon = if strict { colons.position(|byte| *byte == b':') } else { colons.rposition(|byte| *byte == b':') };
    if colon.is_some_and(|at| !is_port(&host[at..])) {
        return Err(TargetError::Authority);
    }
    check_host_bytes(host)
}

/// An IPv6 address, an optional zone behind `%25`, the bracket and an optional port.
fn check_bracketed(host: &[u8]) -> Result<(), TargetError> {
    let end = host.iter().rposition(|byte| *byte == b']').ok_or(TargetError::Authority)?;
    let (inside, port) = (&host[..end], &host[end + 1..]);
    if !is_port(port) {
        return Err(TargetError::Authority);
    }
    let zone = inside.windows(3).position(|three| three == b"%25");
    let (address, zone) = inside.split_at(zone.unwrap_or(inside.len()));
    check_host_bytes(address)?;
    let address = text(unescape(address, b'+')?);
    if address.parse::<Ipv6Addr>().is_err() || zone == b"%25" {
        return Err(TargetError::Authority);
    }
    check_zone(zone)
}

fn check_zone(zone: &[u8]) -> Result<(), TargetError> {
    let mut rest = zone;
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        let ok = if *first == b'%' {
            let (byte, behind) = hex(rest).ok_or(TargetError::Escape)?;
            rest = behind;
            matches!(byte, b'%' | b' ') || is_host_byte(byte)
        } else {
            *first >= 0x80 || is_host_byte(*first)
        };
        if !ok {
            return Err(TargetError::Authority);
        }
    }
    Ok(())
}

/// In a host, escapes may only spell bytes that are not ASCII, or the percent sign of a zone.
fn check_host_bytes(host: &[u8]) -> Result<(), TargetError> {
    let mut rest = host;
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        let ok = if *first == b'%' {
            let (byte, behind) = hex(rest).ok_or(TargetError::Escape)?;
            rest = behind;
            byte >= 0x80 || byte == b'%'
        } else {
            *first >= 0x80 || is_host_byte(*first)
        };
        if !ok {
            return Err(TargetError::Authority);
        }
    }
    Ok(())
}

fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!\"$&'()*+,-.:;<=>[]_~".contains(&byte)
}

fn is_port(text: &[u8]) -> bool {
    match text.split_first() {
        None => true,
        Some((colon, digits)) => *colon == b':' && digits.iter().all(u8::is_ascii_digit),
    }
}
