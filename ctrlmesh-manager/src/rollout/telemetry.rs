//! Counts what comes of rollouts.
//!
//! By the statuses that are written, so that nothing counts twice. A new leader counts what follows.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{CheckVerdict, RolloutStatus, TrialPhase};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Without a trial, and in the order of [`TrialPhase`].
const PHASES: [&str; 7] = ["idle", "starting", "analysing", "waiting", "promoting", "held", "rolling_back"];

const OUTCOMES: [&str; 2] = ["promoted", "failed"];

const VERDICTS: [&str; 3] = ["passed", "failed", "inconclusive"];

/// What comes of the rollouts of all roots.
#[derive(Clone, Debug, Default)]
pub struct RolloutMetrics {
    phases: Family<PhaseLabels, Gauge>,
    checks: Family<CheckLabels, Counter>,
    ended: Family<EndLabels, Counter>,
}

/// What was last seen of each root, by `NAMESPACE/NAME`.
pub(super) type Seen = BTreeMap<String, RolloutStatus>;

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct PhaseLabels {
    root: String,
    phase: &'static str,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct CheckLabels {
    root: String,
    verdict: &'static str,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct EndLabels {
    root: String,
    outcome: &'static str,
}

impl RolloutMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "1 at the present phase of a root with a rollout, by root and phase: idle, starting, analysing, waiting, promoting, held or rolling_back; nothing on replicas that do not lead";
        registry.register("rollout_phase", help, this.phases.clone());
        let help = "Checks of versions on trial, by root and verdict: passed, failed or inconclusive";
        registry.register("rollout_checks", help, this.checks.clone());
        let help = "Versions whose trial ended, by root and outcome: promoted or failed";
        registry.register("rollout_versions", help, this.ended.clone());
        this
    }

    /// Counts what has changed since `seen`.
    pub(super) fn observe(&self, seen: &mut Seen, now: &BTreeMap<String, &RolloutStatus>) {
        seen.retain(|root, _| {
            let stays = now.contains_key(root);
            if !stays {
                self.forget(root);
            }
            stays
        });
        for (root, status) in now {
            match seen.get(root) {
                Some(before) if before == *status => continue,
                Some(before) => self.count(root, before, status),
                None => self.begin(root),
            }
            self.show(root, status);
            seen.insert(root.clone(), (*status).clone());
        }
    }

    /// This replica leads no more.
    pub(super) fn leave(&self) {
        self.phases.clear();
    }

    /// Counters are there before they count, so that the first increase is one.
    fn begin(&self, root: &str) {
        for verdict in VERDICTS {
            drop(self.checks.get_or_create(&CheckLabels { root: root.to_owned(), verdict }));
        }
        for outcome in OUTCOMES {
            drop(self.ended.get_or_create(&EndLabels { root: root.to_owned(), outcome }));
        }
    }

    fn count(&self, root: &str, before: &RolloutStatus, now: &RolloutStatus) {
        let known = before.checks.first();
        for check in now.checks.iter().take_while(|check| Some(*check) != known) {
            let labels = CheckLabels { root: root.to_owned(), verdict: verdict(check.verdict) };
            self.checks.get_or_create(&labels).inc();
        }
        let ended = |outcome| {
            self.ended.get_or_create(&EndLabels { root: root.to_owned(), outcome }).inc();
        };
        if before.promoted != now.promoted && before.trial.as_ref().is_some_and(|one| one.revision == now.promoted) {
            ended("promoted");
        }
        // One that is promoted after all is taken out of the list.
        if now.rejected.first().is_some_and(|one| !before.rejected.contains(one)) {
            ended("failed");
        }
    }

    fn show(&self, root: &str, status: &RolloutStatus) {
        let present = phase(status.trial.as_ref().map(|trial| trial.phase));
        for phase in PHASES {
            let labels = PhaseLabels { root: root.to_owned(), phase };
            self.phases.get_or_create(&labels).set(i64::from(phase == present));
        }
    }

    fn forget(&self, root: &str) {
        for phase in PHASES {
            self.phases.remove(&PhaseLabels { root: root.to_owned(), phase });
        }
        for verdict in VERDICTS {
            self.checks.remove(&CheckLabels { root: root.to_owned(), verdict });
        }
        for outcome in OUTCOMES {
            self.ended.remove(&EndLabels { root: root.to_owned(), outcome });
        }
    }
}

fn phase(phase: Option<TrialPhase>) -> &'static str {
    match phase {
        None => "idle",
        Some(TrialPhase::Starting) => "starting",
        Some(TrialPhase::Analysing) => "analysing",
        Some(TrialPhase::Waiting) => "waiting",
        Some(TrialPhase::Promoting) => "promoting",
        Some(TrialPhase::Held) => "held",
        Some(TrialPhase::RollingBack) => "rolling_back",
    }
}

fn verdict(verdict: CheckVerdict) -> &'static str {
    match verdict {
        CheckVerdict::Passed => "passed",
        CheckVerdict::Failed => "failed",
        CheckVerdict::Inconclusive => "inconclusive",
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{RejectedRevision, RolloutCheck, Trial};
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use prometheus_client::encoding::text;

    use super::*;
    use crate::metrics::PREFIX;

    const ROOT: &str = "ops/web";

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn status(promoted: &str, trial: Option<(&str, TrialPhase)>) -> RolloutStatus {
        let trial = trial.map(|(revision, phase)| Trial {
            revision: revision.to_owned(),
            phase,
            step: 1,
            shadow: false,
            slots: Vec::new(),
            namespaces: Vec::new(),
            step_started_at: at(0),
            passed: 0,
            failed: 0,
            alone_since: None,
            message: String::new(),
        });
        RolloutStatus { promoted: promoted.to_owned(), trial, ..RolloutStatus::default() }
    }

    fn check(verdict: CheckVerdict, second: i64) -> RolloutCheck {
        RolloutCheck { revision: "b".to_owned(), step: 1, verdict, message: String::new(), at: at(second) }
    }

    struct Counted {
        registry: Registry,
        metrics: RolloutMetrics,
        seen: Seen,
    }

    impl Counted {
        fn new() -> Self {
            let mut registry = Registry::with_prefix(PREFIX);
            let metrics = RolloutMetrics::register(&mut registry);
            Self { registry, metrics, seen: Seen::new() }
        }

        fn observe(&mut self, status: Option<&RolloutStatus>) {
            let now = status.map(|status| (ROOT.to_owned(), status)).into_iter().collect();
            self.metrics.observe(&mut self.seen, &now);
        }

        /// The samples that are not 0, without the prefix and the label of the root.
        fn samples(&self) -> Vec<String> {
            let mut page = String::new();
            text::encode(&mut page, &self.registry).unwrap();
            let samples = page.lines().filter(|line| !line.starts_with('#') && !line.ends_with(" 0"));
            let short = |line: &str| line.replace(r#"root="ops/web","#, "").replace("ctrlmesh_manager_rollout_", "");
            let mut samples: Vec<String> = samples.map(short).collect();
            samples.sort();
            samples
        }
    }

    #[test]
    fn trials_are_counted_as_they_are_written() {
        let mut counted = Counted::new();
        // What stood there before this replica led does not count.
        let before = RolloutStatus { checks: vec![check(CheckVerdict::Passed, 1)], ..status("a", None) };
        counted.observe(Some(&before));
        assert_eq!(counted.samples(), [r#"phase{phase="idle"} 1"#]);
        let checks =
            vec![check(CheckVerdict::Failed, 3), check(CheckVerdict::Inconclusive, 2), before.checks[0].clone()];
        let tried = RolloutStatus { checks, ..status("a", Some(("b", TrialPhase::Analysing))) };
        counted.observe(Some(&tried));
        counted.observe(Some(&tried));
        let checked = [r#"checks_total{verdict="failed"} 1"#, r#"checks_total{verdict="inconclusive"} 1"#];
        assert_eq!(counted.samples(), [checked[0], checked[1], r#"phase{phase="analysing"} 1"#]);
        let promoted = RolloutStatus { checks: tried.checks.clone(), ..status("b", None) };
        counted.observe(Some(&promoted));
        let once = r#"versions_total{outcome="promoted"} 1"#;
        assert_eq!(counted.samples(), [checked[0], checked[1], r#"phase{phase="idle"} 1"#, once]);
        counted.metrics.leave();
        assert_eq!(counted.samples(), [checked[0], checked[1], once], "another replica leads");
        counted.observe(None);
        assert_eq!(counted.samples(), [""; 0], "the root is gone");
    }

    #[test]
    fn a_version_fails_once_and_one_that_vanished_is_followed_by_no_promotion() {
        let mut counted = Counted::new();
        counted.observe(Some(&status("a", Some(("b", TrialPhase::Analysing)))));
        let rejected =
            |revision: &str| RejectedRevision { revision: revision.to_owned(), message: String::new(), at: at(4) };
        let held = RolloutStatus {
            rejected: vec![rejected("b"), rejected("z")],
            ..status("a", Some(("b", TrialPhase::Held)))
        };
        counted.observe(Some(&held));
        // Whoever promotes it has it tried again: it is out of the list.
        counted.observe(Some(&RolloutStatus { rejected: vec![rejected("z")], ..held.clone() }));
        // The promoted revision has vanished, and another one took its place without a trial.
        counted.observe(Some(&RolloutStatus { rejected: vec![rejected("z")], ..status("c", None) }));
        assert_eq!(counted.samples(), [r#"phase{phase="idle"} 1"#, r#"versions_total{outcome="failed"} 1"#]);
    }
}
