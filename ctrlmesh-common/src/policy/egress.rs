//! What a pod talks to beside the API server.

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::fault::{FaultError, MAX_REGEXES, whole_match};
use super::{Policy, Redirect};

/// The most ports that one pod's proxy takes connections of.
pub const MAX_PORTS: usize = 32;

/// Any host, path or method.
pub const ANY: &str = "*";

/// What a pod's proxy takes beside the connections to the API server, and the rules on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Egress {
    /// TCP ports: the pod's connections to them go to its proxy, whatever the address. Distinct, 1 to 32.
    pub ports: Vec<u16>,
    /// What may be talked to. A request must pass all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub access: Vec<AccessRule>,
}

/// One rule of a `CircuitBreaker` on what may be talked to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AccessRule {
    /// The `CircuitBreaker`, as `NAMESPACE/NAME`.
    pub breaker: String,
    /// The name of the rule in it.
    pub rule: String,
    /// The ports that the rule is about: at least one. What goes to others passes it.
    pub ports: Vec<u16>,
    /// What happens to requests that match.
    pub list: AccessList,
    /// Requests by their URL, of which any must match.
    pub urls: Vec<UrlMatch>,
    /// HTTP methods, of which any must match; `*` is every method.
    pub methods: Vec<String>,
}

/// What a list says of requests that match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AccessList {
    /// Only they pass.
    Allow,
    /// Only others pass.
    Deny,
}

/// Some URLs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum UrlMatch {
    /// By its parts.
    Parts(UrlParts),
    /// A regular expression that the whole URL matches, without its query, as the crate `regex` reads it. The URL is
    /// `SCHEME://HOST/PATH`, with the port behind the host where it is not the scheme's own.
    Regex(String),
}

/// The parts of a URL. What is absent matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UrlParts {
    /// The scheme.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<Scheme>,
    /// A DNS name or address, in lower case and without brackets. `*.example.com` is every name below that one; `*`
    /// is every host.
    pub host: String,
    /// The port. Absent: each of the policy's ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The path, without query. One that ends in `/*` stands for all that begin so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// Some requests to other servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UrlRequest {
    /// Where to.
    pub url: UrlParts,
    /// The HTTP method; `*` is every method.
    pub method: String,
}

/// How a server is talked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Scheme {
    /// HTTP in the clear.
    Http,
    /// Over TLS.
    Https,
}

/// A rule on egress that no proxy can apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    /// Nothing would be looked at, or too much.
    #[error("ports: 1 to {MAX_PORTS} are allowed, and not 0; there are {count}")]
    Ports {
        /// How many.
        count: usize,
    },
    /// A list without a URL or a method lets nothing match.
    #[error("access[{at}].{field}: at least one is needed")]
    Empty {
        /// Which rule.
        at: usize,
        /// `ports`, `urls` or `methods`.
        field: &'static str,
    },
    /// A path that is none.
    #[error("access[{at}].urls: the path {path:?} must begin with a slash")]
    Path {
        /// Which rule.
        at: usize,
        /// As it was given.
        path: String,
    },
    /// A regular expression that is none.
    #[error("access[{at}].urls: {text:?} is no regular expression: {reason}")]
    Regex {
        /// Which rule.
        at: usize,
        /// As it was given.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// Too many of them would take too much memory.
    #[error("access: the rules of a pod may have {MAX_REGEXES} regular expressions")]
    Regexes,
}

impl Egress {
    /// Whether a proxy can apply it.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), EgressError> {
        let count = self.ports.len();
        let is_wrong = |(at, port): (usize, &u16)| *port == 0 || self.ports[..at].contains(port);
        if !(1..=MAX_PORTS).contains(&count) || self.ports.iter().enumerate().any(is_wrong) {
            return Err(EgressError::Ports { count });
        }
        let urls = self.access.iter().flat_map(|rule| &rule.urls);
        if urls.filter(|url| matches!(url, UrlMatch::Regex(_))).count() > MAX_REGEXES {
            return Err(EgressError::Regexes);
        }
        self.access.iter().enumerate().try_for_each(|(at, rule)| rule.check(at))
    }
}

impl Policy {
    /// Whether the pod's proxy sees anything that goes to other servers than the API server.
    pub fn sees_other_servers(&self) -> bool {
        self.redirect != Redirect::Nowhere || self.forward_proxy
    }

    /// The TCP ports whose connections the pod's proxy takes, beside those to the API server.
    pub fn egress_ports(&self) -> &[u16] {
        self.egress().map(|egress| &egress.ports[..]).unwrap_or_default()
    }
}

impl AccessRule {
    fn check(&self, at: usize) -> Result<(), EgressError> {
        let lists = [("ports", self.ports.len()), ("urls", self.urls.len()), ("methods", self.methods.len())];
        for (field, length) in lists {
            if length == 0 {
                return Err(EgressError::Empty { at, field });
            }
        }
        self.urls.iter().try_for_each(|url| match url {
            UrlMatch::Parts(UrlParts { path: Some(path), .. }) if !path.starts_with('/') => {
                Err(EgressError::Path { at, path: path.clone() })
            }
            UrlMatch::Parts(_) => Ok(()),
            UrlMatch::Regex(text) => url_regex(at, text).map(drop),
        })
    }
}

impl Scheme {
    /// The port that a URL means that names none.
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }

    /// As it stands in a URL.
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// A regular expression of the rule `at` that the whole URL must match.
///
/// # Errors
/// If it is none, or takes too much memory.
pub fn url_regex(at: usize, text: &str) -> Result<Regex, EgressError> {
    whole_match(text).map_err(|error| {
        let reason = match error {
            FaultError::Regex { reason, .. } => reason,
            other => other.to_string(),
        };
        EgressError::Regex { at, text: text.to_owned(), reason }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Mode, PolicyError};

    fn rule(urls: &[UrlMatch], methods: &[&str]) -> AccessRule {
        AccessRule {
            breaker: "ops/egress".to_owned(),
            rule: "one".to_owned(),
            ports: vec![80],
            list: AccessList::Allow,
            urls: urls.to_vec(),
            methods: methods.iter().map(|method| (*method).to_owned()).collect(),
        }
    }

    fn regex(text: &str) -> UrlMatch {
        UrlMatch::Regex(text.to_owned())
    }

    fn path(path: &str) -> UrlMatch {
        UrlMatch::Parts(UrlParts { host: ANY.to_owned(), path: Some(path.to_owned()), ..UrlParts::default() })
    }

    fn egress(access: &[AccessRule]) -> Egress {
        Egress { ports: vec![80, 443], access: access.to_vec() }
    }

    #[test]
    fn ports_are_few_distinct_and_not_zero() {
        let with = |ports: Vec<u16>| Egress { ports, access: Vec::new() }.check();
        for ports in [vec![443], (1..=32).collect(), vec![65_535, 1]] {
            assert_eq!(with(ports.clone()), Ok(()), "{ports:?}");
        }
        for ports in [vec![], (1..=33).collect(), vec![0], vec![80, 443, 80]] {
            let count = ports.len();
            assert_eq!(with(ports), Err(EgressError::Ports { count }));
        }
    }

    #[test]
    fn a_rule_that_cannot_be_applied_is_refused_by_field() {
        let good = rule(&[path("/v1/*"), regex("https://.*")], &["GET", ANY]);
        assert_eq!(egress(std::slice::from_ref(&good)).check(), Ok(()));
        for (bad, start) in [
            (rule(&[], &[ANY]), "access[1].urls: at least one"),
            (rule(&[path("/")], &[]), "access[1].methods: at least one"),
            (rule(&[path("/"), path("v1")], &[ANY]), "access[1].urls: the path \"v1\""),
            (rule(&[path("")], &[ANY]), "access[1].urls: the path \"\""),
            (rule(&[regex("(")], &[ANY]), "access[1].urls: \"(\" is no regular expression: "),
        ] {
            let error = egress(&[good.clone(), bad]).check().unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
        }
    }

    #[test]
    fn regular_expressions_are_counted_over_all_rules() {
        let with = |more: usize| {
            let half = rule(&vec![regex("a"); MAX_REGEXES / 2], &[ANY]);
            egress(&[half.clone(), half, rule(&vec![regex("b"); more], &[ANY]), rule(&[path("/")], &[ANY])])
        };
        assert_eq!(with(1).check(), Err(EgressError::Regexes));
        assert_eq!(with(0).check(), Err(EgressError::Empty { at: 2, field: "urls" }));
    }

    #[test]
    fn a_policy_holds_its_egress_rules_unless_it_passes() {
        let enforced = Policy { egress: Some(egress(&[])), ..Policy::default() };
        assert!(enforced.egress().is_some());
        let pass = Policy { mode: Mode::Pass, ..enforced.clone() };
        assert!(pass.egress().is_none());
        assert!(enforced.means_the_same(&Policy::default()));
        let wrong = Policy { egress: Some(Egress::default()), ..Policy::default() };
        assert_eq!(wrong.check(), Err(PolicyError::Egress { source: EgressError::Ports { count: 0 } }));
    }
}
