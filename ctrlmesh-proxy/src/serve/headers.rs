//! Hop-by-hop headers, and what a client accepts.

use ctrlmesh_request::egress::TOKEN_SUBPROTOCOL;
use http::header;
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Never forwarded, by RFC 9110 (7.6.1), like the headers that `Connection` names. `TE: trailers` may pass.
const HOP_BY_HOP: [HeaderName; 4] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TRANSFER_ENCODING,
];

/// The `Accept` headers in one; empty where there is none, `None` where one cannot be read.
pub(super) fn accept(headers: &HeaderMap) -> Option<String> {
    let accept: Result<Vec<&str>, _> = headers.get_all(header::ACCEPT).iter().map(HeaderValue::to_str).collect();
    Some(accept.ok()?.join(","))
}

/// Removes the hop-by-hop headers.
pub(super) fn strip(headers: &mut HeaderMap) {
    if let Some(named) = headers.get(header::CONNECTION).cloned() {
        // There is hardly ever a second one.
        let more: Vec<_> = headers.get_all(header::CONNECTION).iter().skip(1).cloned().collect();
        strip_named(headers, &named);
        for named in &more {
            strip_named(headers, named);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    headers.remove(header::UPGRADE);
    if headers.get(header::TE).is_some_and(|te| te != "trailers") {
        headers.remove(header::TE);
    }
}

/// Removes the headers that one `Connection` header names.
fn strip_named(headers: &mut HeaderMap, named: &HeaderValue) {
    for name in named.as_bytes().split(|byte| *byte == b',') {
        // `Connection: host` must not take the host away.
        let name = HeaderName::from_bytes(name.trim_ascii());
        if let Some(name) = name.ok().filter(|name| *name != header::HOST) {
            headers.remove(name);
        }
    }
}

/// The protocol that a message asks to upgrade to.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers.get_all(header::CONNECTION).iter().any(|value| {
        value.as_bytes().split(|byte| *byte == b',').any(|name| name.trim_ascii().eq_ignore_ascii_case(b"upgrade"))
    });
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

/// Sets the headers that [`strip`] removed, for an upgrade to `protocol`.
pub(super) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Removes tokens among WebSocket subprotocols where there is an `Authorization`, too.
///
/// The API server would look at the `Authorization` alone, and pass the subprotocols on where it proxies the request:
/// to another API server, which would let the token in past every proxy.
pub(super) fn strip_second_token(headers: &mut HeaderMap) {
    let name = header::SEC_WEBSOCKET_PROTOCOL;
    if !headers.contains_key(header::AUTHORIZATION) || !headers.contains_key(&name) {
        return;
    }
    let all: Vec<&[u8]> = headers.get_all(&name).iter().map(HeaderValue::as_bytes).collect();
    let all = all.join(&b',');
    let is_token = |one: &&[u8]| one.trim_ascii().starts_with(TOKEN_SUBPROTOCOL);
    let kept: Vec<&[u8]> = all.split(|byte| *byte == b',').filter(|one| !is_token(one)).collect();
    match HeaderValue::from_bytes(kept.join(&b',').trim_ascii()) {
        Ok(kept) if !kept.is_empty() => drop(headers.insert(name, kept)),
        _ => drop(headers.remove(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(headers: &[(&'static str, &'static str)]) -> HeaderMap {
        headers.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn only_hop_by_hop_headers_are_removed() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-Hop, host"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip"),
            ("upgrade", "h2c"),
            ("transfer-encoding", "chunked"),
            ("host", "kubernetes"),
            ("trailer", "x-sum"),
            ("authorization", "Bearer x"),
        ]);
        strip(&mut headers);
        assert_eq!(headers, map(&[("host", "kubernetes"), ("trailer", "x-sum"), ("authorization", "Bearer x")]));
    }

    #[test]
    fn every_connection_header_counts() {
        let mut headers = map(&[("x-a", "1"), ("x-b", "2"), ("x-c", "3")]);
        for named in ["x-a", "close", "x-b, keep-alive"] {
            headers.append(header::CONNECTION, HeaderValue::from_static(named));
        }
        strip(&mut headers);
        assert_eq!(headers, map(&[("x-c", "3")]));
    }

    #[test]
    fn a_second_token_is_removed() {
        let token = "base64url.bearer.authorization.k8s.io.dG9rZW4";
        let stripped = |authorization: Option<&'static str>, protocols: &[&str]| {
            let mut headers = HeaderMap::new();
            headers.extend(authorization.map(|it| (header::AUTHORIZATION, HeaderValue::from_static(it))));
            for protocol in protocols {
                headers.append(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_str(protocol).unwrap());
            }
            strip_second_token(&mut headers);
            let left = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
            left.map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let both = format!("{token}, v5.channel.k8s.io");
        assert_eq!(stripped(Some("Bearer x"), &[&both]), ["v5.channel.k8s.io"]);
        assert_eq!(stripped(Some("Bearer x"), &["a,b", token]), ["a,b"]);
        assert!(stripped(Some("Bearer x"), &[token]).is_empty());
        // It is the only one.
        assert_eq!(stripped(None, &[&both]), [both]);
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        assert_eq!(upgrade(&map(&[("upgrade", "websocket")])), None);
        assert_eq!(upgrade(&map(&[("connection", "upgrade")])), None);
        let both = map(&[("connection", "keep-alive, Upgrade"), ("upgrade", "SPDY/3.1")]);
        assert_eq!(upgrade(&both).unwrap(), "SPDY/3.1");
    }
}
