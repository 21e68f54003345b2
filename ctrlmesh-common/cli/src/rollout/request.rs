//! Chooses the revision that a command is about, and makes the annotation that asks for it.
//!
//! Pure.

use ctrlmesh_common::api::{RolloutStatus, ShardingConfig, Trial, TrialPhase};
use ctrlmesh_common::names::annotation;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::error::RolloutError;

/// What somebody wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Promote,
    PromoteFull,
    Abort,
}

impl Verb {
    fn word(self) -> &'static str {
        match self {
            Self::Promote => "promote",
            Self::PromoteFull => "promote-full",
            Self::Abort => "abort",
        }
    }
}

/// The status of a root with a rollout.
pub(super) fn status(root: &ShardingConfig) -> Result<&RolloutStatus, RolloutError> {
    let name = root.name_any();
    let Some(rule) = &root.spec.root else { return Err(RolloutError::NoRoot { name }) };
    if rule.rollout.is_none() {
        return Err(RolloutError::NoRollout { name });
    }
    let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
    status.ok_or(RolloutError::NoStatus { name })
}

/// The revision that `verb` is about: the one on trial, unless `wanted` names another.
pub(super) fn revision(verb: Verb, root: &ShardingConfig, wanted: Option<&str>) -> Result<String, RolloutError> {
    let status = status(root)?;
    let revision = match (wanted, &status.trial) {
        (Some(wanted), _) => wanted,
        (None, Some(trial)) => &trial.revision,
        (None, None) => return Err(without_trial(verb, root, status)),
    };
    if let Some(trial) = status.trial.as_ref().filter(|trial| trial.revision == revision) {
        return of_trial(verb, trial);
    }
    let is_rejected = status.rejected.iter().any(|rejected| rejected.revision == revision);
    let revision = revision.to_owned();
    match verb {
        Verb::Promote if is_rejected => Ok(revision),
        _ if is_rejected => Err(RolloutError::NotOnTrial { revision }),
        _ if revision == status.promoted => Err(RolloutError::Promoted { revision }),
        _ => Err(RolloutError::UnknownRevision { revision, known: known(status) }),
    }
}

/// The value of the annotation. The time makes it differ from the last one, which would not be carried out again.
pub(super) fn value(verb: Verb, revision: &str, now: Timestamp) -> String {
    format!("{} {revision} {now:.3}", verb.word())
}

/// The merge patch of the root.
pub(super) fn patch(value: &str) -> Value {
    json!({"metadata": {"annotations": {annotation::ROLLOUT: value}}})
}

/// Whether the manager has carried out the annotation with this value.
pub(super) fn is_handled(root: &ShardingConfig, value: &str) -> bool {
    let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
    status.and_then(|status| status.handled.as_deref()) == Some(value)
}

fn without_trial(verb: Verb, root: &ShardingConfig, status: &RolloutStatus) -> RolloutError {
    let (name, rejected) = (root.name_any(), known(status));
    if verb != Verb::Promote || rejected.is_empty() {
        return RolloutError::NoTrial { name };
    }
    RolloutError::NameRejected { name, rejected }
}

/// A revision that is in no step yet is not promoted: its pods do not run, or those of a third revision still do.
fn of_trial(verb: Verb, trial: &Trial) -> Result<String, RolloutError> {
    let revision = trial.revision.clone();
    if verb != Verb::Abort && trial.phase == TrialPhase::Starting {
        return Err(RolloutError::NotStarted { revision, message: trial.message.clone() });
    }
    if trial.phase == TrialPhase::RollingBack {
        return Err(RolloutError::RollingBack { revision });
    }
    Ok(revision)
}

fn known(status: &RolloutStatus) -> Vec<String> {
    let trial = status.trial.iter().map(|trial| trial.revision.clone());
    let rejected = status.rejected.iter().map(|rejected| rejected.revision.clone());
    let mut known: Vec<String> = Vec::new();
    for revision in trial.chain(rejected) {
        if !known.contains(&revision) {
            known.push(revision);
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::rollout;

    use super::*;
    use crate::rollout::samples::{root, trial};

    fn chosen(verb: Verb, status: Value, wanted: Option<&str>) -> Result<String, String> {
        revision(verb, &root(Some(status)), wanted).map_err(|error| error.to_string())
    }

    #[test]
    fn the_revision_is_that_of_the_trial() {
        for verb in [Verb::Promote, Verb::PromoteFull, Verb::Abort] {
            assert_eq!(chosen(verb, trial("Analysing"), None).as_deref(), Ok("new"));
        }
        assert_eq!(chosen(Verb::Promote, trial("Analysing"), Some("bad")).as_deref(), Ok("bad"), "it failed before");
        assert_eq!(chosen(Verb::Abort, trial("Starting"), None).as_deref(), Ok("new"));
    }

    #[test]
    fn what_cannot_be_promoted_says_what_can() {
        let idle = || json!({"promoted": "old", "rejected": trial("Held")["rejected"]});
        for (verb, status, wanted, says) in [
            (Verb::Promote, idle(), None, "these have failed, one of which --revision may name: bad"),
            (Verb::Abort, idle(), None, "root \"web\" tries no revision, and none has failed"),
            (Verb::Promote, json!({"promoted": "old"}), None, "change the pod template of its workload first"),
            (Verb::Promote, idle(), Some("old"), "revision \"old\" is promoted already"),
            (Verb::Promote, trial("Held"), Some("what"), "--revision may name one of: new, bad"),
            (Verb::PromoteFull, idle(), Some("bad"), "leave --full out"),
            (Verb::Promote, trial("Starting"), None, "revision \"new\" is in no step yet, because why"),
            (Verb::PromoteFull, trial("Starting"), None, "wait for phase Analysing"),
        ] {
            let error = chosen(verb, status, wanted).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(chosen(Verb::Promote, idle(), Some("bad")).as_deref(), Ok("bad"));
    }

    #[test]
    fn without_a_rollout_the_error_says_what_to_add() {
        let mut without = root(None);
        let error = |root: &ShardingConfig| status(root).unwrap_err().to_string();
        assert!(error(&without).contains("has no status.rollout yet"));
        without.spec.root.as_mut().unwrap().rollout = None;
        assert!(error(&without).contains("add `rollout: {}`"));
        without.spec.root = None;
        assert!(error(&without).contains("is no root"));
    }

    #[test]
    fn the_manager_reads_what_is_written_and_each_value_is_new() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let text = value(Verb::PromoteFull, "new", at(1_800_000_000));
        assert_eq!(text, "promote-full new 2027-01-15T08:00:00.000Z");
        assert_ne!(text, value(Verb::PromoteFull, "new", at(1_800_000_001)));
        let read = |verb| rollout::Command::parse(&value(verb, "new", at(1)));
        assert_eq!(read(Verb::Promote), Some(rollout::Command::Promote("new".to_owned())));
        assert_eq!(read(Verb::PromoteFull), Some(rollout::Command::PromoteFull("new".to_owned())));
        assert_eq!(read(Verb::Abort), Some(rollout::Command::Abort("new".to_owned())));
        let patched = patch(&text);
        assert_eq!(patched["metadata"]["annotations"]["ctrlmesh.kusionstack.io/rollout"], text);
    }

    #[test]
    fn a_command_is_handled_once_the_status_names_it() {
        let mut status = trial("Analysing");
        assert!(!is_handled(&root(Some(status.clone())), "abort new 1"));
        status["handled"] = json!("abort new 1");
        assert!(is_handled(&root(Some(status)), "abort new 1"));
    }
}
