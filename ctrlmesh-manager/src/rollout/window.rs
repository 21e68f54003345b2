//! Measures what the pods of two versions do from one check to the next.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use ctrlmesh_common::api::{CheckVerdict, Trial};
use ctrlmesh_common::rollout::{self, Sample};
use ctrlmesh_common::wire::Traffic;

use super::metrics::{Outcome, combine};
use crate::rules::rollout::Owned;

/// Shortest time from one check of a shadow to the next. A proxy knows 10 s after a write what became of it, and
/// reports every 10 s.
const SHADOW_INTERVAL: Duration = Duration::from_secs(30);

/// How long a version looks at objects that it has just got.
const SETTLES: Duration = Duration::from_mins(2);

/// What is known of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PodCounts {
    pub(super) traffic: Traffic,
    pub(super) restarts: u32,
}

/// The counts of one version's pods, by UID.
pub(super) type VersionCounts = BTreeMap<String, PodCounts>;

/// From when the counts are compared, for one step of a trial.
#[derive(Clone, Debug)]
pub(super) struct Window {
    revision: String,
    step: i32,
    /// Whether the version's writes are dry runs.
    shadow: bool,
    /// By the version on trial: where it changes, rates per object mean nothing.
    owned: Owned,
    owned_since: Instant,
    began_at: Instant,
    checked_at: Instant,
    before: BTreeMap<String, PodCounts>,
    /// The counts of each pod when it was first heard of in the step. What is rare is counted over the step: lost
    /// locks, and restarts, as containers that crash wait longer each time.
    step_before: BTreeMap<String, PodCounts>,
    /// From when first writes are counted, for each pod: the last check in which they were compared, or the first one
    /// after `SETTLES`. A pod that has just got objects looks at all of them first.
    first_writes_before: BTreeMap<String, Traffic>,
    /// How often at the last check.
    checked_restarts: u64,
    /// How many locks had been lost then.
    checked_losses: u64,
    /// What the old version did before it owned nothing any more.
    last_old: Option<Sample>,
}

impl Window {
    /// For the step of `trial` that begins now, with what it owns, after window `last`.
    pub(super) fn begin(trial: &Trial, owned: Owned, last: Option<Self>, now: Instant) -> Self {
        let last = last.filter(|last| last.revision == trial.revision);
        let last_old = last.as_ref().and_then(|last| last.last_old);
        let same_step = last.filter(|last| last.step == trial.step);
        let (step_before, checked_restarts, checked_losses) =
            same_step.map(|last| (last.step_before, last.checked_restarts, last.checked_losses)).unwrap_or_default();
        let (revision, step, shadow, before) = (trial.revision.clone(), trial.step, trial.shadow, BTreeMap::new());
        Self {
            revision,
            step,
            shadow,
            owned,
            owned_since: now,
            began_at: now,
            checked_at: now,
            before,
            step_before,
            first_writes_before: BTreeMap::new(),
            checked_restarts,
            checked_losses,
            last_old,
        }
    }

    /// Whether it is that of the step that `trial` is in, with what it owns.
    pub(super) fn is_of(&self, trial: &Trial, owned: &Owned) -> bool {
        let is_same = |window: &Self| (window.step, window.shadow) == (trial.step, trial.shadow);
        self.revision == trial.revision && is_same(self) && self.owned == *owned
    }

    /// Takes what a pod has done until it is first heard of for no behaviour: it starts then. From then on all are
    /// compared.
    pub(super) fn observe<'a>(
        &mut self,
        counts: impl Iterator<Item = (&'a String, &'a PodCounts)> + Clone,
        now: Instant,
    ) {
        for (uid, counts) in counts.clone() {
            let before = self.step_before.entry(uid.clone()).or_insert_with(|| counts.clone());
            if before.traffic.since == 0 {
                before.traffic.clone_from(&counts.traffic);
            }
        }
        let heard = counts.filter(|(_, counts)| counts.traffic.since > 0);
        if heard.clone().any(|(uid, _)| !self.before.contains_key(uid)) {
            self.before = heard.map(|(uid, counts)| (uid.clone(), counts.clone())).collect();
            self.began_at = now;
        }
    }

    /// Whether a check is due: `interval` after the last one, with as much time to compare. What moves is nothing to a
    /// shadow.
    pub(super) fn is_due(&self, interval: Duration, now: Instant) -> bool {
        let interval = if self.shadow { interval.max(SHADOW_INTERVAL) } else { interval };
        (self.shadow || !self.owned.moves)
            && now.saturating_duration_since(self.checked_at.max(self.began_at)) >= interval
    }

    /// The check of now, of two versions that own so many objects, with what `metrics` say besides. After one that was
    /// inconclusive, the next goes by what was seen since the last conclusive one.
    pub(super) fn check(
        &mut self,
        [new, old]: [&VersionCounts; 2],
        [new_objects, old_objects]: [u64; 2],
        metrics: &[Outcome],
        now: Instant,
    ) -> Outcome {
        let mut new_sample = Sample { shadow: self.shadow, ..self.sample(new, new_objects, now) };
        new_sample.restarts = unless_alone(&mut self.checked_restarts, new_sample.restarts);
        new_sample.lock_losses = unless_alone(&mut self.checked_losses, new_sample.lock_losses);
        if !old.is_empty() && old_objects > 0 {
            self.last_old = Some(self.sample(old, old_objects, now));
        }
        let last_old = self.last_old.as_ref();
        let is_known = |sample: &Sample| sample.half_of_first_writes().is_some();
        let is_compared = is_known(&new_sample) && last_old.is_some_and(is_known);
        let heard = new.iter().chain(old).filter(|(_, counts)| counts.traffic.since > 0);
        if now.saturating_duration_since(self.owned_since) >= SETTLES {
            for (uid, counts) in heard.clone() {
                if is_compared || !self.first_writes_before.contains_key(uid) {
                    self.first_writes_before.insert(uid.clone(), counts.traffic.clone());
                }
            }
        }
        let (verdict, message) = combine(rollout::compare(&new_sample, last_old), metrics);
        self.checked_at = now;
        if verdict != CheckVerdict::Inconclusive {
            self.began_at = now;
            self.before = heard.map(|(uid, counts)| (uid.clone(), counts.clone())).collect();
        }
        (verdict, message)
    }

    fn sample(&self, version: &VersionCounts, objects: u64, now: Instant) -> Sample {
        let time = now.saturating_duration_since(self.began_at);
        let nothing = Traffic::default();
        let mut sample = Sample { time, objects, pods: version.len() as u64, ..Sample::default() };
        for (uid, counts) in version {
            let after = &counts.traffic;
            if let Some(known) = self.step_before.get(uid) {
                sample.restarts += u64::from(counts.restarts.saturating_sub(known.restarts));
                let before = counted_then(&known.traffic, after, &nothing);
                let losses = after.lock_losses.saturating_sub(before.lock_losses);
                sample.lock_losses = sample.lock_losses.saturating_add(losses);
            }
            if let Some(known) = self.first_writes_before.get(uid) {
                let before = counted_then(known, after, &nothing);
                for (at, count) in sample.first_writes.iter_mut().enumerate() {
                    let of = |traffic: &Traffic| traffic.first_writes.get(at).copied().unwrap_or_default();
                    *count = count.saturating_add(of(after).saturating_sub(of(before)));
                }
            }
            let Some(known) = self.before.get(uid) else { continue };
            let before = counted_then(&known.traffic, after, &nothing);
            sample.requests += after.requests.saturating_sub(before.requests);
            sample.conflicts += after.conflicts.saturating_sub(before.conflicts);
            sample.invalid += after.invalid.saturating_sub(before.invalid);
            sample.client_errors += after.client_errors.saturating_sub(before.client_errors);
            sample.server_errors += after.server_errors.saturating_sub(before.server_errors);
            sample.writes += after.writes.saturating_sub(before.writes);
            sample.deletes += after.deletes.saturating_sub(before.deletes);
            sample.watches += after.watches.saturating_sub(before.watches);
            sample.timed += after.timed.saturating_sub(before.timed);
            sample.latency += Duration::from_micros(after.latency_micros.saturating_sub(before.latency_micros));
        }
        sample
    }
}

/// What happened in the step, or nothing if that is one time, which counted at a check before.
fn unless_alone(checked: &mut u64, count: u64) -> u64 {
    let before = mem::replace(checked, count);
    if count == before && count < 2 { 0 } else { count }
}

/// What was counted then, to be taken from what is counted now. A proxy that began to serve the pod anew counts from 0.
fn counted_then<'t>(then: &'t Traffic, now: &Traffic, nothing: &'t Traffic) -> &'t Traffic {
    if then.since == now.since { then } else { nothing }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::TrialPhase;
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    const INTERVAL: Duration = Duration::from_mins(1);

    fn trial(step: i32) -> Trial {
        Trial {
            revision: "new".to_owned(),
            phase: TrialPhase::Analysing,
            step,
            shadow: false,
            slots: Vec::new(),
            namespaces: Vec::new(),
            step_started_at: Time(Timestamp::UNIX_EPOCH),
            passed: 0,
            failed: 0,
            alone_since: None,
            message: String::new(),
        }
    }

    fn counts(uid: &str, since: u64, writes: u64) -> VersionCounts {
        let traffic = Traffic { since, writes, requests: 2 * writes, ..Traffic::default() };
        [(uid.to_owned(), PodCounts { traffic, restarts: 0 })].into()
    }

    #[test]
    fn a_check_goes_by_what_was_seen_since_the_last_conclusive_one() {
        let start = Instant::now();
        let moving = Owned { moves: true, ..Owned::default() };
        let mut window = Window::begin(&trial(1), moving.clone(), None, start);
        assert!(!window.is_due(INTERVAL, start + INTERVAL), "its slots are on their way");
        window = Window::begin(&trial(1), Owned::default(), Some(window), start);
        let nothing = Owned::default();
        let is_of = |step, owned| window.is_of(&trial(step), owned);
        assert!(is_of(1, &nothing) && !is_of(2, &nothing) && !is_of(1, &moving));
        assert!(!window.is_due(INTERVAL, start + INTERVAL / 2) && window.is_due(INTERVAL, start + INTERVAL));
        window.observe(counts("n", 0, 0).iter(), start);
        window.observe(counts("n", 1, 100).iter(), start);
        let both = [counts("n", 1, 100), counts("o", 1, 500)];
        let later = start + INTERVAL / 2;
        window.observe(both.iter().flatten(), later);
        assert!(!window.is_due(INTERVAL, start + INTERVAL), "from when both were heard of");
        window.observe(both.iter().flatten(), start + INTERVAL);
        assert!(window.is_due(INTERVAL, later + INTERVAL));
        let start = later;
        let mut check = |minute: u32, new: (u64, u64), old: Option<u64>, metrics: &[Outcome]| {
            let (new, old) = (counts("n", new.0, new.1), old.map(|old| counts("o", 1, old)).unwrap_or_default());
            let objects = [10, if old.is_empty() { 0 } else { 10 }];
            window.check([&new, &old], objects, metrics, start + INTERVAL * minute)
        };
        let (verdict, message) = check(1, (1, 101), Some(501), &[]);
        assert_eq!(verdict, CheckVerdict::Inconclusive, "{message}");
        let without = [(CheckVerdict::Inconclusive, "metric m has no value".to_owned())];
        let (verdict, message) = check(2, (1, 120), Some(520), &without);
        assert!(verdict == CheckVerdict::Inconclusive && message.starts_with("metric m has no value; objects 10"));
        let (verdict, message) = check(2, (1, 120), Some(520), &[(CheckVerdict::Passed, "metric m is 1".to_owned())]);
        assert_eq!(verdict, CheckVerdict::Passed);
        assert!(message.contains("writes per object and minute 1.00 (1.00)"), "20 in two minutes: {message}");
        assert!(message.ends_with("; metric m is 1"), "{message}");
        // The old version is gone: what it did last counts.
        let (verdict, message) = check(3, (1, 150), None, &[]);
        assert_eq!(verdict, CheckVerdict::Passed, "{message}");
        // The new version's proxy begins anew, and the operator writes in a loop.
        let (verdict, message) = check(4, (2, 9000), None, &[]);
        assert_eq!(verdict, CheckVerdict::Failed, "{message}");
        assert!(message.contains("wrote 900.0 times per object and minute, the old version 1.0"), "{message}");
    }

    #[test]
    fn a_shadow_is_checked_less_often_and_may_write_nothing() {
        let (start, shadow) = (Instant::now(), Trial { shadow: true, ..trial(1) });
        let mut window = Window::begin(&shadow, Owned::default(), None, start);
        assert!(window.is_of(&shadow, &Owned::default()) && !window.is_of(&trial(1), &Owned::default()));
        let of = |requests, writes| -> VersionCounts {
            let traffic = Traffic { since: 1, requests, writes, ..Traffic::default() };
            [("n".to_owned(), PodCounts { traffic, restarts: 0 })].into()
        };
        let mut old = counts("o", 1, 0);
        window.observe(of(0, 0).iter().chain(&old), start);
        let second = Duration::from_secs(1);
        assert!(!window.is_due(10 * second, start + 29 * second) && window.is_due(10 * second, start + 30 * second));
        old = counts("o", 1, 60);
        let (verdict, message) = window.check([&of(60, 0), &old], [10, 10], &[], start + 30 * second);
        assert_eq!(verdict, CheckVerdict::Passed, "{message}");
    }

    #[test]
    fn first_writes_are_compared_once_and_not_before_a_version_has_settled() {
        let start = Instant::now();
        // Six first writes a minute, and one lost lock in the fourth.
        let of = |uid: &str, minute: u64, bound: usize| {
            let mut all = counts(uid, 1, minute * 20);
            for pod in all.values_mut() {
                pod.traffic.first_writes = vec![0; 7];
                pod.traffic.first_writes[bound] = 6 * minute;
                pod.traffic.lock_losses = u64::from(uid == "n" && minute > 3);
            }
            all
        };
        let mut window = Window::begin(&trial(1), Owned::default(), None, start);
        window.observe(of("n", 0, 4).iter().chain(&of("o", 0, 0)), start);
        let check = |window: &mut Window, minute: u32| {
            let both = [of("n", minute.into(), 4), of("o", minute.into(), 0)];
            window.check([&both[0], &both[1]], [10, 10], &[], start + INTERVAL * minute)
        };
        let late = "up to 16 s after the change, the old version up to 1 s";
        for (minute, expected) in [
            (1, Ok("first writes after changes 0 (0)")),
            (2, Ok("first writes after changes 0 (0)")),
            (3, Ok("first writes after changes 6 (6)")),
            (4, Err("its pods lost their leader-election locks once")),
            (5, Ok("lost locks 0 (0), first writes after changes 6 (6)")),
            (6, Err(late)),
        ] {
            let (verdict, message) = check(&mut window, minute);
            assert_eq!(verdict == CheckVerdict::Passed, expected.is_ok(), "{minute}: {message}");
            let (Ok(says) | Err(says)) = expected;
            assert!(message.contains(says), "{minute}: {message}");
        }
        // It gets other slots, and has to settle anew.
        let mut window = Window::begin(&trial(1), Owned::default(), Some(window), start + INTERVAL * 6);
        window.observe(of("n", 6, 4).iter().chain(&of("o", 6, 0)), start + INTERVAL * 6);
        for minute in [7, 8] {
            let (_, message) = check(&mut window, minute);
            assert!(message.contains("first writes after changes 0 (0)"), "{minute}: {message}");
        }
    }

    #[test]
    fn one_restart_counts_once_and_two_count_in_all_checks() {
        let start = Instant::now();
        let of = |restarts, writes| {
            let mut all = counts("n", 1, writes);
            for pod in all.values_mut() {
                pod.restarts = restarts;
            }
            all
        };
        let mut window = Window::begin(&trial(1), Owned::default(), None, start);
        window.observe(of(1, 0).iter().chain(&counts("o", 1, 0)), start);
        let mut check = |minute: u32, restarts| {
            let writes = u64::from(minute) * 20;
            let versions = [&of(restarts, writes), &counts("o", 1, writes)];
            window.check(versions, [10, 10], &[], start + INTERVAL * minute).0
        };
        let verdicts = [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)].map(|(minute, restarts)| check(minute, restarts));
        let (passed, failed) = (CheckVerdict::Passed, CheckVerdict::Failed);
        assert_eq!(verdicts, [passed, failed, passed, failed, failed]);
    }
}
