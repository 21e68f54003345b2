//! Validates what circuit breakers say of other servers than the API server.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{CircuitBreakerSpec, ContentType, RestRule, TrafficInterceptRule};
use ctrlmesh_common::policy::egress::{ANY, MAX_PORTS, UrlParts};
use ctrlmesh_common::policy::fault::{MAX_REGEXES, whole_match};

use super::{Report, regular_expression};

mod url_content;

use url_content::PROXY_PORTS;
pub use url_content::parse as parse_content;

const FIELD: &str = "spec.trafficInterceptRules";

/// What a URL has to look like.
const FORM: &str = "[http://|https://]HOST[:PORT][/PATH]";

/// The ports of what names none.
const DEFAULT_PORTS: [u16; 2] = [80, 443];

pub(super) fn check(spec: &CircuitBreakerSpec, report: &mut Report) {
    let rules = &spec.traffic_intercept_rules;
    for (at, rule) in rules.iter().enumerate() {
        check_rule(&format!("{FIELD}[{at}]"), rule, report);
    }
    let limited = spec.rate_limitings.iter().flat_map(|limiting| &limiting.rest_rules).filter_map(rest_url);
    let ports: BTreeSet<u16> = rules.iter().flat_map(rule_ports).chain(limited.filter_map(|url| url.port)).collect();
    if ports.len() > MAX_PORTS {
        let count = ports.len();
        let message = format!("and restRules name {count} ports; at most {MAX_PORTS} are allowed in all together");
        report.error(FIELD, message);
    }
    let of_type = rules.iter().filter(|rule| rule.content_type == ContentType::Regexp);
    let regexes: usize = of_type.map(|rule| rule.contents.len()).sum();
    if regexes > MAX_REGEXES {
        let message = format!("have {regexes} regular expressions; at most {MAX_REGEXES} are allowed in all");
        report.error(FIELD, message);
    }
}

/// Checks the restRules of a limit.
pub(super) fn check_rest(field: &str, rules: &[RestRule], report: &mut Report) {
    // Of URLs of another scheme, or of none, the schema's own check says what is wrong.
    let has_scheme = |rule: &RestRule| ["http://", "https://"].iter().any(|scheme| rule.url.starts_with(scheme));
    for (at, rule) in rules.iter().enumerate().filter(|(_, rule)| has_scheme(rule)) {
        check_url(&format!("{field}[{at}].url"), &rule.url, report);
    }
}

/// Refuses ports whose connections do not go through the proxy.
pub(super) fn check_ports(field: &str, ports: &[u16], report: &mut Report) {
    for (at, port) in ports.iter().enumerate().filter(|(_, port)| PROXY_PORTS.contains(port)) {
        report.error(format!("{field}[{at}]"), format!("{port} is not allowed; the proxy itself listens there"));
    }
}

/// The requests that a valid restRule names. The schema wants a scheme, so there is a port.
pub fn rest_url(rule: &RestRule) -> Option<UrlParts> {
    parse_content(&rule.url).ok()
}

/// The ports of the connections that `rule` looks at.
pub fn rule_ports(rule: &TrafficInterceptRule) -> BTreeSet<u16> {
    match rule.content_type {
        ContentType::Normal => {
            let urls = rule.contents.iter().filter_map(|content| parse_content(content).ok());
            urls.flat_map(|url| content_ports(&url, rule)).collect()
        }
        ContentType::Regexp => unnamed_ports(rule).into_iter().collect(),
    }
}

/// The ports of one content of `rule`.
pub fn content_ports(url: &UrlParts, rule: &TrafficInterceptRule) -> Vec<u16> {
    url.port.map_or_else(|| unnamed_ports(rule), |port| vec![port])
}

/// The ports of contents that name none.
fn unnamed_ports(rule: &TrafficInterceptRule) -> Vec<u16> {
    if rule.ports.is_empty() { DEFAULT_PORTS.to_vec() } else { rule.ports.clone() }
}

fn check_rule(field: &str, rule: &TrafficInterceptRule, report: &mut Report) {
    for (at, content) in rule.contents.iter().enumerate() {
        let field = format!("{field}.contents[{at}]");
        match rule.content_type {
            ContentType::Normal => check_url(&field, content, report),
            ContentType::Regexp => check_regexp(&field, content, report),
        }
    }
    if rule.methods.len() > 1 && rule.methods.iter().any(|method| method == ANY) {
        report.error(format!("{field}.methods"), "\"*\" is every method, and cannot be beside others");
    }
    check_ports(&format!("{field}.ports"), &rule.ports, report);
    let names_port = |content: &String| parse_content(content).is_ok_and(|url| url.port.is_some());
    if rule.content_type == ContentType::Normal && !rule.ports.is_empty() && rule.contents.iter().all(names_port) {
        report.warning(format!("{field}.ports"), "is not used: every content names its scheme or its port");
    }
}

fn check_url(field: &str, content: &str, report: &mut Report) {
    if let Err(error) = parse_content(content) {
        let message = format!("{content:?} is not of the form {FORM}: {error}");
        report.error(field, message);
    }
}

fn check_regexp(field: &str, content: &str, report: &mut Report) {
    let compiled = regular_expression(field, content, report);
    // As the proxies compile it: they refuse the whole policy otherwise.
    if let Some(Err(error)) = compiled.map(|regex| whole_match(regex.as_str())) {
        report.error(field, format!("is too large or too deep for the proxies: {error}"));
    }
}

#[cfg(test)]
mod tests;
