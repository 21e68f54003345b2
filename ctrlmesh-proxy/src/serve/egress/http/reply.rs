//! Whom a request is for, and what the proxy answers where it does not pass.

use bytes::Bytes;
use ctrlmesh_request::guard::Refused;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;

use crate::egress::RefusingRule;
use crate::fault::AbortingFault;

/// What the proxy answers itself.
pub(super) type Answer = Box<Response<Full<Bytes>>>;

/// Says which rule has refused a request.
const RULE_HEADER: &str = "x-ctrlmesh-rule";

/// Says which fault has answered a request.
const FAULT_HEADER: &str = "x-ctrlmesh-fault";

/// The host that a request names, without its port; `None` where it names none, as HTTP/1.0 may.
///
/// # Errors
/// The answer, if it names more than one, or what it names is no host: it could be read in two ways.
pub(super) fn host<B>(request: &Request<B>) -> Result<Option<String>, Answer> {
    let ambiguous =
        || ours(StatusCode::BAD_REQUEST, "ctrlmesh-proxy: the request names several hosts, or none that is one\n");
    let mut named = request.headers().get_all(header::HOST).iter();
    let (first, second) = (named.next(), named.next());
    let authority = match (request.uri().authority(), first, second) {
        (_, _, Some(_)) => return Err(ambiguous()),
        // Servers differ in which of the two they take.
        (Some(authority), Some(host), None) if !host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes()) => {
            return Err(ambiguous());
        }
        (Some(authority), _, None) => authority.clone(),
        (None, Some(host), None) if !host.is_empty() => {
            Authority::try_from(host.as_bytes()).map_err(|_invalid| ambiguous())?
        }
        (None, _, None) => return Ok(None),
    };
    if authority.as_str().contains('@') {
        return Err(ambiguous());
    }
    Ok(Some(authority.host().trim_matches(['[', ']']).to_owned()))
}

/// For a request behind a `CONNECT` to another host: the rules would see one, and the server the other.
pub(super) fn other_host() -> Answer {
    ours(StatusCode::BAD_REQUEST, "ctrlmesh-proxy: Host is another one than that of CONNECT\n")
}

/// Has a server go on with HTTP/1.1: after `Upgrade: h2c` nobody would see the requests that follow. A server may
/// always do so (RFC 9110, 7.8).
pub(super) fn decline_h2c(headers: &mut HeaderMap) {
    let is_h2c = |value: &HeaderValue| value.to_str().is_ok_and(|value| value.to_ascii_lowercase().contains("h2c"));
    if headers.get_all(header::UPGRADE).iter().any(is_h2c) {
        headers.remove(header::UPGRADE);
        headers.remove("http2-settings");
        headers.remove(header::CONNECTION);
    }
}

/// Removes what is meant for the next hop alone (RFC 9110, section 7.6.1), but for an upgrade.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let upgrades = headers.contains_key(header::UPGRADE);
    let connection: Vec<HeaderValue> = headers.get_all(header::CONNECTION).iter().cloned().collect();
    let named = connection.iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let named: Vec<HeaderName> = named.filter_map(|name| name.trim().parse().ok()).collect();
    for name in named.iter().filter(|name| **name != header::UPGRADE) {
        headers.remove(name);
    }
    for name in ["connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"] {
        headers.remove(name);
    }
    // Trailers pass; other transfer codings are between two hops.
    if headers.get(header::TE).is_some_and(|te| te != "trailers") {
        headers.remove(header::TE);
    }
    if upgrades {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
}

/// For a request that a rule does not let pass.
pub(super) fn refused(rule: &RefusingRule, host: &str, port: u16) -> Answer {
    let name = rule.name();
    let text = format!("ctrlmesh-proxy: rule {name} does not let this pod talk to {host}:{port} so\n");
    let mut response = ours(StatusCode::FORBIDDEN, text);
    if let Ok(name) = HeaderValue::try_from(name) {
        response.headers_mut().insert(RULE_HEADER, name);
    }
    response
}

/// For a request beyond a limit.
pub(super) fn limited(refused: &Refused) -> Answer {
    let mut response = ours(StatusCode::TOO_MANY_REQUESTS, format!("ctrlmesh-proxy: {refused}\n"));
    let headers = response.headers_mut();
    if let Some(seconds) = refused.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Ok(name) = HeaderValue::try_from(format!("{}/{}", refused.breaker, refused.rule)) {
        headers.insert(RULE_HEADER, name);
    }
    response
}

/// For a request that a fault ends.
pub(super) fn aborted(aborting: &AbortingFault) -> Answer {
    let AbortingFault { name, status } = aborting;
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = ours(code, format!("{}\n", status.message));
    if has_no_content(code) {
        *response.body_mut() = Full::default();
        response.headers_mut().remove(header::CONTENT_TYPE);
    }
    if let Ok(name) = HeaderValue::from_str(name) {
        response.headers_mut().insert(FAULT_HEADER, name);
    }
    response
}

/// Whether a client would read the body as the next answer.
fn has_no_content(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED)
}

pub(super) fn ours(status: StatusCode, text: impl Into<Bytes>) -> Answer {
    let mut response = Box::new(Response::new(Full::new(text.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

#[cfg(test)]
mod tests {
    use ctrlmesh_request::rewrite::status::Status;
    use hyper::body::Body as _;

    use super::*;

    fn of(uri: &str, hosts: &[&str]) -> Result<Option<String>, StatusCode> {
        let mut request = Request::builder().uri(uri);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        host(&request.body(()).unwrap()).map_err(|answer| answer.status())
    }

    #[test]
    fn an_upgrade_to_http2_is_declined_and_others_go_on() {
        for (upgrade, is_kept) in [("h2c", false), ("H2C", false), ("websocket", true)] {
            let mut headers = HeaderMap::new();
            headers.insert(header::UPGRADE, HeaderValue::from_static(upgrade));
            headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade, HTTP2-Settings"));
            decline_h2c(&mut headers);
            assert_eq!(headers.len(), if is_kept { 2 } else { 0 }, "{upgrade}");
        }
    }

    #[test]
    fn what_is_meant_for_the_proxy_does_not_go_on() {
        for (sent, kept) in [
            (
                &[("connection", "close, X-Mine"), ("x-mine", "1"), ("proxy-authorization", "Basic YTpi"), ("a", "b")]
                    [..],
                &[("a", "b")][..],
            ),
            (&[("proxy-connection", "keep-alive"), ("keep-alive", "5")], &[]),
            (
                &[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")],
                &[("connection", "upgrade"), ("upgrade", "websocket")],
            ),
        ] {
            let map = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
                let pairs = pairs.iter();
                pairs.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
            };
            let mut headers = map(sent);
            remove_hop_by_hop(&mut headers);
            assert_eq!(headers, map(kept));
        }
    }

    #[test]
    fn a_fault_answers_with_its_name_and_a_body_where_one_may_be() {
        for (code, has_body) in [(503, true), (200, true), (204, false), (304, false)] {
            let message = "ctrlmesh: fault \"down\" of FaultInjection ops/storm".to_owned();
            let status = Box::new(Status { code, reason: "", message, retry_after: None });
            let answer = aborted(&AbortingFault { name: "ops/storm/down".to_owned(), status });
            assert_eq!(answer.status().as_u16(), code);
            assert_eq!(answer.headers()[FAULT_HEADER], "ops/storm/down");
            assert_eq!(!answer.body().is_end_stream(), has_body, "{code}");
            assert_eq!(answer.headers().contains_key(header::CONTENT_TYPE), has_body, "{code}");
        }
    }

    #[test]
    fn a_request_names_one_host_or_none() {
        let some = |host: &str| Ok(Some(host.to_owned()));
        assert_eq!(of("/a", &["example.com"]), some("example.com"));
        assert_eq!(of("/a", &["example.com:8080"]), some("example.com"));
        assert_eq!(of("/a", &["[fd00::1]:8080"]), some("fd00::1"));
        assert_eq!(of("http://example.com/a", &["Example.com"]), some("example.com"));
        assert_eq!(of("http://example.com/a", &[]), some("example.com"));
        assert_eq!(of("http://example.com/a", &["other.example.com"]), Err(StatusCode::BAD_REQUEST));
        assert_eq!(of("/a", &[]), Ok(None));
        assert_eq!(of("/a", &[""]), Ok(None));
        for hosts in [&["a.example.com", "b.example.com"][..], &["a b"], &["user@example.com"]] {
            assert_eq!(of("/a", hosts), Err(StatusCode::BAD_REQUEST), "{hosts:?}");
        }
    }
}
