//! Reads for whom a request is that a client has sent to the forward proxy.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ctrlmesh_common::names::port;
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_intercept::Target;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Method, Request, Uri};
use thiserror::Error;

/// The header in which clients of the predecessor name the URL.
pub(super) const REAL_ENDPOINT: &str = "mesh-real-endpoint";

/// Where clouds tell a machine who it is, beside link-local addresses: Google Cloud, Alibaba Cloud, Azure and Oracle.
const METADATA: [IpAddr; 4] = [
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
];

/// The same of AWS, of which some are for its pods: all that begin so.
const METADATA_OF_AWS: [u16; 2] = [0xfd00, 0xec2];

/// For whom a request is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) scheme: Scheme,
    /// A DNS name or an address, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// Host and port, as the client has written them.
    pub(super) authority: HeaderValue,
    pub(super) path: PathAndQuery,
}

#[derive(Debug, PartialEq, Eq, Error)]
pub(super) enum UrlError {
    #[error("CONNECT needs HOST:PORT")]
    Connect,
    #[error("this is a forward proxy: send a URL with the request, in absolute form or in header Mesh-Real-Endpoint")]
    None,
    #[error("header Mesh-Real-Endpoint must be one URL, in a request for the proxy itself")]
    Header,
    #[error("scheme {0:?} is not allowed; http and https are")]
    Scheme(String),
    #[error("the URL must have a host, a port that is not 0 where it has one, and no user")]
    Authority,
}

impl Url {
    /// # Errors
    /// If it is for nobody, or cannot be read.
    pub(super) fn of<B>(request: &Request<B>) -> Result<Self, UrlError> {
        if request.method() == Method::CONNECT {
            let authority = request.uri().authority().filter(|authority| authority.port().is_some());
            return Self::at(Scheme::Https, authority.ok_or(UrlError::Connect)?, &Uri::default());
        }
        let mut named = request.headers().get_all(REAL_ENDPOINT).iter();
        let uri = match (named.next(), named.next()) {
            (None, _) => request.uri().clone(),
            // A client passes others' headers on, perhaps.
            (Some(url), None) if is_for_proxy(request.uri()) => {
                Uri::try_from(url.as_bytes()).map_err(|_invalid| UrlError::Header)?
            }
            (Some(_), _) => return Err(UrlError::Header),
        };
        let is_named = request.headers().contains_key(REAL_ENDPOINT);
        let missing = || if is_named { UrlError::Header } else { UrlError::None };
        let scheme = match uri.scheme_str().ok_or_else(missing)? {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            other => return Err(UrlError::Scheme(other.to_owned())),
        };
        Self::at(scheme, uri.authority().ok_or(UrlError::Authority)?, &uri)
    }

    fn at(scheme: Scheme, authority: &Authority, uri: &Uri) -> Result<Self, UrlError> {
        let host = authority.host().trim_matches(['[', ']']);
        let port = match authority.port() {
            None if authority.as_str() == authority.host() => Some(scheme.default_port()),
            None => None,
            Some(port) => port.as_str().parse().ok(),
        };
        let port = port.filter(|port| *port != 0).ok_or(UrlError::Authority)?;
        if host.is_empty() || authority.as_str().contains('@') {
            return Err(UrlError::Authority);
        }
        let (host, path) = (host.to_owned(), uri.path_and_query().cloned());
        let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
        let authority = HeaderValue::try_from(authority.as_str()).map_err(|_invalid| UrlError::Authority)?;
        Ok(Self { scheme, host, port, authority, path })
    }
}

/// Whether clouds tell a machine who it is there, and whom else it may become.
pub(super) fn is_metadata(address: IpAddr) -> bool {
    let is_there = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.segments()[..2] == METADATA_OF_AWS,
    };
    is_there || METADATA.contains(&address) || embedded(address).is_some_and(|address| is_metadata(address.into()))
}

/// The IPv4 address to which a translator or a tunnel would bring it: NAT64 (RFC 6052), 6to4 (RFC 3056), and the
/// deprecated IPv4-compatible form.
fn embedded(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(address) = address else { return None };
    let of = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0, 0, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            Some(of(high, low))
        }
        _ => None,
    }
}

/// Whether a request is not for another server by its URI.
fn is_for_proxy(uri: &Uri) -> bool {
    let is_loopback = |host: &str| {
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
        host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
    };
    uri.authority()
        .is_none_or(|authority| authority.port_u16() == Some(port::PROXY_FORWARD) && is_loopback(authority.host()))
}

/// Whether the proxy listens there: it would talk to itself.
pub(super) fn is_own(address: SocketAddr) -> bool {
    let is_loopback = address.ip().is_loopback() || address.ip().is_unspecified();
    is_loopback && address.port() == port::PROXY_FORWARD || Target::exact(address).is_reserved()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(method: &str, uri: &str, endpoints: &[&str]) -> Result<Url, UrlError> {
        let mut request = Request::builder().method(method).uri(uri).header("host", "127.0.0.1:15002");
        for endpoint in endpoints {
            request = request.header("Mesh-Real-Endpoint", *endpoint);
        }
        Url::of(&request.body(()).unwrap())
    }

    #[test]
    fn a_url_is_read_from_the_request_or_from_its_header() {
        for (uri, endpoints, scheme, host, port, authority, path) in [
            ("http://a.com/b?c=d", &[][..], Scheme::Http, "a.com", 80, "a.com", "/b?c=d"),
            ("http://a.com:8080", &[], Scheme::Http, "a.com", 8080, "a.com:8080", "/"),
            ("https://[fd00::1]/", &[], Scheme::Https, "fd00::1", 443, "[fd00::1]", "/"),
            ("/ignored", &["https://a.com/b?c"], Scheme::Https, "a.com", 443, "a.com", "/b?c"),
            ("http://127.0.0.1:15002/", &["http://10.0.0.1:81"], Scheme::Http, "10.0.0.1", 81, "10.0.0.1:81", "/"),
        ] {
            let url = of("GET", uri, endpoints).unwrap();
            assert_eq!((url.scheme, url.host.as_str(), url.port), (scheme, host, port), "{uri}");
            assert_eq!((url.authority.to_str().unwrap(), url.path.as_str()), (authority, path), "{uri}");
        }
        let url = of("CONNECT", "a.com:443", &[]).unwrap();
        assert_eq!((url.host.as_str(), url.port), ("a.com", 443));
    }

    #[test]
    fn what_is_for_nobody_is_refused_with_the_reason() {
        for (method, uri, endpoints, error) in [
            ("GET", "/a", &[][..], UrlError::None),
            ("OPTIONS", "*", &[], UrlError::None),
            ("GET", "/a", &["a.com/b"], UrlError::Header),
            ("GET", "/a", &["/b"], UrlError::Header),
            ("GET", "/a", &["http://a.com", "http://b.com"], UrlError::Header),
            ("GET", "http://a.com/", &["http://b.com"], UrlError::Header),
            ("GET", "http://127.0.0.1:80/", &["http://b.com"], UrlError::Header),
            ("GET", "ftp://a.com/", &[], UrlError::Scheme("ftp".to_owned())),
            ("GET", "http://user@a.com/", &[], UrlError::Authority),
            ("GET", "http://a.com:0/", &[], UrlError::Authority),
            ("GET", "http://a.com:65536/", &[], UrlError::Authority),
            ("CONNECT", "a.com:0", &[], UrlError::Authority),
        ] {
            assert_eq!(of(method, uri, endpoints), Err(error), "{method} {uri} {endpoints:?}");
        }
    }

    #[test]
    fn addresses_that_tell_a_machine_who_it_is_are_known() {
        for address in [
            "169.254.169.254",
            "169.254.0.1",
            "fe80::1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "168.63.129.16",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "::169.254.169.254",
        ] {
            assert!(is_metadata(address.parse().unwrap()), "{address}");
        }
        for address in ["169.253.0.1", "10.0.0.1", "fd00::1", "127.0.0.1", "::1", "64:ff9b::a00:1"] {
            assert!(!is_metadata(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn the_proxy_does_not_talk_to_itself() {
        for address in ["127.0.0.1:15002", "[::1]:15002", "0.0.0.0:15002", "127.64.0.1:80"] {
            assert!(is_own(address.parse().unwrap()), "{address}");
        }
        for address in ["127.0.0.1:8080", "10.0.0.1:15002"] {
            assert!(!is_own(address.parse().unwrap()), "{address}");
        }
    }
}
