//! The conditions of a root with a rollout.

use ctrlmesh_common::api::{RolloutStatus, ShardingConfig, TrialPhase};

use crate::cluster::plan::Plan;
use crate::rules::fenced::is_fenced;
use crate::rules::object_name::namespace;
use crate::status::finding::{Finding, finding};

const PROGRESSING: &str = "Progressing";
const ANALYSING: &str = "Analysing";
const PROMOTED: &str = "Promoted";
const ROLLED_BACK: &str = "RolledBack";

/// None where the root has no rollout.
pub(super) fn findings(
    root: &ShardingConfig,
    status: Option<&RolloutStatus>,
    plan: &Plan,
) -> Vec<(&'static str, Finding)> {
    let Some(rule) = root.spec.root.as_ref().filter(|rule| rule.rollout.is_some() && is_fenced(rule)) else {
        return Vec::new();
    };
    let name = |workload: &String| format!("{}/{workload}", namespace(&root.metadata));
    let snapshot = &plan.snapshot;
    let deployment = rule.target_deployment.as_ref().and_then(|one| snapshot.deployment_obstacles.get(&name(one)));
    let obstacle =
        deployment.or_else(|| rule.target_stateful_set.as_ref().and_then(|one| snapshot.set_obstacles.get(&name(one))));
    let Some(status) = status else {
        return vec![(PROGRESSING, progressing(None, obstacle))];
    };
    let trial = status.trial.as_ref();
    let promoted = match trial {
        None => finding(true, "Promoted", format!("revision {} owns everything", status.promoted)),
        Some(trial) => {
            let message = format!("revision {} is promoted, and {} is tried", status.promoted, trial.revision);
            finding(false, "OnTrial", message)
        }
    };
    let last = trial.and_then(|trial| status.checks.iter().find(|check| check.revision == trial.revision));
    let analysing = match (trial, last) {
        (Some(trial), Some(check)) if is_analysed(trial.phase) => {
            finding(true, "Checked", format!("{:?}: {}", check.verdict, check.message))
        }
        (Some(trial), None) if is_analysed(trial.phase) => finding(true, "Pending", "the first check is not due yet"),
        _ => finding(false, "Idle", "nothing is compared"),
    };
    let rejected = status.rejected.first().filter(|rejected| {
        let is_it = trial.is_some_and(|trial| trial.revision == rejected.revision);
        is_it || trial.is_none() && rejected.revision != status.promoted
    });
    let rolled_back = match rejected {
        Some(rejected) => {
            finding(true, "Failed", format!("revision {} failed: {}", rejected.revision, rejected.message))
        }
        None => finding(false, "NotNeeded", "the last version that was tried did not fail"),
    };
    vec![
        (PROGRESSING, progressing(Some(status), obstacle)),
        (ANALYSING, analysing),
        (PROMOTED, promoted),
        (ROLLED_BACK, rolled_back),
    ]
}

fn progressing(status: Option<&RolloutStatus>, obstacle: Option<&String>) -> Finding {
    if let Some(obstacle) = obstacle {
        return finding(false, "StrategyCannotHold", format!("new versions cannot be held back: {obstacle}"));
    }
    let Some(status) = status else { return finding(false, "NoPods", "no pod of the workload is enrolled yet") };
    let Some(trial) = &status.trial else { return finding(false, "Idle", "no new version is tried") };
    let message = format!("revision {}: {}", trial.revision, trial.message);
    match trial.phase {
        TrialPhase::Starting => finding(true, "Starting", message),
        TrialPhase::Analysing => finding(true, "Analysing", message),
        TrialPhase::Waiting => finding(true, "Waiting", message),
        TrialPhase::Promoting => finding(true, "Promoting", message),
        TrialPhase::Held => finding(false, "Held", message),
        TrialPhase::RollingBack => finding(false, "RollingBack", message),
    }
}

fn is_analysed(phase: TrialPhase) -> bool {
    matches!(phase, TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting)
}
