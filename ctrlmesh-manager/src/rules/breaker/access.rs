//! Reads what a CircuitBreaker says of other servers than the API server, as its pods' proxies are told.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{CircuitBreakerSpec, ContentType, InterceptType, RestRule, TrafficInterceptRule};
use ctrlmesh_common::policy::egress::{ANY, AccessList, AccessRule, Scheme, UrlMatch, UrlParts, UrlRequest};
use serde::Serialize;

use crate::rules::validate;

/// What a CircuitBreaker says of other servers than the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Access {
    pub rules: Vec<AccessRule>,
    /// TCP ports whose connections the rules, and the limits, look at.
    pub ports: BTreeSet<u16>,
    /// How many regular expressions they have.
    pub regexes: usize,
    /// The names of the rules and limits with a path or a method that TLS may hide.
    #[serde(skip)]
    pub hidden: Vec<String>,
}

impl Access {
    /// Of the valid CircuitBreaker `NAMESPACE/NAME`.
    pub(super) fn read(breaker: &str, spec: &CircuitBreakerSpec) -> Self {
        let (rules, limits) = (&spec.traffic_intercept_rules, &spec.rate_limitings);
        let hidden = rules.iter().filter(|rule| has_hidden_part(rule)).map(|rule| &rule.name);
        let is_hidden = |one: &UrlRequest| is_hidden(&one.url, one.method != ANY);
        let is_limit_hidden = |rules: &[RestRule]| rules.iter().filter_map(url_request).any(|one| is_hidden(&one));
        let limits_hidden = limits.iter().filter(|limit| is_limit_hidden(&limit.rest_rules)).map(|limit| &limit.name);
        let hidden = hidden.chain(limits_hidden).cloned().collect();
        let limited = limits.iter().flat_map(|limit| &limit.rest_rules).filter_map(url_request);
        let ports = rules.iter().flat_map(validate::rule_ports).chain(limited.filter_map(|one| one.url.port)).collect();
        let rules: Vec<AccessRule> = rules.iter().map(|rule| access_rule(breaker, rule)).collect();
        let urls = rules.iter().flat_map(|rule| &rule.urls);
        let regexes = urls.filter(|url| matches!(url, UrlMatch::Regex(_))).count();
        Self { rules, ports, regexes, hidden }
    }

    /// What they take as JSON, at most.
    pub(super) fn bytes(&self) -> usize {
        // Strings and numbers always serialise.
        self.rules.iter().map(|rule| serde_json::to_vec(rule).unwrap_or_default().len() + 1).sum()
    }
}

/// The requests that a valid restRule counts.
pub(super) fn url_request(rule: &RestRule) -> Option<UrlRequest> {
    validate::rest_url(rule).map(|url| UrlRequest { url, method: rule.method.clone() })
}

fn access_rule(breaker: &str, rule: &TrafficInterceptRule) -> AccessRule {
    AccessRule {
        breaker: breaker.to_owned(),
        rule: rule.name.clone(),
        ports: validate::rule_ports(rule).into_iter().collect(),
        list: match rule.intercept_type {
            InterceptType::Whitelist => AccessList::Allow,
            InterceptType::Blacklist => AccessList::Deny,
        },
        urls: match rule.content_type {
            ContentType::Normal => urls(rule).flat_map(|url| on_each_port(url, rule)).map(UrlMatch::Parts).collect(),
            ContentType::Regexp => {
                let regexes = rule.contents.iter().filter_map(|content| validate::translated(content));
                regexes.map(UrlMatch::Regex).collect()
            }
        },
        methods: rule.methods.clone(),
    }
}

/// The contents of a rule of the type Normal.
fn urls(rule: &TrafficInterceptRule) -> impl Iterator<Item = UrlParts> {
    rule.contents.iter().filter_map(|content| validate::parse_content(content).ok())
}

/// Without a port, a URL would match on those of the pod's other rules, too.
fn on_each_port(url: UrlParts, rule: &TrafficInterceptRule) -> impl Iterator<Item = UrlParts> {
    let ports = validate::content_ports(&url, rule);
    ports.into_iter().map(move |port| UrlParts { port: Some(port), ..url.clone() })
}

/// Whether a request over TLS has a part that the rule asks for, and nobody sees.
fn has_hidden_part(rule: &TrafficInterceptRule) -> bool {
    let names_methods = !rule.methods.iter().any(|method| method == ANY);
    match rule.content_type {
        ContentType::Normal => urls(rule).any(|url| is_hidden(&url, names_methods)),
        // Nobody can tell which part of a URL an expression is about, but where it begins with the scheme.
        ContentType::Regexp => rule.contents.iter().any(|content| !content.starts_with("http://")),
    }
}

fn is_hidden(url: &UrlParts, names_method: bool) -> bool {
    url.scheme != Some(Scheme::Http) && (names_method || url.path.is_some())
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::LabelSelector;

    use super::*;

    fn read(rules: &str) -> Access {
        let traffic_intercept_rules = serde_saphyr::from_str(rules).unwrap();
        let (selector, rate_limitings) = (LabelSelector::default(), Vec::new());
        Access::read("ops/b", &CircuitBreakerSpec { selector, rate_limitings, traffic_intercept_rules })
    }

    /// A rule of the type Normal.
    fn normal(contents: &str, methods: &str, more: &str) -> Access {
        let head = "name: a, interceptType: Whitelist, contentType: Normal";
        read(&format!("[{{{head}, contents: [{contents}], methods: [{methods}]{more}}}]"))
    }

    #[test]
    fn every_field_reaches_the_proxy() {
        let access = read(
            "- {name: in, interceptType: Whitelist, contentType: Normal, contents: ['https://a/v1/*', b], methods: ['*'], ports: [8080]}
- {name: out, interceptType: Blacklist, contentType: Regexp, contents: ['https?://\\d+\\.b/.*'], methods: [POST, PUT]}
",
        );
        let parts = |scheme, host: &str, port, path: Option<&str>| {
            UrlMatch::Parts(UrlParts { scheme, host: host.to_owned(), port: Some(port), path: path.map(str::to_owned) })
        };
        let [inside, out] = access.rules.as_slice() else { panic!("{access:?}") };
        assert_eq!((&*inside.breaker, &*inside.rule, inside.list), ("ops/b", "in", AccessList::Allow));
        let urls = [parts(Some(Scheme::Https), "a", 443, Some("/v1/*")), parts(None, "b", 8080, None)];
        assert_eq!((&*inside.urls, &*inside.methods), (&urls[..], &["*".to_owned()][..]));
        assert_eq!(
            (&*out.rule, out.list, &*out.methods),
            ("out", AccessList::Deny, &["POST", "PUT"].map(str::to_owned)[..])
        );
        let [UrlMatch::Regex(regex)] = out.urls.as_slice() else { panic!("{out:?}") };
        assert!(regex.contains("[0-9]") || regex.contains("?-u"), "{regex}: digits are ASCII, as in Go");
        assert_eq!((access.ports, access.regexes), ([80, 443, 8080].into(), 1));
    }

    #[test]
    fn a_content_without_port_matches_on_those_of_its_rule_only() {
        let ports = |access: Access| {
            let urls = access.rules.into_iter().flat_map(|rule| rule.urls);
            let port = |url| if let UrlMatch::Parts(parts) = url { parts.port } else { None };
            urls.filter_map(port).collect::<Vec<_>>()
        };
        assert_eq!(ports(normal("a, 'b:1'", "GET", "")), [80, 443, 1]);
        assert_eq!(ports(normal("a, 'http://b'", "GET", ", ports: [5, 4]")), [5, 4, 80]);
    }

    #[test]
    fn rules_that_ask_for_what_tls_hides_are_named() {
        for (contents, methods, is_hidden) in [
            ("'http://a/v1'", "GET", false),
            ("a, 'https://b/*'", "'*'", false),
            ("'http://a/v1', 'a/v1'", "'*'", true),
            ("'https://a/'", "'*'", true),
            ("a", "GET", true),
        ] {
            assert_eq!(normal(contents, methods, "").hidden, vec!["a"; usize::from(is_hidden)], "{contents} {methods}");
        }
        for (content, is_hidden) in [("https://a/v1", true), (".*", true), ("http://a/v1", false)] {
            let regexp = format!(
                "[{{name: a, interceptType: Whitelist, contentType: Regexp, contents: ['{content}'], methods: ['*']}}]"
            );
            assert_eq!(read(&regexp).hidden, vec!["a"; usize::from(is_hidden)], "{content}");
        }
    }
}
