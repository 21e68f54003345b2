//! May this resource be? What the schema cannot see, and, because a webhook must not trust it, what it can.
//!
//! Pure: takes the resource and those around it, gives every problem. A problem names its field and says what is
//! allowed.

use std::fmt;

use ctrlmesh_common::api::{LabelSelector, ShardingConfig, ShardingConfigSpec};
use ctrlmesh_common::names;
use ctrlmesh_common::selector::{Labels, RequirementError, Selector, check_value};

mod limits;
mod overlap;
mod root;

/// What is wrong with one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field, as `spec.limits[0].selector`.
    pub field: String,
    /// What is wrong with it and what is allowed.
    pub message: String,
}

/// Everything that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Reasons to refuse the resource.
    pub errors: Vec<Problem>,
    /// What is merely suspicious.
    pub warnings: Vec<Problem>,
}

/// A pod of the resource's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLabels {
    /// The pod's name.
    pub name: String,
    /// The pod's labels.
    pub labels: Labels,
}

/// Checks `config` by itself, beside the other `ShardingConfig`s of its namespace, and against the pods there (`None`
/// where they are not known).
///
/// `others` may contain an earlier state of `config` itself; it is passed over.
pub fn sharding_config(
    config: &ShardingConfig,
    others: &[ShardingConfig],
    pods: Option<&[PodLabels]>,
) -> Report {
    let mut report = Report::default();
    name(config, &mut report);
    spec(&config.spec, &mut report);
    if report.errors.is_empty() && config.spec.root.is_none() {
        let others: Vec<&ShardingConfig> =
            others.iter().filter(|other| other.metadata.name != config.metadata.name).collect();
        overlap::with_others(config, &others, &mut report);
        if let Some(pods) = pods {
            overlap::of_pods(config, &others, pods, &mut report);
        }
    }
    report
}

/// Checks a change of `old` to `new`: what is immutable has to stay.
pub fn change(old: &ShardingConfig, new: &ShardingConfig) -> Report {
    let mut report = Report::default();
    if old.spec.selector != new.spec.selector {
        report.error("spec.selector", "is immutable. Delete the ShardingConfig and create another");
    }
    if old.spec.root.is_some() != new.spec.root.is_some() {
        report.error(
            "spec.root",
            "can be neither added nor removed. Delete the ShardingConfig and create another",
        );
    }
    report
}

// === impl Problem ===

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.field, self.message)
    }
}

// === impl Report ===

impl Report {
    fn error(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.errors.push(Problem { field: field.into(), message: message.into() });
    }

    fn warning(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(Problem { field: field.into(), message: message.into() });
    }
}

/// Pods carry the name of their shard, and shards that of their root, as a label.
fn name(config: &ShardingConfig, report: &mut Report) {
    if let Some(name) = &config.metadata.name
        && check_value(name).is_err()
    {
        report.error(
            "metadata.name",
            "must be at most 63 characters, because it is the value of a label",
        );
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
    if let Some(webhook) = &spec.webhook {
        if webhook.cert_dir.is_empty() {
            report.error(
                "spec.webhook.certDir",
                "is empty; it must be the folder of the webhook's certificate",
            );
        }
        if !(1..=65535).contains(&webhook.port) {
            report.error(
                "spec.webhook.port",
                format!("{} is no TCP port; allowed are 1 to 65535", webhook.port),
            );
        }
    }
    match (&spec.root, &spec.selector) {
        (Some(_), Some(_)) => {
            report.warning("spec.selector", "is ignored, because a root owns no pods itself");
        }
        (Some(_), None) => {}
        (None, Some(selector)) => required_selector("spec.selector", selector, report),
        (None, None) => report.error("spec.selector", "is required, unless root is set"),
    }
    match &spec.root {
        Some(root) => root::check(root, report),
        None if spec.limits.is_empty() => {
            report.error("spec.limits", "at least one is required, unless root is set");
        }
        None => {}
    }
    limits::check(&spec.limits, report);
}

/// Checks a selector that has to restrict something.
fn required_selector(field: &str, selector: &LabelSelector, report: &mut Report) {
    if selector.is_empty() {
        report
            .error(field, "must have at least one requirement in matchLabels or matchExpressions");
    }
    parsed(field, selector, report);
}

/// The selector, where it is one; else the problem is reported.
fn parsed(field: &str, selector: &LabelSelector, report: &mut Report) -> Option<Selector> {
    let invalid = |error: RequirementError| match error {
        RequirementError::Key(error) => error.to_string(),
        RequirementError::Value(error) => error.to_string(),
        RequirementError::NoValues | RequirementError::UnwantedValues => error.to_string(),
    };
    match Selector::try_from(selector) {
        Ok(parsed) if contradicts_itself(&parsed) => {
            report.error(field, "matches nothing: its requirements contradict each other");
            None
        }
        Ok(parsed) => Some(parsed),
        Err(error) => {
            report.error(field, invalid(error));
            None
        }
    }
}

fn contradicts_itself(selector: &Selector) -> bool {
    !selector.overlaps(&Selector::everything())
}

#[cfg(test)]
mod tests;
