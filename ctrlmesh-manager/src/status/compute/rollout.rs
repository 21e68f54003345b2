//! The conditions of a root with a rollout.

use std::time::Duration;

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
    let impatience = rule.target_deployment.as_ref().and_then(|one| {
        let deadline = snapshot.progress_deadlines.get(&name(one))?;
        impatience(*deadline, rule.rollout.as_ref()?.lasts()?)
    });
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
    let mut progressing = progressing(Some(status), obstacle);
    if let Some(impatience) = impatience.filter(|_| obstacle.is_none()) {
        progressing.message = format!("{}; {impatience}", progressing.message);
    }
    vec![(PROGRESSING, progressing), (ANALYSING, analysing), (PROMOTED, promoted), (ROLLED_BACK, rolled_back)]
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

/// What to say of a Deployment that has no patience for the steps. It goes on all the same.
fn impatience(deadline: i32, lasts: Duration) -> Option<String> {
    let (lasts, deadline) = (lasts.as_secs(), u64::try_from(deadline).ok()?);
    (deadline <= lasts).then(|| {
        format!(
            "the steps before the last take {lasts} s, and the Deployment says ProgressDeadlineExceeded after {deadline} s: set its spec.progressDeadlineSeconds to more"
        )
    })
}

fn is_analysed(phase: TrialPhase) -> bool {
    matches!(phase, TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting)
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{Rollout, RolloutStep};

    use super::*;

    #[test]
    fn a_deployment_without_patience_for_the_steps_is_named() {
        let by_default = Rollout::default().lasts().unwrap();
        assert_eq!(by_default, Duration::from_mins(10), "two steps of 5 min, and the last");
        let message = impatience(600, by_default).unwrap();
        assert!(message.contains("take 600 s") && message.contains("after 600 s"), "{message}");
        assert_eq!(impatience(601, by_default), None);
        let manual = RolloutStep { slots: Some(1), pause: Some("Manual".to_owned()), ..RolloutStep::default() };
        assert_eq!(Rollout { steps: vec![manual], ..Rollout::default() }.lasts(), None);
    }
}
