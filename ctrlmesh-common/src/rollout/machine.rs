//! Takes a rollout from one status to the next.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{ABSENT_WITHIN, Command, MAX_RESTARTS, Observed, PodFacts, START_WITHIN, slice};
use crate::api::{
    CheckVerdict, OnFailure, RejectedRevision, Rollout, RolloutCheck, RolloutStatus, RolloutStep, Trial, TrialPhase,
};

/// Longest message, in characters.
pub(super) const MAX_MESSAGE: usize = 2000;

/// Longest command, in bytes. A longer one is ignored.
const MAX_COMMAND_BYTES: usize = 1024;

/// Most namespaces that a message names.
const LISTED: usize = 5;

/// Most checks that the status keeps.
pub(super) const MAX_CHECKS: usize = 10;

/// Most revisions that the status remembers as failed.
pub(super) const MAX_REJECTED: usize = 5;

/// The status that follows `status`.
pub(super) fn next(rule: &Rollout, status: &RolloutStatus, observed: &Observed<'_>) -> RolloutStatus {
    let mut machine = Machine { steps: rule.steps(), rule, observed, status: status.clone() };
    machine.follow_pods();
    machine.follow_command();
    machine.follow_trial();
    machine.status
}

struct Machine<'a> {
    rule: &'a Rollout,
    steps: Vec<RolloutStep>,
    observed: &'a Observed<'a>,
    status: RolloutStatus,
}

impl Machine<'_> {
    /// Begins and ends trials by the pods that there are.
    fn follow_pods(&mut self) {
        let newest = self.newest_revision().map(str::to_owned);
        if let Some(trial) = self.status.trial.clone() {
            let is_newest = newest.as_ref().is_none_or(|newest| *newest == trial.revision);
            if is_newest && (self.live(&trial.revision) || self.may_come_back(&trial)) {
                return;
            }
            let has_taken_over = trial.phase == TrialPhase::Promoting && !self.stays(&self.status.promoted);
            if has_taken_over && self.stays(&trial.revision) {
                self.promote();
            } else {
                self.status.trial = None;
            }
        }
        let Some(revision) = newest else { return };
        let rejected = self.status.rejected.iter().find(|one| one.revision == revision);
        if !self.live(&self.status.promoted) && rejected.is_none() {
            // There is nothing that it could be compared with, and nothing else that could own anything.
            return self.set_promoted(revision);
        }
        let (phase, message) = match rejected {
            Some(rejected) => (TrialPhase::Held, clipped(&format!("it failed before: {}", rejected.message))),
            None => (TrialPhase::Starting, "its pods do not run yet".to_owned()),
        };
        self.status.trial = Some(Trial {
            revision,
            phase,
            step: 1,
            shadow: false,
            slots: Vec::new(),
            namespaces: Vec::new(),
            step_started_at: self.now(),
            passed: 0,
            failed: 0,
            alone_since: None,
            message,
        });
    }

    /// Whether a trial without a pod waits for one. Then its step begins anew when one comes.
    fn may_come_back(&mut self, trial: &Trial) -> bool {
        match trial.phase {
            TrialPhase::Held | TrialPhase::RollingBack => false,
            TrialPhase::Starting => self.age(trial) < ABSENT_WITHIN,
            // Nobody else is there.
            TrialPhase::Promoting if !self.stays(&self.status.promoted) => true,
            TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting => {
                let message = "it has no pod".to_owned();
                let (slots, namespaces) = (Vec::new(), Vec::new());
                let (phase, step_started_at) = (TrialPhase::Starting, self.now());
                let again =
                    Trial { phase, shadow: false, slots, namespaces, step_started_at, message, ..trial.clone() };
                self.status.trial = Some(again);
                true
            }
        }
    }

    /// Carries out what the annotation says, once.
    fn follow_command(&mut self) {
        let command = self.observed.command.filter(|text| text.len() <= MAX_COMMAND_BYTES);
        let Some(text) = command.filter(|text| self.status.handled.as_deref() != Some(*text)) else { return };
        self.status.handled = Some(text.to_owned());
        let Some(command) = Command::parse(text) else { return };
        let trial = self.status.trial.clone().filter(|trial| trial.revision == command.revision());
        match (&command, trial) {
            (Command::Abort(_), Some(trial)) => self.abort(trial),
            (Command::Promote(_), Some(trial)) => {
                let step = self.step_of(&trial) + 1;
                self.promote_to(trial, step);
            }
            (Command::PromoteFull(_), Some(trial)) => {
                let last = self.steps.len();
                self.promote_to(trial, last);
            }
            // It is tried when a pod of it comes again.
            (Command::Promote(revision) | Command::PromoteFull(revision), None) => self.forgive(revision),
            (Command::Abort(_), None) => {}
        }
    }

    /// Goes on with a later step. A revision that failed, and stays, begins anew.
    fn promote_to(&mut self, trial: Trial, step: usize) {
        match trial.phase {
            TrialPhase::Held => {
                self.forgive(&trial.revision);
                let message = "somebody wants it tried again".to_owned();
                let (phase, step_started_at) = (TrialPhase::Starting, self.now());
                self.status.trial =
                    Some(Trial { phase, step: 1, step_started_at, passed: 0, failed: 0, message, ..trial });
            }
            TrialPhase::Analysing | TrialPhase::Waiting => self.enter(trial, step),
            TrialPhase::Promoting if !self.stays(&self.status.promoted) => self.promote(),
            TrialPhase::Starting | TrialPhase::Promoting | TrialPhase::RollingBack => {}
        }
    }

    /// Ends the trial. Of a revision that failed, and stays, the template is put back.
    fn abort(&mut self, trial: Trial) {
        match trial.phase {
            TrialPhase::Held => self.status.trial = Some(Trial { phase: TrialPhase::RollingBack, ..trial }),
            TrialPhase::RollingBack => {}
            TrialPhase::Starting | TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting => {
                self.fail("somebody aborted it".to_owned());
            }
        }
    }

    fn forgive(&mut self, revision: &str) {
        self.status.rejected.retain(|one| one.revision != revision);
    }

    /// Takes the check, and goes on where the step is over.
    fn follow_trial(&mut self) {
        let is_alone = self.follow_alone();
        let Some(trial) = self.status.trial.clone() else { return };
        match trial.phase {
            TrialPhase::Held => {}
            TrialPhase::RollingBack => {
                if let Some(error) = self.observed.roll_back_error {
                    let message = clipped(&format!("its template cannot be put back: {error}"));
                    self.status.trial = Some(Trial { message, ..trial });
                }
            }
            TrialPhase::Starting => self.follow_start(trial),
            _ if is_alone => self.enter(trial, self.steps.len()),
            TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting => self.follow_step(trial),
        }
    }

    /// Whether no pod of the promoted revision has been there for [`ABSENT_WITHIN`], in a step: then nobody would own
    /// what the trial does not. Notes since when there is none.
    fn follow_alone(&mut self) -> bool {
        let Some(trial) = self.status.trial.take() else { return false };
        let is_in_step = matches!(trial.phase, TrialPhase::Analysing | TrialPhase::Waiting);
        let alone_since = match &trial.alone_since {
            since if !is_in_step => since.clone(),
            _ if self.stays(&self.status.promoted) => None,
            since => Some(since.clone().unwrap_or_else(|| self.now())),
        };
        let is_over = alone_since.as_ref().is_some_and(|since| self.since(since) >= ABSENT_WITHIN);
        let is_alone = is_in_step && is_over && self.runs(&trial.revision);
        self.status.trial = Some(Trial { alone_since, ..trial });
        is_alone
    }

    fn follow_start(&mut self, trial: Trial) {
        if let Some(reason) = self.crashes(&trial) {
            return self.fail(reason);
        }
        let third = |pod: &&PodFacts| pod.revision != trial.revision && pod.revision != self.status.promoted;
        if let Some(pod) = self.observed.pods.iter().filter(|pod| !pod.stopped).find(third) {
            let message = format!("pods of revision {} have not ended yet", pod.revision);
            self.status.trial = Some(Trial { message, ..trial });
        } else if self.runs(&trial.revision) {
            let step = self.step_of(&trial);
            self.enter(trial, step);
        } else if self.age(&trial) >= START_WITHIN && self.live(&trial.revision) {
            self.fail(format!("no pod had ready containers within {} minutes", START_WITHIN.as_secs() / 60));
        }
    }

    fn follow_step(&mut self, mut trial: Trial) {
        if let Some(reason) = self.crashes(&trial) {
            return self.fail(reason);
        }
        if let Some((verdict, message)) = self.observed.check.clone() {
            let message = clipped(&self.with_shadow(&trial, message));
            self.record(&trial, verdict, message.clone());
            trial.passed += i32::from(verdict == CheckVerdict::Passed);
            trial.failed += i32::from(verdict == CheckVerdict::Failed);
            if verdict == CheckVerdict::Failed {
                // The pause begins anew.
                trial.step_started_at = self.now();
            }
            trial.message.clone_from(&message);
            self.status.trial = Some(trial.clone());
            if trial.failed > self.rule.failure_limit() {
                return self.fail(message);
            }
        }
        if trial.phase == TrialPhase::Promoting {
            return self.follow_promotion(&trial);
        }
        let of_step = self.status.checks.iter().filter(|one| one.revision == trial.revision && one.step == trial.step);
        let last = of_step.map(|check| check.verdict).find(|verdict| *verdict != CheckVerdict::Inconclusive);
        if trial.passed == 0 || last != Some(CheckVerdict::Passed) || !self.runs(&trial.revision) {
            return;
        }
        let step = self.step_of(&trial);
        match self.steps[step - 1].pause() {
            Some(pause) if self.age(&trial) >= pause => self.enter(trial, step + 1),
            None if trial.phase == TrialPhase::Analysing => {
                let message = format!("step {step} passed: promote it, and it goes on");
                self.status.trial = Some(Trial { phase: TrialPhase::Waiting, message, ..trial });
            }
            Some(_) | None => {}
        }
    }

    /// It is promoted when the former revision is gone, and the last pause is over.
    fn follow_promotion(&mut self, trial: &Trial) {
        if self.stays(&self.status.promoted) {
            return;
        }
        let pause = self.steps.last().and_then(RolloutStep::pause);
        if pause.is_some_and(|pause| self.age(trial) >= pause) && self.runs(&trial.revision) {
            self.promote();
        }
    }

    fn promote(&mut self) {
        if let Some(trial) = self.status.trial.take() {
            self.set_promoted(trial.revision);
        }
    }

    /// Its pods stay in their shards, which are those of the promoted version now.
    fn set_promoted(&mut self, revision: String) {
        (self.status.promoted, self.status.second) = (revision, !self.status.second);
    }

    /// Begins `step`, from 1.
    fn enter(&mut self, trial: Trial, step: usize) {
        let step = step.min(self.steps.len());
        let is_last = step == self.steps.len();
        let (slots, namespaces) = match self.observed.loads {
            _ if is_last => (Vec::new(), Vec::new()),
            Some(loads) => slice(&self.steps[..step], &trial.slots, self.observed.canary.as_ref(), loads),
            // The next look may know.
            None => return,
        };
        let shadow = !is_last && self.steps[step - 1].shadow;
        let message = if is_last {
            "it takes over everything, pod by pod".to_owned()
        } else {
            let does = if shadow { "it shadows slots" } else { "slots" };
            format!("step {step} of {}: {does} {}", self.steps.len(), listed(&slots, &namespaces))
        };
        self.status.trial = Some(Trial {
            phase: if is_last { TrialPhase::Promoting } else { TrialPhase::Analysing },
            step: i32::try_from(step).unwrap_or(i32::MAX),
            shadow,
            slots,
            namespaces,
            step_started_at: self.now(),
            passed: 0,
            failed: 0,
            message,
            alone_since: None,
            ..trial
        });
    }

    /// All that the revision owns goes back.
    fn fail(&mut self, message: String) {
        let Some(trial) = self.status.trial.take() else { return };
        self.forgive(&trial.revision);
        let (revision, at) = (trial.revision.clone(), self.now());
        let rejected = RejectedRevision { revision, message: message.clone(), at };
        self.status.rejected.insert(0, rejected);
        self.status.rejected.truncate(MAX_REJECTED);
        let phase = match self.rule.on_failure.unwrap_or_default() {
            OnFailure::Rollback => TrialPhase::RollingBack,
            OnFailure::Hold => TrialPhase::Held,
        };
        let (slots, namespaces) = (Vec::new(), Vec::new());
        self.status.trial = Some(Trial { phase, shadow: false, slots, namespaces, message, ..trial });
    }

    /// Takes what a revision would have written, where its step is one with `shadow`: at each check. Adds the numbers
    /// to the check's message.
    fn with_shadow(&mut self, trial: &Trial, message: String) -> String {
        let Some(report) = self.observed.shadow.filter(|_| trial.shadow) else { return message };
        self.status.shadow = Some(report.clone());
        format!("{}; {message}", report.summary())
    }

    fn record(&mut self, trial: &Trial, verdict: CheckVerdict, message: String) {
        let (revision, step, at) = (trial.revision.clone(), trial.step, self.now());
        let check = RolloutCheck { revision, step, verdict, message, at };
        // Those that say nothing do not push out the others.
        let is_silent = |one: &RolloutCheck| {
            one.verdict == CheckVerdict::Inconclusive && one.revision == check.revision && one.step == check.step
        };
        if verdict == CheckVerdict::Inconclusive && self.status.checks.first().is_some_and(is_silent) {
            self.status.checks.remove(0);
        }
        self.status.checks.insert(0, check);
        self.status.checks.truncate(MAX_CHECKS);
    }

    /// The revision of the newest pod that stays, beside the promoted one.
    fn newest_revision(&self) -> Option<&str> {
        let others = self.observed.pods.iter().filter(|pod| pod.revision != self.status.promoted);
        let staying = others.filter(|pod| !pod.terminating && !pod.stopped);
        let newest = staying.max_by_key(|pod| (pod.created_at, &pod.revision))?;
        Some(&newest.revision)
    }

    /// Whether a pod of it is left.
    fn live(&self, revision: &str) -> bool {
        self.observed.pods.iter().any(|pod| pod.revision == revision && !pod.stopped)
    }

    /// Whether a pod of it is there, and not on its way out.
    fn stays(&self, revision: &str) -> bool {
        self.observed.pods.iter().any(|pod| pod.revision == revision && !pod.stopped && !pod.terminating)
    }

    /// Whether a pod of it works.
    fn runs(&self, revision: &str) -> bool {
        self.observed.pods.iter().any(|pod| pod.revision == revision && pod.ready && !pod.terminating)
    }

    fn crashes(&self, trial: &Trial) -> Option<String> {
        let of_it = self.observed.pods.iter().filter(|pod| pod.revision == trial.revision && !pod.stopped);
        let restarts = of_it.map(|pod| pod.restarts).max().unwrap_or_default();
        let crashes = restarts >= MAX_RESTARTS && !self.runs(&trial.revision);
        crashes.then(|| format!("the containers of one of its pods were restarted {restarts} times"))
    }

    /// From 1, within the steps that there are now.
    fn step_of(&self, trial: &Trial) -> usize {
        usize::try_from(trial.step).unwrap_or(1).clamp(1, self.steps.len())
    }

    fn age(&self, trial: &Trial) -> Duration {
        self.since(&trial.step_started_at)
    }

    fn since(&self, time: &Time) -> Duration {
        Duration::try_from(self.observed.now.duration_since(time.0)).unwrap_or_default()
    }

    /// In whole seconds, as the API server stores it.
    fn now(&self) -> Time {
        Time(Timestamp::from_second(self.observed.now.as_second()).unwrap_or(self.observed.now))
    }
}

fn listed(slots: &[String], namespaces: &[String]) -> String {
    let named = &namespaces[..namespaces.len().min(LISTED)];
    let more = namespaces.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let pins = if named.is_empty() { String::new() } else { format!(" and namespaces {}{more}", named.join(", ")) };
    format!("{}{pins}", if slots.is_empty() { "none".to_owned() } else { slots.join(",") })
}

pub(super) fn clipped(message: &str) -> String {
    message.chars().take(MAX_MESSAGE).collect()
}
