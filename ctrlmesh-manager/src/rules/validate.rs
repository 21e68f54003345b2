//! Validates our resources.
//!
//! Pure: takes a resource and those beside it, gives every problem. A problem names its field and what is
//! allowed. The schema is checked too, because a webhook cannot rely on it.

use std::fmt;

use ctrlmesh_common::api::{
    self, CircuitBreaker, Expression, FaultInjection, LabelSelector, ManagerState, ShardingConfig, ShardingConfigSpec,
};
use ctrlmesh_common::names;
use ctrlmesh_common::selector::{RequirementError, Selector};
use regex::Regex;

use crate::rules::pod::Member;

mod regular_expression;
mod schema;
mod limits;
mod clusters;
mod overlap;
mod unserved;
mod rollout;
mod root;
mod access;
mod breaker;
mod fault;
mod metadata;
mod manifests;

pub use access::{content_ports, parse_content, rest_url, rule_ports};
pub use manifests::{Verdict, manifests, manifests_and};
pub use overlap::superseded;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// A path such as `spec.limits[0].selector`.
    pub field: String,
    /// What is wrong, and what is allowed.
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The resource is refused.
    pub errors: Vec<Problem>,
    pub warnings: Vec<Problem>,
}

/// Checks `config` beside the others of its namespace and the pods there (`None` if unknown).
///
/// `others` may contain an earlier state of `config`.
pub fn sharding_config(config: &ShardingConfig, others: &[ShardingConfig], pods: Option<&[&Member]>) -> Report {
    beside_others(config, &beside(config, others), pods)
}

/// Warns of hashes that neither `config`, a manual shard, nor another shard of its operator has. `keys` are
/// further hash labels.
pub fn unowned(config: &ShardingConfig, others: &[ShardingConfig], keys: &[&str]) -> Report {
    unowned_beside(config, &beside(config, others), keys)
}

/// As [`unowned`], if `config` is not in `others`.
fn unowned_beside(config: &ShardingConfig, others: &[&ShardingConfig], keys: &[&str]) -> Report {
    let mut report = Report::default();
    overlap::hashes(config, &of_namespace(config, others), keys, &mut report);
    report
}

/// Without earlier states of `config`.
fn beside<'a>(config: &ShardingConfig, others: &'a [ShardingConfig]) -> Vec<&'a ShardingConfig> {
    let beside = others.iter().filter(|other| other.metadata.name != config.metadata.name);
    beside.collect()
}

fn of_namespace<'a>(config: &ShardingConfig, others: &[&'a ShardingConfig]) -> Vec<&'a ShardingConfig> {
    let near = others.iter().copied();
    near.filter(|other| other.metadata.namespace == config.metadata.namespace).collect()
}

/// As [`sharding_config`], if `config` is not in `others`.
fn beside_others(config: &ShardingConfig, others: &[&ShardingConfig], pods: Option<&[&Member]>) -> Report {
    let mut report = Report::default();
    name(config, &mut report);
    spec(&config.spec, &mut report);
    lock(config, &mut report);
    unserved::check_wildcard(&config.spec, &mut report);
    schema::of_spec("ShardingConfig", &config.spec, &mut report);
    if report.errors.is_empty() {
        let others = of_namespace(config, others);
        overlap::with_others(config, &others, &mut report);
        if config.spec.root.is_none() {
            overlap::of_selectors(config, &others, &mut report);
        }
        if let Some(pods) = pods.filter(|_| config.spec.root.is_none() && report.errors.is_empty()) {
            overlap::of_pods(config, &others, pods, &mut report);
        }
        if report.errors.is_empty() {
            overlap::of_targets(config, &others, pods.unwrap_or_default(), &mut report);
        }
    }
    report
}

pub fn circuit_breaker(breaker: &CircuitBreaker) -> Report {
    let mut report = Report::default();
    breaker::check(&breaker.spec, &mut report);
    schema::of_spec("CircuitBreaker", &breaker.spec, &mut report);
    report
}

/// Refuses limits by share on resources that are not labelled. `labels` takes group and plural.
pub fn counted(breaker: &CircuitBreaker, labels: &dyn Fn(&str, &str) -> bool) -> Report {
    let mut report = Report::default();
    breaker::check_counted(&breaker.spec, labels, &mut report);
    report
}

pub fn fault_injection(injection: &FaultInjection) -> Report {
    let mut report = Report::default();
    fault::check(&injection.spec, &mut report);
    schema::of_spec("FaultInjection", &injection.spec, &mut report);
    report
}

pub fn manager_state(state: &ManagerState) -> Report {
    let mut report = Report::default();
    if state.metadata.name.as_deref() != Some(names::MANAGER_STATE) {
        let message = format!("must be {}; there is one ManagerState", names::MANAGER_STATE);
        report.error("metadata.name", message);
    }
    report
}

/// Warns of resources that are not served. `serves` takes group and plural.
pub fn served(config: &ShardingConfig, serves: &dyn Fn(&str, &str) -> bool) -> Report {
    let mut report = Report::default();
    unserved::check(&config.spec, serves, &mut report);
    report
}

/// Warns of resources that are not labelled, if a shard selects by one of the `keys`. `labels` takes group
/// and plural.
pub fn labelled(config: &ShardingConfig, keys: &[&str], labels: &dyn Fn(&str, &str) -> bool) -> Report {
    let mut report = Report::default();
    unserved::check_labelled(&config.spec, keys, labels, &mut report);
    report
}

/// Refuses changes of immutable fields.
pub fn change(old: &ShardingConfig, new: &ShardingConfig) -> Report {
    let mut report = Report::default();
    if old.spec.selector != new.spec.selector {
        report.error("spec.selector", "is immutable. Delete the ShardingConfig and create another");
    }
    if old.spec.root.is_some() != new.spec.root.is_some() {
        report.error("spec.root", "can be neither added nor removed. Delete the ShardingConfig and create another");
    }
    clusters::check_change(&old.spec, &new.spec, &mut report);
    report
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.field, self.message)
    }
}

impl Report {
    fn error(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.errors.push(Problem { field: field.into(), message: message.into() });
    }

    fn warning(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(Problem { field: field.into(), message: message.into() });
    }
}

/// The name is the value of a label.
fn name(config: &ShardingConfig, report: &mut Report) {
    // The API server checks the rest of the name.
    if config.metadata.name.as_ref().is_some_and(|name| name.len() > names::MAX_SHARD_BYTES) {
        report.error("metadata.name", "must be at most 63 characters, because it is the value of a label");
    }
}

fn spec(spec: &ShardingConfigSpec, report: &mut Report) {
    if let Some(controller) = &spec.controller
        && !names::is_dns_subdomain(&controller.leader_election_name)
    {
        report.error(
            "spec.controller.leaderElectionName",
            "must be the name of the operator's lock, a lower-case DNS subdomain",
        );
    }
    if spec.webhook.as_ref().is_some_and(|webhook| webhook.certificate() == webhook.key()) {
        let message = "must be another file than certName; without a name they are tls.key and tls.crt";
        report.error("spec.webhook.keyName", message);
    }
    match (&spec.root, &spec.selector) {
        (Some(_), Some(selector)) => {
            report.warning("spec.selector", "is ignored, because a root owns no pods itself");
            parsed("spec.selector", selector, report);
        }
        (Some(_), None) => {}
        (None, Some(selector)) => required_selector("spec.selector", selector, report),
        (None, None) => report.error("spec.selector", "is required, unless root is set"),
    }
    if spec.root.is_some() && !spec.limits.is_empty() {
        let message = "is ignored in a root, whose shards divide what root.resourceSelector names";
        report.warning("spec.limits", message);
    }
    match &spec.root {
        Some(root) => root::check(root, spec.controller.is_some(), report),
        None if spec.limits.is_empty() => {
            report.error("spec.limits", "at least one is required, unless root is set");
        }
        None => {}
    }
    clusters::check_of_shard(spec, report);
    limits::check(&spec.limits, report);
}

/// The lock of each shard must have a valid name.
fn lock(config: &ShardingConfig, report: &mut Report) {
    let (Some(controller), Some(name)) = (&config.spec.controller, &config.metadata.name) else {
        return;
    };
    let lock = names::lock(&controller.leader_election_name, name);
    if lock.len() > names::MAX_SUBDOMAIN_BYTES {
        report.error(
            "spec.controller.leaderElectionName",
            format!(
                "makes, with metadata.name, the name {lock:?} for the shard's own lock, of {} characters; at most {} are allowed",
                lock.len(),
                names::MAX_SUBDOMAIN_BYTES
            ),
        );
    }
}

/// In Go's syntax, and not zero.
fn positive_duration(field: &str, text: &str, report: &mut Report) {
    if api::parse_duration(text).is_none_or(|duration| duration.is_zero()) {
        report.error(field, format!("{text:?} must be a duration greater than zero, such as 500ms, 10s or 1h30m"));
    }
}

/// What the proxies are to match: it means in the crate `regex` what `text` means in Go.
pub fn translated(text: &str) -> Option<String> {
    Some(regular_expression::compile(text).ok()?.as_str().to_owned())
}

fn regular_expression(field: &str, text: &str, report: &mut Report) -> Option<Regex> {
    let refused =
        |reason: &_| report.error(field, format!("{text:?} is no regular expression of Go's (RE2's) syntax: {reason}"));
    regular_expression::compile(text).inspect_err(refused).ok()
}

fn required_selector(field: &str, selector: &LabelSelector, report: &mut Report) {
    if selector.is_empty() {
        report.error(field, "must have at least one requirement in matchLabels or matchExpressions");
    }
    parsed(field, selector, report);
}

fn parsed(field: &str, selector: &LabelSelector, report: &mut Report) -> Option<Selector> {
    match Selector::try_from(selector) {
        Ok(parsed) if contradicts_itself(&parsed) => {
            report.error(field, "matches nothing: its requirements contradict each other");
            None
        }
        Ok(parsed) => Some(parsed),
        Err(error) => {
            let (part, message) = unreadable(selector, error);
            report.error(format!("{field}.{part}"), message);
            None
        }
    }
}

/// The part of `selector` that causes `error`, and the message.
fn unreadable(selector: &LabelSelector, error: RequirementError) -> (String, String) {
    let alone = |expression: &Expression| {
        let match_expressions = vec![expression.clone()];
        LabelSelector { match_expressions, ..LabelSelector::default() }
    };
    let labels = LabelSelector { match_expressions: Vec::new(), ..selector.clone() };
    let mut expressions = selector.match_expressions.iter();
    let at = expressions.position(|one| Selector::try_from(&alone(one)).is_err());
    let part = match at {
        Some(at) if Selector::try_from(&labels).is_ok() => format!("matchExpressions[{at}]"),
        _ => "matchLabels".to_owned(),
    };
    match error {
        RequirementError::Key(error) => (part, error.to_string()),
        RequirementError::Value(error) => (part, error.to_string()),
        RequirementError::NoValues => {
            (format!("{part}.values"), "must have at least one value with the operators In and NotIn".to_owned())
        }
        RequirementError::UnwantedValues => {
            (format!("{part}.values"), "must have no value with the operators Exists and DoesNotExist".to_owned())
        }
    }
}

fn contradicts_itself(selector: &Selector) -> bool {
    !selector.overlaps(&Selector::everything())
}

#[cfg(test)]
mod tests;
