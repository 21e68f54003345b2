//! Matches what goes to other servers than the API server.

use ctrlmesh_common::policy::fault::{FaultError, HeaderMatch, HttpMatch, TextMatch, whole_match};
use regex::Regex;

use super::TextRule;
use crate::egress::{Host, Target, Visible, normalised};

/// A connection to another server, or a request on it, as faults match it.
#[derive(Clone, Copy)]
pub struct EgressRequest<'a> {
    pub visible: Visible<'a>,
    /// Whether the request has this header with this value. Not asked where no request is to be seen.
    pub has_header: &'a dyn Fn(&str, &str) -> bool,
}

/// A match with ports.
#[derive(Debug)]
pub(super) struct EgressRule {
    ports: Vec<u16>,
    host: Option<HostRule>,
    path: Option<TextRule>,
    method: Option<String>,
    headers: Vec<HeaderMatch>,
}

#[derive(Debug)]
enum HostRule {
    Exact(Host),
    Regex(Regex),
}

impl EgressRule {
    pub(super) fn new(spec: &HttpMatch) -> Result<Self, FaultError> {
        let path = spec.path.as_ref().map(|path| match path {
            // As the path of a request is compared.
            TextMatch::Exact(path) => Ok(TextRule::Exact(normalised(path).into_owned())),
            TextMatch::Regex(_) => TextRule::new(path),
        });
        Ok(Self {
            ports: spec.ports.clone(),
            host: spec.host.as_ref().map(HostRule::new).transpose()?,
            path: path.transpose()?,
            method: spec.method.clone(),
            headers: spec.headers.clone(),
        })
    }

    /// A method, a path or a header that is not to be seen may be any.
    pub(super) fn matches(&self, target: &Target<'_>, has_header: &dyn Fn(&str, &str) -> bool) -> bool {
        let are_hidden = target.method.is_none();
        self.ports.contains(&target.port)
            && self.host.as_ref().is_none_or(|host| host.matches(&target.host))
            && self.path.as_ref().is_none_or(|path| target.path.as_deref().is_none_or(|seen| path.matches(seen)))
            && self.method.as_ref().is_none_or(|method| target.method.is_none_or(|seen| seen == method))
            && (are_hidden || self.headers.iter().all(|header| has_header(&header.name, &header.value)))
    }
}

impl HostRule {
    fn new(spec: &TextMatch) -> Result<Self, FaultError> {
        Ok(match spec {
            TextMatch::Exact(host) => Self::Exact(Host::new(host)),
            TextMatch::Regex(regex) => Self::Regex(whole_match(regex)?),
        })
    }

    /// An expression is put to the host as it stands in a URL.
    fn matches(&self, host: &Host) -> bool {
        match self {
            Self::Exact(exact) => exact == host,
            Self::Regex(regex) => regex.is_match(&host.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
