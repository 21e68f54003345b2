//! Decides which connections and requests the rules of a policy let pass.

use ctrlmesh_common::policy::Egress;
use ctrlmesh_common::policy::egress::{
    ANY, AccessList, AccessRule, EgressError, Scheme, UrlMatch, UrlParts, UrlRequest, url_regex,
};
use regex::Regex;

use super::path::normalised;
use super::target::{Host, Target, Visible};

/// What ends a path that stands for all below it.
const BELOW: &str = "/*";

/// The rules of one pod.
#[derive(Debug, Default)]
pub struct Rules {
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    access: AccessRule,
    urls: Vec<UrlRule>,
}

#[derive(Debug)]
enum UrlRule {
    Parts(PartsRule),
    Regex(Regex),
}

/// What is absent matches all.
#[derive(Clone, Debug)]
struct PartsRule {
    scheme: Option<Scheme>,
    host: Option<HostRule>,
    port: Option<u16>,
    path: Option<PathRule>,
}

#[derive(Clone, Debug)]
enum HostRule {
    One(Host),
    /// Every name that ends so, and is longer.
    Below(String),
}

#[derive(Clone, Debug)]
enum PathRule {
    One(String),
    /// This path, and all that go on behind it with a slash.
    Below(String),
}

/// Some requests to other servers, as limits name them.
#[derive(Clone, Debug, Default)]
pub(crate) struct UrlRequests(Vec<(PartsRule, String)>);

impl UrlRequests {
    pub(crate) fn new(requests: &[UrlRequest]) -> Self {
        let compiled = |UrlRequest { url, method }: &UrlRequest| (PartsRule::new(url), method.clone());
        Self(requests.iter().map(compiled).collect())
    }

    /// Whether it is one of these. What is not seen may be any.
    pub(crate) fn match_any(&self, visible: &Visible<'_>) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let target = Target::new(visible);
        let is_method = |listed: &str| listed == ANY || target.method.is_none_or(|method| method == listed);
        self.0.iter().any(|(url, method)| is_method(method) && url.matches(&target))
    }
}

impl Rules {
    /// Of a policy that [`Egress::check`] finds good.
    ///
    /// # Errors
    /// The first regular expression that is none.
    pub fn new(egress: &Egress) -> Result<Self, EgressError> {
        let rules = egress.access.iter().enumerate().map(|(at, access)| Rule::new(at, access));
        Ok(Self { rules: rules.collect::<Result<_, _>>()? })
    }

    /// Whether all rules let it pass.
    ///
    /// # Errors
    /// The first rule that does not.
    pub fn decide(&self, visible: &Visible<'_>) -> Result<(), &AccessRule> {
        self.first(visible, |_any| true)
    }

    /// Whether no rule denies it, whatever is allowed. What a client dials may have two names: what it says, and the
    /// address.
    ///
    /// # Errors
    /// The first rule that does.
    pub fn denied(&self, visible: &Visible<'_>) -> Result<(), &AccessRule> {
        self.first(visible, |list| list == AccessList::Deny)
    }

    /// Whether a rule allows it by the name or address of its host, and not among many others.
    pub fn name(&self, visible: &Visible<'_>) -> bool {
        let target = Target::new(visible);
        let mut allowing = self.rules.iter().filter(|rule| rule.access.list == AccessList::Allow);
        allowing.any(|rule| rule.access.ports.contains(&target.port) && rule.names(&target))
    }

    fn first(&self, visible: &Visible<'_>, is_asked: impl Fn(AccessList) -> bool) -> Result<(), &AccessRule> {
        let mut asked = self.rules.iter().filter(|rule| is_asked(rule.access.list)).peekable();
        if asked.peek().is_none() {
            return Ok(());
        }
        let target = Target::new(visible);
        asked.find(|rule| rule.refuses(&target)).map_or(Ok(()), |rule| Err(&rule.access))
    }
}

impl Rule {
    fn new(at: usize, access: &AccessRule) -> Result<Self, EgressError> {
        let urls = access.urls.iter().map(|url| match url {
            UrlMatch::Parts(parts) => Ok(UrlRule::Parts(PartsRule::new(parts))),
            UrlMatch::Regex(text) => Ok(UrlRule::Regex(url_regex(at, text)?)),
        });
        Ok(Self { urls: urls.collect::<Result<_, _>>()?, access: access.clone() })
    }

    fn refuses(&self, target: &Target<'_>) -> bool {
        if !self.access.ports.contains(&target.port) {
            return false;
        }
        let is_matched = self.lists_method(target.method) && self.urls.iter().any(|url| url.matches(target));
        match self.access.list {
            AccessList::Allow => !is_matched,
            AccessList::Deny => is_matched,
        }
    }

    fn names(&self, target: &Target<'_>) -> bool {
        self.urls.iter().any(|url| match url {
            UrlRule::Parts(parts) => matches!(parts.host, Some(HostRule::One(_))) && parts.matches(target),
            UrlRule::Regex(_) => false,
        })
    }

    /// A method that is not seen may be any.
    fn lists_method(&self, method: Option<&str>) -> bool {
        method.is_none_or(|method| self.access.methods.iter().any(|listed| listed == ANY || listed == method))
    }
}

impl UrlRule {
    fn matches(&self, target: &Target<'_>) -> bool {
        match self {
            Self::Parts(parts) => parts.matches(target),
            Self::Regex(regex) => target.urls().iter().any(|url| regex.is_match(url)),
        }
    }
}

impl PartsRule {
    fn new(parts: &UrlParts) -> Self {
        Self {
            scheme: parts.scheme,
            host: HostRule::new(&parts.host),
            port: parts.port,
            path: parts.path.as_deref().and_then(PathRule::new),
        }
    }

    /// A scheme or path that is not seen may be any.
    fn matches(&self, target: &Target<'_>) -> bool {
        self.scheme.is_none_or(|scheme| target.scheme.is_none_or(|seen| seen == scheme))
            && self.port.is_none_or(|port| port == target.port)
            && self.host.as_ref().is_none_or(|host| host.matches(&target.host))
            && self.path.as_ref().is_none_or(|path| target.path.as_deref().is_none_or(|seen| path.matches(seen)))
    }
}

impl HostRule {
    /// `None` where it is every host.
    fn new(text: &str) -> Option<Self> {
        let below = text.strip_prefix(ANY).filter(|rest| rest.starts_with('.'));
        match below {
            _ if text == ANY => None,
            Some(end) => Some(Self::Below(end.strip_suffix('.').unwrap_or(end).to_ascii_lowercase())),
            None => Some(Self::One(Host::new(text))),
        }
    }

    fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (Self::One(one), host) => one == host,
            (Self::Below(end), Host::Name(name)) => name.len() > end.len() && name.ends_with(end.as_str()),
            (Self::Below(_), Host::Address(_)) => false,
        }
    }
}

impl PathRule {
    /// `None` where it is every path.
    fn new(text: &str) -> Option<Self> {
        match text.strip_suffix(BELOW) {
            Some("") => None,
            Some(above) => Some(Self::Below(normalised(above).trim_end_matches('/').to_owned())),
            None => Some(Self::One(normalised(text).into_owned())),
        }
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            Self::One(one) => one == path,
            Self::Below(above) => {
                path.strip_prefix(above.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        }
    }
}

/// Whether these URLs are told from others by their path, which TLS hides. Of a regular expression that cannot be said:
/// `false`.
pub fn needs_path(url: &UrlMatch) -> bool {
    match url {
        UrlMatch::Parts(UrlParts { path: Some(path), .. }) => path != BELOW,
        UrlMatch::Parts(_) | UrlMatch::Regex(_) => false,
    }
}

#[cfg(test)]
mod tests;
