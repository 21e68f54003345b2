//! Reports what happens to versions on trial, in events.

use ctrlmesh_common::api::{CheckVerdict, RolloutCheck, RolloutStatus, Trial, TrialPhase};

use super::EventNote;

/// `before` is what the status says, `after` what is to be written.
pub(super) fn events(before: Option<&RolloutStatus>, after: Option<&RolloutStatus>) -> Vec<EventNote> {
    let (Some(before), Some(after)) = (before, after) else { return Vec::new() };
    let mut events: Vec<EventNote> = check(before, after).into_iter().collect();
    let was = before.trial.as_ref();
    events.extend(match &after.trial {
        Some(trial) => changed(was.filter(|was| was.revision == trial.revision), trial),
        None => ended(was, after),
    });
    events
}

/// A check with another result than the one before it in the same step, or that failed.
fn check(before: &RolloutStatus, after: &RolloutStatus) -> Option<EventNote> {
    let last = before.checks.first();
    let newest = after.checks.first().filter(|newest| last != Some(*newest))?;
    let is_same = |last: &RolloutCheck| {
        last.verdict == newest.verdict && last.revision == newest.revision && last.step == newest.step
    };
    if newest.verdict != CheckVerdict::Failed && last.is_some_and(is_same) {
        return None;
    }
    let reason = match newest.verdict {
        CheckVerdict::Passed => "CheckPassed",
        CheckVerdict::Failed => "CheckFailed",
        CheckVerdict::Inconclusive => "CheckInconclusive",
    };
    let message = format!("revision {}, step {}: {}", newest.revision, newest.step, newest.message);
    Some(note(newest.verdict == CheckVerdict::Failed, reason, message))
}

fn changed(was: Option<&Trial>, trial: &Trial) -> Option<EventNote> {
    if was.is_some_and(|was| was.phase == trial.phase && was.step == trial.step) {
        return None;
    }
    let message = format!("revision {}: {}", trial.revision, trial.message);
    Some(match trial.phase {
        TrialPhase::Starting => note(false, "TrialStarted", message),
        TrialPhase::Analysing => note(false, "TrialStep", message),
        TrialPhase::Waiting => note(false, "TrialWaiting", message),
        TrialPhase::Promoting => note(false, "Promoting", message),
        TrialPhase::Held => note(true, "Held", message),
        TrialPhase::RollingBack => note(true, "RollingBack", message),
    })
}

fn ended(was: Option<&Trial>, after: &RolloutStatus) -> Option<EventNote> {
    let was = was?;
    let (revision, promoted) = (&was.revision, &after.promoted);
    Some(if revision == promoted {
        note(false, "Promoted", format!("revision {revision} owns everything"))
    } else {
        note(
            false,
            "TrialEnded",
            format!("revision {revision} has no pod any more: revision {promoted} owns everything"),
        )
    })
}

fn note(warning: bool, reason: &str, message: String) -> EventNote {
    EventNote { warning, reason: reason.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn status(trial: Option<(TrialPhase, i32)>, checks: usize) -> RolloutStatus {
        let at = Time(Timestamp::UNIX_EPOCH);
        let trial = trial.map(|(phase, step)| Trial {
            revision: "new".to_owned(),
            phase,
            step,
            shadow: false,
            slots: Vec::new(),
            namespaces: Vec::new(),
            step_started_at: at.clone(),
            passed: 0,
            failed: 0,
            alone_since: None,
            message: "why".to_owned(),
        });
        let check = |number: usize| RolloutCheck {
            revision: "new".to_owned(),
            step: 1,
            verdict: CheckVerdict::Failed,
            message: format!("check {number}"),
            at: at.clone(),
        };
        let checks = (0..checks).rev().map(check).collect();
        RolloutStatus { promoted: "old".to_owned(), trial, checks, ..RolloutStatus::default() }
    }

    #[test]
    fn each_change_of_a_trial_is_told_once() {
        let told = |before: &RolloutStatus, after: &RolloutStatus| -> Vec<String> {
            events(Some(before), Some(after)).into_iter().map(|one| format!("{} {}", one.reason, one.message)).collect()
        };
        let idle = status(None, 0);
        let first = status(Some((TrialPhase::Analysing, 1)), 0);
        assert_eq!(told(&idle, &first), ["TrialStep revision new: why"]);
        assert_eq!(told(&first, &first), [""; 0]);
        let failed = status(Some((TrialPhase::RollingBack, 1)), 1);
        assert_eq!(
            told(&first, &failed),
            ["CheckFailed revision new, step 1: check 0", "RollingBack revision new: why"]
        );
        assert_eq!(
            told(&failed, &status(None, 1)),
            ["TrialEnded revision new has no pod any more: revision old owns everything"]
        );
        let promoted = RolloutStatus { promoted: "new".to_owned(), ..status(None, 0) };
        assert_eq!(told(&first, &promoted), ["Promoted revision new owns everything"]);
    }
}
