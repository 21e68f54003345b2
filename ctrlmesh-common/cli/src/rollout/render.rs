//! Says for people how rollouts stand.
//!
//! Pure.

use ctrlmesh_common::api::{Rollout, RolloutStatus, Root, ShadowReport, ShardingConfig, Trial, TrialPhase};
use jiff::Timestamp;
use kube::ResourceExt as _;

use crate::text::{described, duration, line, since, table, workload};

/// The condition and the reason by which the manager says that a workload cannot hold new versions back.
const CANNOT_HOLD: (&str, &str) = ("Progressing", "StrategyCannotHold");

/// One line for each root with a rollout.
pub(super) fn list(roots: &[ShardingConfig]) -> String {
    let head = ["ROOT", "PROMOTED", "TRIAL", "PHASE", "STEP", "PASSED", "FAILED", "MESSAGE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(roots.iter().filter_map(|root| Some(row(root, root.spec.root.as_ref()?))));
    table(&rows, "")
}

/// One screen about a root.
pub(super) fn screen(root: &ShardingConfig, rule: &Root, status: Option<&RolloutStatus>, now: Timestamp) -> String {
    let namespace = root.namespace().unwrap_or_default();
    let mut fields = vec![("Root", format!("{namespace}/{}, {}", root.name_any(), workload(rule)))];
    if let Some(obstacle) = obstacle(root) {
        fields.push(("Warning", obstacle));
    }
    let Some(status) = status else {
        fields.push(("Promoted", "none yet: the workload has no enrolled pod, or no manager leads".to_owned()));
        return described(&fields);
    };
    let names = if status.second { "second" } else { "first" };
    fields.push(("Promoted", format!("{}, in the shards with the {names} names", status.promoted)));
    match &status.trial {
        None => fields.push(("Trial", "none".to_owned())),
        Some(trial) => fields.extend(of_trial(trial, rule, now)),
    }
    let of_trial = |report: &&ShadowReport| status.trial.as_ref().is_some_and(|one| one.revision == report.revision);
    if let Some(report) = status.shadow.as_ref().filter(of_trial) {
        fields.push(("  Shadow", report.summary()));
    }
    described(&fields) + &checks(status, now) + &rejected(status, now)
}

/// What a revision would have written, and what differs.
pub(super) fn report(root: &ShardingConfig, report: &ShadowReport) -> String {
    let namespace = root.namespace().unwrap_or_default();
    let fields = [
        ("Root", format!("{namespace}/{}", root.name_any())),
        ("Revision", report.revision.clone()),
        ("Writes", report.summary()),
    ];
    if report.differences.is_empty() {
        return described(&fields);
    }
    let mut rows = vec![["VERB", "RESOURCE", "NAMESPACE", "NAME", "DIFFERENCE"].map(str::to_owned).to_vec()];
    for one in &report.differences {
        let or_dash = |text: &String| if text.is_empty() { "-".to_owned() } else { line(text) };
        let object = [&one.verb, &one.resource, &one.namespace, &one.name].map(or_dash).to_vec();
        let is_there = "is still there".to_owned();
        let fields = one.fields.iter().chain(Some(&is_there).filter(|_| one.fields.is_empty()));
        rows.extend(fields.map(|field| [&object[..], &[line(field)]].concat()));
    }
    format!("{}\nDifferences:\n{}", described(&fields), table(&rows, "  "))
}

/// How `revision` stands after a command, in one line.
pub(super) fn outcome(root: &ShardingConfig, status: &RolloutStatus, revision: &str) -> String {
    let steps = root.spec.root.as_ref().map_or(0, steps);
    let trial = status.trial.as_ref().filter(|trial| trial.revision == revision);
    match trial {
        Some(trial) => {
            let (phase, message) = (trial.phase, line(&trial.message));
            format!("revision {revision}: {phase:?}, step {} of {steps}: {message}\n", trial.step)
        }
        None if status.promoted == revision => format!("revision {revision} is promoted\n"),
        None if status.rejected.iter().any(|one| one.revision == revision) => {
            format!("revision {revision} is not tried, because it has failed\n")
        }
        None => format!("revision {revision} is not tried now; when it has pods, it is tried from the first step on\n"),
    }
}

fn row(root: &ShardingConfig, rule: &Root) -> Vec<String> {
    let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
    let promoted = status.map_or_else(|| "-".to_owned(), |status| status.promoted.clone());
    let mut row = vec![root.name_any(), promoted];
    let message = |default: &str| obstacle(root).unwrap_or_else(|| default.to_owned());
    let Some(trial) = status.and_then(|status| status.trial.as_ref()) else {
        row.extend(["-"; 5].map(str::to_owned));
        row.push(message(if status.is_some() { "no new version is tried" } else { "no pod is enrolled yet" }));
        return row;
    };
    row.extend([
        trial.revision.clone(),
        format!("{:?}", trial.phase),
        format!("{}/{}", trial.step, steps(rule)),
        trial.passed.to_string(),
        trial.failed.to_string(),
        message(&line(&trial.message)),
    ]);
    row
}

fn of_trial(trial: &Trial, rule: &Root, now: Timestamp) -> Vec<(&'static str, String)> {
    let owns = matches!(trial.phase, TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting);
    let lasts = if owns { lasts(trial, rule) } else { String::new() };
    let (steps, since) = (steps(rule), since(trial.step_started_at.0, now));
    let slots = match trial.phase {
        TrialPhase::Promoting => "all, pod by pod".to_owned(),
        _ if trial.slots.is_empty() => "none".to_owned(),
        _ => trial.slots.join(", "),
    };
    let mut fields = vec![
        ("Trial", trial.revision.clone()),
        ("  Phase", format!("{:?}", trial.phase)),
        ("  Step", format!("{} of {steps}, for {since}{lasts}", trial.step)),
        (if trial.shadow { "  Shadows" } else { "  Slots" }, slots),
    ];
    if !trial.namespaces.is_empty() {
        fields.push(("  Namespaces", trial.namespaces.join(", ")));
    }
    let allowed = rule.rollout.as_ref().map(Rollout::failure_limit).unwrap_or_default();
    fields.push(("  Checks", format!("{} passed, {} failed ({allowed} may fail)", trial.passed, trial.failed)));
    fields.push(("  Message", line(&trial.message)));
    fields
}

/// How long the step of the trial lasts.
fn lasts(trial: &Trial, rule: &Root) -> String {
    let all = rule.rollout.as_ref().map(Rollout::steps).unwrap_or_default();
    let step = usize::try_from(trial.step).ok().and_then(|step| all.get(step.checked_sub(1)?));
    let lasts = step.map(|step| match step.pause() {
        Some(pause) => format!("; it lasts {}", duration(pause.as_secs())),
        None => "; it lasts until somebody promotes it".to_owned(),
    });
    lasts.unwrap_or_default()
}

/// The newest first, as the status has them.
fn checks(status: &RolloutStatus, now: Timestamp) -> String {
    if status.checks.is_empty() {
        return String::new();
    }
    let head = ["AGE", "REVISION", "STEP", "VERDICT", "NUMBERS (OF THE PROMOTED REVISION)"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(status.checks.iter().map(|check| {
        let verdict = format!("{:?}", check.verdict);
        let revision = check.revision.clone();
        vec![since(check.at.0, now), revision, check.step.to_string(), verdict, line(&check.message)]
    }));
    format!("\nChecks:\n{}", table(&rows, "  "))
}

fn rejected(status: &RolloutStatus, now: Timestamp) -> String {
    if status.rejected.is_empty() {
        return String::new();
    }
    let mut rows = vec![["AGE", "REVISION", "REASON"].map(str::to_owned).to_vec()];
    let each = status.rejected.iter();
    rows.extend(each.map(|one| vec![since(one.at.0, now), one.revision.clone(), line(&one.message)]));
    format!("\nRejected:\n{}", table(&rows, "  "))
}

fn obstacle(root: &ShardingConfig) -> Option<String> {
    let conditions = root.status.iter().flat_map(|status| &status.conditions);
    let mut found = conditions.filter(|one| (one.type_.as_str(), one.reason.as_str()) == CANNOT_HOLD);
    found.next().map(|condition| line(&condition.message))
}

fn steps(rule: &Root) -> usize {
    rule.rollout.as_ref().map_or(0, |rollout| rollout.steps().len())
}

#[cfg(test)]
mod tests;
