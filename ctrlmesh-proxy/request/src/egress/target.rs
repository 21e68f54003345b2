//! What a client wants to talk to, in a form that compares.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;
use std::net::IpAddr;

use ctrlmesh_common::policy::egress::Scheme;

use super::path::{SERVER, normalised};

/// What can be seen of a connection, or of a request on it.
#[derive(Clone, Copy, Debug)]
pub struct Visible<'a> {
    /// `None` where it is neither HTTP nor TLS.
    pub scheme: Option<Scheme>,
    /// A DNS name or an address, in any case.
    pub host: &'a str,
    pub port: u16,
    /// The method, and the path without query. `None` where they are not to be seen: in TLS, and in other bytes.
    pub request: Option<(&'a str, &'a str)>,
}

/// The same, as rules compare it.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    pub(super) scheme: Option<Scheme>,
    pub(crate) host: Host,
    pub(crate) port: u16,
    pub(crate) method: Option<&'a str>,
    pub(crate) path: Option<Cow<'a, str>>,
    urls: OnceCell<Vec<String>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    Address(IpAddr),
    /// In lower case, without a dot at its end.
    Name(String),
}

impl<'a> Target<'a> {
    pub(crate) fn new(visible: &Visible<'a>) -> Self {
        Self {
            scheme: visible.scheme,
            host: Host::new(visible.host),
            port: visible.port,
            method: visible.request.map(|(method, _)| method),
            path: visible.request.map(|(_, path)| normalised(path)),
            urls: OnceCell::new(),
        }
    }

    /// The URLs that this may be: each scheme where none is known, with and without a slash where no path is seen.
    pub(super) fn urls(&self) -> &[String] {
        self.urls.get_or_init(|| {
            let schemes = self.scheme.map_or(vec![Scheme::Http, Scheme::Https], |scheme| vec![scheme]);
            let paths = match self.path.as_deref() {
                Some(SERVER) => vec![""],
                Some(path) => vec![path],
                None => vec!["/", ""],
            };
            schemes.iter().flat_map(|scheme| paths.iter().map(|path| self.url(*scheme, path))).collect()
        })
    }

    fn url(&self, scheme: Scheme, path: &str) -> String {
        let (name, host, port) = (scheme.name(), &self.host, self.port);
        if port == scheme.default_port() {
            format!("{name}://{host}{path}")
        } else {
            format!("{name}://{host}:{port}{path}")
        }
    }
}

impl Host {
    /// An IPv6 address may stand in brackets. One that stands for an IPv4 address is that address.
    pub(crate) fn new(text: &str) -> Self {
        let text = text.strip_suffix('.').unwrap_or(text);
        let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        match inside.unwrap_or(text).parse::<IpAddr>() {
            Ok(address) => Self::Address(address.to_canonical()),
            Err(_) => Self::Name(text.to_ascii_lowercase()),
        }
    }
}

/// As it stands in a URL.
impl fmt::Display for Host {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(IpAddr::V6(address)) => write!(out, "[{address}]"),
            Self::Address(IpAddr::V4(address)) => write!(out, "{address}"),
            Self::Name(name) => out.write_str(name),
        }
    }
}
