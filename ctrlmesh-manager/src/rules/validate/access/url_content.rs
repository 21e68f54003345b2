//! Parses what a rule of the content type Normal is matched with: `[http://|https://]HOST[:PORT][/PATH]`.

use std::net::{Ipv4Addr, Ipv6Addr};

use ctrlmesh_common::names::{is_dns_subdomain, port};
use ctrlmesh_common::policy::egress::{ANY, Scheme, UrlParts};
use thiserror::Error;

/// Ports on which the proxy itself listens: connections to them do not go through it.
pub(super) const PROXY_PORTS: [u16; 3] = [port::PROXY_REDIRECTED, port::PROXY_FORWARD, port::PROXY_ADMIN];

/// What begins every name below a domain.
const BELOW: &str = "*.";

/// What ends a path that stands for all that begin so.
const AND_BELOW: &str = "/*";

/// Characters that stand in a path as they are, beside letters and digits (RFC 3986). `*` is a wildcard here.
const IN_PATHS: &str = "-._~!$&'()+,;=:@/%";

/// What is no content.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ContentError {
    #[error("the scheme {scheme:?} is not allowed; allowed are http and https")]
    Scheme { scheme: String },
    #[error("a query or a fragment is not allowed; no rule looks at it")]
    Query,
    #[error("a user before the host is not allowed")]
    User,
    #[error(
        "{host:?} is no host; allowed are a DNS name, an IPv4 address, an IPv6 address in brackets, *.example.com and *"
    )]
    Host { host: String },
    #[error("{port:?} is no port; allowed are 1 to 65535")]
    Port { port: String },
    #[error("the port {port} is not allowed; the proxy itself listens there")]
    ProxyPort { port: u16 },
    #[error("a * in a path is allowed only as its end, behind a slash")]
    Wildcard,
    #[error("a path must not have the segments . and ..")]
    Dots,
    #[error("a path has {sign:?} only in its percent-encoded form")]
    Sign { sign: char },
    #[error("a % in a path must be before two hexadecimal digits")]
    Percent,
}

/// Parses `text`. A scheme without a port gives the scheme's own port.
///
/// # Errors
/// The first part that is wrong.
pub fn parse(text: &str) -> Result<UrlParts, ContentError> {
    let (scheme, rest) = match text.split_once("://").filter(|(scheme, _)| !scheme.contains('/')) {
        Some((name, rest)) => (Some(scheme(name)?), rest),
        None => (None, text),
    };
    if rest.contains(['?', '#']) {
        return Err(ContentError::Query);
    }
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if authority.contains('@') {
        return Err(ContentError::User);
    }
    let (host, port) = host_and_port(authority)?;
    let port = port.or_else(|| scheme.map(Scheme::default_port));
    Ok(UrlParts { scheme, host, port, path: parse_path(path)? })
}

fn scheme(name: &str) -> Result<Scheme, ContentError> {
    let known = [Scheme::Http, Scheme::Https].into_iter().find(|scheme| scheme.name() == name);
    known.ok_or_else(|| ContentError::Scheme { scheme: name.to_owned() })
}

fn host_and_port(authority: &str) -> Result<(String, Option<u16>), ContentError> {
    let wrong = || ContentError::Host { host: authority.to_owned() };
    if let Some(rest) = authority.strip_prefix('[') {
        let (address, rest) = rest.split_once(']').ok_or_else(wrong)?;
        let address: Ipv6Addr = address.parse().ok().ok_or_else(wrong)?;
        let port = match rest {
            "" => None,
            rest => Some(parse_port(rest.strip_prefix(':').ok_or_else(wrong)?)?),
        };
        return Ok((address.to_string(), port));
    }
    match authority.split_once(':') {
        // An IPv6 address without brackets.
        Some((_, rest)) if rest.contains(':') => Err(wrong()),
        Some((host, port)) => Ok((parse_host(host)?, Some(parse_port(port)?))),
        None => Ok((parse_host(authority)?, None)),
    }
}

fn parse_host(text: &str) -> Result<String, ContentError> {
    if text == ANY || text.parse::<Ipv4Addr>().is_ok() {
        return Ok(text.to_owned());
    }
    let host = text.to_ascii_lowercase();
    let name = host.strip_prefix(BELOW).unwrap_or(&host);
    // A last label of digits only makes an address, and this one is none.
    let is_number = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    let is_name = is_dns_subdomain(name) && !name.rsplit('.').next().is_some_and(is_number);
    if is_name { Ok(host) } else { Err(ContentError::Host { host: text.to_owned() }) }
}

fn parse_port(text: &str) -> Result<u16, ContentError> {
    let wrong = || ContentError::Port { port: text.to_owned() };
    let port: u16 = text.parse().ok().ok_or_else(wrong)?;
    // Neither a sign nor a zero before the number.
    if port == 0 || port.to_string() != text {
        return Err(wrong());
    }
    if PROXY_PORTS.contains(&port) { Err(ContentError::ProxyPort { port }) } else { Ok(port) }
}

/// `None` for every path.
fn parse_path(path: &str) -> Result<Option<String>, ContentError> {
    if path.is_empty() || path == AND_BELOW {
        return Ok(None);
    }
    let plain = path.strip_suffix(AND_BELOW).unwrap_or(path);
    if plain.contains('*') {
        return Err(ContentError::Wildcard);
    }
    if path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err(ContentError::Dots);
    }
    let is_foreign = |sign: &char| !sign.is_ascii_alphanumeric() && !IN_PATHS.contains(*sign);
    if let Some(sign) = plain.chars().find(is_foreign) {
        return Err(ContentError::Sign { sign });
    }
    let is_encoded = |rest: &str| rest.len() >= 2 && rest.bytes().take(2).all(|byte| byte.is_ascii_hexdigit());
    if plain.split('%').skip(1).all(is_encoded) { Ok(Some(path.to_owned())) } else { Err(ContentError::Percent) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(scheme: Option<Scheme>, host: &str, port: Option<u16>, path: Option<&str>) -> UrlParts {
        UrlParts { scheme, host: host.to_owned(), port, path: path.map(str::to_owned) }
    }

    #[test]
    fn the_parts_of_a_content_are_read() {
        let (http, https) = (Some(Scheme::Http), Some(Scheme::Https));
        for (text, expected) in [
            ("example.com", parts(None, "example.com", None, None)),
            ("localhost", parts(None, "localhost", None, None)),
            ("*", parts(None, "*", None, None)),
            ("*:8080/", parts(None, "*", Some(8080), Some("/"))),
            ("*.Example.com", parts(None, "*.example.com", None, None)),
            ("http://example.com", parts(http, "example.com", Some(80), None)),
            ("https://example.com/*", parts(https, "example.com", Some(443), None)),
            ("https://example.com:80/v1/*", parts(https, "example.com", Some(80), Some("/v1/*"))),
            ("10.0.0.1:65535/a/b", parts(None, "10.0.0.1", Some(65_535), Some("/a/b"))),
            ("[FD00::0:1]", parts(None, "fd00::1", None, None)),
            ("https://[::1]:8443/x", parts(https, "::1", Some(8443), Some("/x"))),
            ("example.com/login/https://a@b", parts(None, "example.com", None, Some("/login/https://a@b"))),
            ("1.example.com/%2a//~a-b_c.d", parts(None, "1.example.com", None, Some("/%2a//~a-b_c.d"))),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_content_is_refused_by_its_part() {
        let host = |host: &str| ContentError::Host { host: host.to_owned() };
        let port = |port: &str| ContentError::Port { port: port.to_owned() };
        for (text, expected) in [
            ("ftp://a", ContentError::Scheme { scheme: "ftp".to_owned() }),
            ("HTTP://a", ContentError::Scheme { scheme: "HTTP".to_owned() }),
            ("a?b", ContentError::Query),
            ("a/b#c", ContentError::Query),
            ("http://me:secret@a", ContentError::User),
            ("", host("")),
            ("http://", host("")),
            ("/v1", host("")),
            ("a b", host("a b")),
            ("a..b", host("a..b")),
            ("a.", host("a.")),
            ("a*", host("a*")),
            ("*.*.a", host("*.*.a")),
            ("*a.b", host("*a.b")),
            ("1.2.3", host("1.2.3")),
            ("1.2.3.256", host("1.2.3.256")),
            ("*.1.2.3.4", host("*.1.2.3.4")),
            ("::1", host("::1")),
            ("[::1", host("[::1")),
            ("[::1]8080", host("[::1]8080")),
            ("[fe80::1%eth0]", host("[fe80::1%eth0]")),
            ("a:", port("")),
            ("a:0", port("0")),
            ("a:080", port("080")),
            ("a:+80", port("+80")),
            ("a:65536", port("65536")),
            ("[::1]:x", port("x")),
            ("a:15001", ContentError::ProxyPort { port: 15_001 }),
            ("a:15002", ContentError::ProxyPort { port: 15_002 }),
            ("http://a:5441/", ContentError::ProxyPort { port: 5441 }),
            ("a/b*", ContentError::Wildcard),
            ("a/*/b", ContentError::Wildcard),
            ("a/b/../c", ContentError::Dots),
            ("a/./*", ContentError::Dots),
            ("a/b c", ContentError::Sign { sign: ' ' }),
            ("a/ä", ContentError::Sign { sign: 'ä' }),
            ("a/%4", ContentError::Percent),
            ("a/%zz/*", ContentError::Percent),
        ] {
            assert_eq!(parse(text), Err(expected), "{text}");
        }
    }
}
