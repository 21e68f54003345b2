//! Finds the HTTP or SOCKS proxy between this machine and the API server.
//!
//! The cluster's `proxy-url` names it, or else the environment, read as Go reads it: `HTTPS_PROXY`, and `NO_PROXY` for
//! the exceptions.

pub(crate) mod tunnel;

use std::fmt;
use std::net::IpAddr;

use ctrlmesh_proxy::config::Upstream;

/// A proxy to go through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EgressProxy {
    pub(crate) kind: Kind,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) credentials: Option<(String, String)>,
}

/// How it is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Http,
    Socks5,
}

/// A proxy that cannot be gone through.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the proxy of {from} is not http://HOST:PORT nor socks5://HOST:PORT, which is what can be gone through")]
pub(crate) struct EgressProxyError {
    from: &'static str,
}

/// The proxy for `server`: the cluster's own, or the environment's.
pub(crate) fn find(
    server: &Upstream,
    cluster: Option<&str>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Option<EgressProxy>, EgressProxyError> {
    let set = |name: &str| environment(name).filter(|value| !value.is_empty());
    if let Some(url) = cluster {
        return parse(url).map(Some).ok_or(EgressProxyError { from: "proxy-url" });
    }
    let Some(url) = set("HTTPS_PROXY").or_else(|| set("https_proxy")) else {
        return Ok(None);
    };
    let except = set("NO_PROXY").or_else(|| set("no_proxy")).unwrap_or_default();
    if is_local(&server.host) || except.split(',').any(|rule| covers(rule.trim(), server)) {
        return Ok(None);
    }
    let url = if url.contains("://") { url } else { format!("http://{url}") };
    parse(&url).map(Some).ok_or(EgressProxyError { from: "HTTPS_PROXY" })
}

impl fmt::Display for EgressProxy {
    /// Without the credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.kind {
            Kind::Http => "http",
            Kind::Socks5 => "socks5",
        };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

fn parse(url: &str) -> Option<EgressProxy> {
    let (scheme, rest) = url.split_once("://")?;
    let (kind, usual) = match scheme {
        "http" => (Kind::Http, 80),
        "socks5" | "socks5h" => (Kind::Socks5, 1080),
        _ => return None,
    };
    let authority = rest.split(['/', '?', '#']).next()?;
    let (login, authority) = authority.rsplit_once('@').map_or((None, authority), |(login, rest)| (Some(login), rest));
    let authority: http::uri::Authority = authority.parse().ok()?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let credentials = login.map(|login| {
        let (name, password) = login.split_once(':').unwrap_or((login, ""));
        (decoded(name), decoded(password))
    });
    let port = authority.port_u16().unwrap_or(usual);
    (!host.is_empty()).then_some(EgressProxy { kind, host, port, credentials })
}

/// `%40` is `@`, as in any URL.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let pair = more.get(..2).filter(|_| *first == b'%');
        let pair = pair.and_then(|pair| std::str::from_utf8(pair).ok());
        let byte = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &more[2..] } else { more };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn is_local(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// One entry of `NO_PROXY`: `*`, an address, a network, or a domain; each but the first with a port if one is meant.
fn covers(rule: &str, server: &Upstream) -> bool {
    if rule == "*" {
        return true;
    }
    if let Some((network, bits)) = rule.split_once('/') {
        let parsed = (network.parse(), bits.parse(), server.host.parse());
        return matches!(parsed, (Ok(network), Ok(bits), Ok(ip)) if inside(network, bits, ip));
    }
    if rule.parse::<IpAddr>().is_ok() {
        return rule.parse::<IpAddr>().ok() == server.host.parse().ok();
    }
    let (name, port) = match rule.rsplit_once(':') {
        Some((name, port)) => (name, port.parse::<u16>().ok()),
        None => (rule, None),
    };
    let name = name.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    if name.is_empty() || port.is_some_and(|port| port != server.port) {
        return false;
    }
    let host = server.host.to_ascii_lowercase();
    let suffix = name.strip_prefix('*').unwrap_or(&name);
    let dotted = if suffix.starts_with('.') { suffix.to_owned() } else { format!(".{suffix}") };
    host.ends_with(&dotted) || (!suffix.starts_with('.') && host == suffix)
}

fn inside(network: IpAddr, bits: u32, ip: IpAddr) -> bool {
    match (network, ip) {
        (IpAddr::V4(network), IpAddr::V4(ip)) if bits <= 32 => {
            let shift = 32 - bits;
            (network.to_bits() ^ ip.to_bits()).checked_shr(shift).unwrap_or(0) == 0
        }
        (IpAddr::V6(network), IpAddr::V6(ip)) if bits <= 128 => {
            let shift = 128 - bits;
            (network.to_bits() ^ ip.to_bits()).checked_shr(shift).unwrap_or(0) == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &str) -> Upstream {
        Upstream { host: host.into(), port: 6443 }
    }

    fn found(host: &str, variables: &[(&str, &str)]) -> Option<String> {
        let environment = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        find(&server(host), None, environment).unwrap().map(|through| through.to_string())
    }

    #[test]
    fn the_clusters_own_proxy_comes_first() {
        let through = find(&server("a"), Some("socks5h://me:p%40ss@p:1"), |_| Some("http://q".into()));
        let through = through.unwrap().unwrap();
        assert_eq!(through.to_string(), "socks5://p:1");
        assert_eq!(through.credentials, Some(("me".into(), "p@ss".into())));
    }

    #[test]
    fn proxy_variables_count_except_for_this_machine_and_no_proxy() {
        let proxy = ("HTTPS_PROXY", "p:3128");
        assert_eq!(found("api.example.com", &[proxy]), Some("http://p:3128".into()));
        assert_eq!(found("api.example.com", &[("https_proxy", "http://p")]), Some("http://p:80".into()));
        assert_eq!(found("127.0.0.1", &[proxy]), None);
        assert_eq!(found("localhost", &[proxy]), None);
        for (host, except) in [
            ("api.example.com", "x, example.com"),
            ("api.example.com", ".example.com"),
            ("api.example.com", "*.example.com"),
            ("api.example.com", "api.example.com:6443"),
            ("10.1.2.3", "10.0.0.0/8"),
            ("10.1.2.3", "10.1.2.3"),
            ("fd00::1", "fd00::/8"),
            ("a", "*"),
        ] {
            assert_eq!(found(host, &[proxy, ("NO_PROXY", except)]), None, "{host} {except}");
        }
        for (host, except) in [
            ("api.example.com", "ample.com,api.example.com:443,10.0.0.0/8,,/"),
            ("10.1.2.3", "11.0.0.0/8,10.0.0.0/99,fd00::/8"),
            ("example.com", ".example.com"),
        ] {
            assert!(found(host, &[proxy, ("no_proxy", except)]).is_some(), "{host} {except}");
        }
    }

    #[test]
    fn a_proxy_of_another_kind_is_refused() {
        let https = find(&server("a"), Some("https://p"), |_| None);
        assert_eq!(https, Err(EgressProxyError { from: "proxy-url" }));
    }
}
