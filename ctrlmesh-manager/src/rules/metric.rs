//! Reads what a root says of metrics: the address of a Prometheus server, a query with placeholders, and a range.
//!
//! Pure.

use std::fmt;
use std::net::Ipv6Addr;

use ctrlmesh_common::api::ThresholdRange;
use http::Uri;

/// What begins a placeholder.
const BEGIN: &str = "{{";

/// Where a Prometheus server without a port in its address listens.
const DEFAULT_PORT: u16 = 80;

/// A Prometheus server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// As in a `Host` header.
    pub authority: String,
    /// A name or an IP address, without brackets.
    pub host: String,
    pub port: u16,
    /// The path that the API is below. It does not end with a slash.
    pub prefix: String,
}

/// What the placeholders of a query stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placeholders {
    pub revision: String,
    pub promoted: String,
    pub namespace: String,
    pub root: String,
    /// The names of the pods on trial, joined by `|`.
    pub pods: String,
}

/// Something in a query that begins as a placeholder does, and is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is none of {{{{revision}}}}, {{{{promoted}}}}, {{{{namespace}}}}, {{{{root}}}} and {{{{pods}}}}")]
pub struct UnknownPlaceholder {
    /// Its first characters.
    text: String,
}

/// Where a value has to be, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub min: Option<f64>,
    pub max: Option<f64>,
}

impl Address {
    /// `None` for what is no `http` URL, or has a user, a query or a fragment.
    pub fn parse(text: &str) -> Option<Self> {
        let uri: Uri = text.parse().ok().filter(|_| text.starts_with("http://") && !text.contains(['?', '#']))?;
        let authority = uri.authority()?;
        let (host, port) = (authority.host(), authority.port_u16().filter(|port| *port > 0));
        // Without a user, and with a valid port.
        let written = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let name = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_host = |host: &str| host.chars().all(|one| one.is_ascii_alphanumeric() || "-.".contains(one));
        let is_address = |host: &str| host.parse::<Ipv6Addr>().is_ok();
        let is_valid = !host.is_empty() && name.map_or_else(|| is_host(host), is_address);
        let is_plain = |one: char| one.is_ascii_alphanumeric() || "-._~/%".contains(one);
        (is_valid && authority.as_str() == written && uri.path().chars().all(is_plain)).then(|| Self {
            authority: written,
            host: name.unwrap_or(host).to_owned(),
            port: port.unwrap_or(DEFAULT_PORT),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }
}

impl Placeholders {
    /// The query that is sent.
    pub fn render(&self, query: &str) -> Result<String, UnknownPlaceholder> {
        let values = [
            ("{{revision}}", &self.revision),
            ("{{promoted}}", &self.promoted),
            ("{{namespace}}", &self.namespace),
            ("{{root}}", &self.root),
            ("{{pods}}", &self.pods),
        ];
        let (mut rendered, mut rest) = (String::with_capacity(query.len()), query);
        while let Some(at) = rest.find(BEGIN) {
            rendered.push_str(&rest[..at]);
            rest = &rest[at..];
            let known = values.iter().find_map(|(name, value)| Some((rest.strip_prefix(name)?, value)));
            let Some((after, value)) = known else {
                return Err(UnknownPlaceholder { text: rest.chars().take(20).collect() });
            };
            rendered.push_str(value);
            rest = after;
        }
        rendered.push_str(rest);
        Ok(rendered)
    }
}

impl Range {
    /// `None` where a bound is no number.
    pub fn parse(range: &ThresholdRange) -> Option<Self> {
        let number = |bound: &Option<String>| bound.as_deref().map(str::parse).transpose().ok();
        Some(Self { min: number(&range.min)?, max: number(&range.max)? })
    }

    pub fn contains(self, value: f64) -> bool {
        self.min.is_none_or(|min| value >= min) && self.max.is_none_or(|max| value <= max)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (Some(min), Some(max)) => write!(out, "from {min} to {max}"),
            (Some(min), None) => write!(out, "at least {min}"),
            (None, Some(max)) => write!(out, "at most {max}"),
            (None, None) => write!(out, "anything"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_a_port_and_a_path() {
        let parts = |text: &str| Address::parse(text).map(|it| (it.host, it.port, it.prefix));
        let expected = |host: &str, port, prefix: &str| Some((host.to_owned(), port, prefix.to_owned()));
        assert_eq!(parts("http://prometheus.monitoring.svc:9090"), expected("prometheus.monitoring.svc", 9090, ""));
        assert_eq!(parts("http://mimir/prometheus/"), expected("mimir", 80, "/prometheus"));
        assert_eq!(parts("http://[::1]:9090/"), expected("::1", 9090, ""));
        for refused in [
            "https://a",
            "a:9090",
            "http://",
            "http://a:0",
            "http://a:70000",
            "http://u:p@a",
            "http://a/?b",
            "http://a#b",
            "http://[a]",
            "http://a/b c",
            "http://a/\"",
        ] {
            assert_eq!(Address::parse(refused), None, "{refused}");
        }
    }

    #[test]
    fn placeholders_are_replaced_and_others_refused() {
        let values = Placeholders {
            revision: "new".to_owned(),
            promoted: "old".to_owned(),
            namespace: "ns".to_owned(),
            root: "web".to_owned(),
            pods: "a|b".to_owned(),
        };
        let query =
            r#"sum(errors{pod=~"{{pods}}", of="{{root}}.{{namespace}}"}) / x{v="{{revision}}", w!="{{promoted}}"}"#;
        let rendered = r#"sum(errors{pod=~"a|b", of="web.ns"}) / x{v="new", w!="old"}"#;
        assert_eq!(values.render(query).as_deref(), Ok(rendered));
        for query in ["up{{{pods}}}", "{{pod}}", "a{{", "{{ pods }}"] {
            assert!(values.render(query).is_err(), "{query}");
        }
        let error = values.render("a{{pod}}").unwrap_err().to_string();
        assert!(error.starts_with(r#""{{pod}}" is none of {{revision}}, "#), "{error}");
    }

    #[test]
    fn what_replaces_a_placeholder_is_not_read_again() {
        let values = Placeholders { pods: "{{root}}".to_owned(), root: "web".to_owned(), ..Placeholders::default() };
        assert_eq!(values.render("{{pods}}").as_deref(), Ok("{{root}}"));
    }

    #[test]
    fn a_range_includes_its_ends() {
        let range = |min: Option<&str>, max: Option<&str>| {
            Range::parse(&ThresholdRange { min: min.map(str::to_owned), max: max.map(str::to_owned) }).unwrap()
        };
        assert!(range(Some("-1"), Some("0.5")).contains(0.5) && range(Some("-1"), None).contains(-1.0));
        assert!(!range(None, Some("0.5")).contains(0.51) && !range(Some("0.5"), None).contains(0.49));
        assert_eq!(range(Some("0.10"), Some("2")).to_string(), "from 0.1 to 2");
        assert_eq!(range(None, Some("0.05")).to_string(), "at most 0.05");
    }
}
