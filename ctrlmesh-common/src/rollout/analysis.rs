//! Compares what two revisions did in the same time.
//!
//! Counts that depend on how much a revision owns are compared per object and minute. A revision fails where it is
//! clearly worse: by a factor, and by an amount beneath which a difference is noise. `docs/canary-upgrade.md` has the
//! same table.

use std::time::Duration;

use crate::api::CheckVerdict;
use crate::policy::FIRST_WRITE_BOUNDS;

/// Fewest requests of each revision from which anything follows.
const MIN_REQUESTS: u64 = 5;

/// Fewest writes that are expected of the new revision, by those of the old one, before their lack is a failure.
const MIN_EXPECTED_WRITES: f64 = 5.0;

/// Shortest time in which the lack of writes is a failure. Proxies report every 10 s.
const MIN_SILENCE: Duration = Duration::from_secs(25);

/// A revision that writes less than this share of what is expected reconciles nothing.
const DEAF: f64 = 0.1;

/// By how much more of all requests may fail, as a share: 5xx and 429, 4xx, 409, 422.
const SHARES: [(Failure, f64); 4] =
    [(Failure::Server, 0.05), (Failure::Client, 0.05), (Failure::Conflict, 0.2), (Failure::Invalid, 0.02)];

/// Fewest failures of one class that are more than noise.
const MIN_FAILURES: u64 = 3;

/// Rates may grow by this factor, and beyond it by these amounts, per object and minute.
const FACTOR: f64 = 3.0;
const WRITES: f64 = 5.0;
const DELETES: f64 = 0.05;

/// Watches may begin anew as often as that factor says, and beyond it so often per pod and minute.
const WATCHES: f64 = 30.0;

/// Fewest deletes that are more than noise.
const MIN_DELETES: u64 = 2;

/// The mean time of an answer may grow by this factor, and beyond it by this amount.
const SLOWER: f64 = 5.0;
const LATENCY: Duration = Duration::from_millis(250);

/// Fewest answers whose mean time is compared.
const MIN_TIMED: u64 = 20;

/// The time within which half of the first writes follow a change may grow by this factor, and up to this many seconds.
const LATER: u64 = 4;
const FIRST_WRITE: u64 = 4;

/// Fewest first writes of which that is known.
const MIN_FIRST_WRITES: u64 = 10;

/// What the pods of one revision did in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Whether its writes were dry runs. It sees what the old version has written, and never what it has written
    /// itself: so it may write nothing, or the same again and again.
    pub shadow: bool,
    /// How many pods it had.
    pub pods: u64,
    /// How long that was.
    pub time: Duration,
    /// How many objects it owned.
    pub objects: u64,
    /// Requests that the API server answered.
    pub requests: u64,
    /// Of these, with 409.
    pub conflicts: u64,
    /// With 422.
    pub invalid: u64,
    /// With another 4xx than 404, 409, 422 and 429.
    pub client_errors: u64,
    /// With 429 or 5xx.
    pub server_errors: u64,
    /// Writes of objects that are divided.
    pub writes: u64,
    /// Of these, deletes.
    pub deletes: u64,
    /// Watches that began.
    pub watches: u64,
    /// The time of all answers that were timed.
    pub latency: Duration,
    /// How many these are.
    pub timed: u64,
    /// How often containers were restarted; since the step began.
    pub restarts: u64,
    /// First writes of objects after a change of them, by how long after it: see [`FIRST_WRITE_BOUNDS`].
    pub first_writes: [u64; FIRST_WRITE_BOUNDS.len()],
    /// How often a pod lost its leader-election lock to another; since the step began.
    pub lock_losses: u64,
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    Server,
    Client,
    Conflict,
    Invalid,
}

/// The verdict on `new`, and the numbers of both. Where nothing is known of an `old` one, only restarts count.
pub fn compare(new: &Sample, old: Option<&Sample>) -> (CheckVerdict, String) {
    let nothing = Sample::default();
    let mut problems: Vec<String> = restarts(new, old.unwrap_or(&nothing)).into_iter().collect();
    if let Some(old) = old.filter(|old| is_comparable(new) && is_comparable(old) && old.requests >= MIN_REQUESTS) {
        problems.extend(failures(new, old));
        problems.extend(rates(new, old));
        problems.extend(silence(new, old));
        problems.extend(latency(new, old));
        problems.extend(lock_losses(new, old));
        problems.extend(first_writes(new, old));
    }
    let numbers = numbers(new, old.unwrap_or(&nothing));
    if !problems.is_empty() {
        return (CheckVerdict::Failed, format!("{}. In all: {numbers}", problems.join("; ")));
    }
    match too_little(new, old) {
        Some(why) => (CheckVerdict::Inconclusive, format!("{why}. In all: {numbers}")),
        None => (CheckVerdict::Passed, numbers),
    }
}

fn failures(new: &Sample, old: &Sample) -> Vec<String> {
    // The old version writes first, and a dry run that comes later conflicts with that.
    let counts = |class: &Failure| !(new.shadow && matches!(class, Failure::Conflict));
    let worse = SHARES.iter().filter(|(class, _)| counts(class)).filter_map(|(class, allowed)| {
        let (count, name) = class.of(new);
        let (share, before) = (share(count, new.requests), share(class.of(old).0, old.requests));
        let is_worse = count >= MIN_FAILURES && share > before + allowed;
        is_worse.then(|| {
            let [share, before, allowed] = [share, before, *allowed].map(|share| share * 100.0);
            format!("{share:.1} % of its requests were answered with {name}, of the old version's {before:.1} %; {allowed:.0} % more are allowed")
        })
    });
    worse.collect()
}

fn restarts(new: &Sample, old: &Sample) -> Option<String> {
    let is_worse = per(new.restarts, new.pods) > per(old.restarts, old.pods);
    is_worse.then(|| format!("its containers were restarted {}", times(new.restarts)))
}

fn rates(new: &Sample, old: &Sample) -> Vec<String> {
    let mut problems = Vec::new();
    let (writes, before) = (new.per_object(new.writes), old.per_object(old.writes));
    if !new.shadow && writes > FACTOR * before + WRITES {
        problems.push(format!("it wrote {writes:.1} times per object and minute, the old version {before:.1} times"));
    }
    let (deletes, before) = (new.per_object(new.deletes), old.per_object(old.deletes));
    if new.deletes >= MIN_DELETES && deletes > FACTOR * before + DELETES {
        problems.push(format!(
            "it deleted {}, {deletes:.2} per object and minute, the old version {before:.2}",
            objects(new.deletes)
        ));
    }
    let (watches, before) = (new.per_pod(new.watches), old.per_pod(old.watches));
    if watches > FACTOR * before + WATCHES {
        problems.push(format!("it began {watches:.0} watches a minute, the old version {before:.0}"));
    }
    problems
}

/// Whether it writes nothing of what the old version writes.
fn silence(new: &Sample, old: &Sample) -> Option<String> {
    let expected = new.expected_writes(old);
    let is_long = new.time >= MIN_SILENCE;
    let is_deaf = !new.shadow && is_long && expected >= MIN_EXPECTED_WRITES && count(new.writes) < DEAF * expected;
    is_deaf.then(|| format!("it wrote {}, where the old version writes {expected:.0} times", times(new.writes)))
}

fn latency(new: &Sample, old: &Sample) -> Option<String> {
    let (mean, before) = (new.mean_latency()?, old.mean_latency()?);
    let is_slow = mean.as_secs_f64() > before.as_secs_f64() * SLOWER + LATENCY.as_secs_f64();
    is_slow
        .then(|| format!("its requests took {} ms each, the old version's {} ms", mean.as_millis(), before.as_millis()))
}

fn lock_losses(new: &Sample, old: &Sample) -> Option<String> {
    let is_worse = per(new.lock_losses, new.pods) > per(old.lock_losses, old.pods);
    is_worse.then(|| format!("its pods lost their leader-election locks {}", times(new.lock_losses)))
}

/// How late it writes after changes. A shadow is shown what the old version writes.
fn first_writes(new: &Sample, old: &Sample) -> Option<String> {
    let (within, before) = (new.half_of_first_writes()?, old.half_of_first_writes()?);
    let is_late = !new.shadow && within > FIRST_WRITE && within >= before.saturating_mul(LATER);
    is_late.then(|| {
        format!("it wrote half of what changed up to {within} s after the change, the old version up to {before} s")
    })
}

/// Whether anything follows from it but its restarts.
fn is_comparable(sample: &Sample) -> bool {
    sample.objects > 0 && sample.time > Duration::ZERO
}

fn too_little(new: &Sample, old: Option<&Sample>) -> Option<String> {
    if new.objects == 0 || old.is_some_and(|old| old.objects == 0) {
        return Some("nothing to compare: one of both owns no object".to_owned());
    }
    if new.requests < MIN_REQUESTS {
        return Some(format!("too little to compare: it made {} requests", new.requests));
    }
    let old = old?;
    if old.requests < MIN_REQUESTS {
        return Some(format!("too little to compare: the old version made {} requests", old.requests));
    }
    let is_idle = !new.shadow && (new.writes == 0 || old.writes == 0);
    is_idle.then(|| {
        format!("too little to compare: it wrote {}, the old version {}", times(new.writes), times(old.writes))
    })
}

/// Of the new version, and of the old one in brackets.
fn numbers(new: &Sample, old: &Sample) -> String {
    let both = |name: &str, new: u64, old: u64| format!("{name} {new} ({old})");
    let rate = |one: &Sample| format!("{:.2}", one.per_object(one.writes));
    let mut numbers = vec![
        both("objects", new.objects, old.objects),
        both("requests", new.requests, old.requests),
        format!("writes per object and minute {} ({})", rate(new), rate(old)),
        both("deletes", new.deletes, old.deletes),
    ];
    numbers.extend(SHARES.iter().map(|(class, _)| {
        let (number, name) = class.of(new);
        both(name, number, class.of(old).0)
    }));
    numbers.push(both("watches", new.watches, old.watches));
    numbers.push(both("restarts", new.restarts, old.restarts));
    numbers.push(both("lost locks", new.lock_losses, old.lock_losses));
    numbers.push(both("first writes after changes", new.all_first_writes(), old.all_first_writes()));
    if let Some((within, before)) = new.half_of_first_writes().zip(old.half_of_first_writes()) {
        numbers.push(format!("half of them within {within} s ({before} s)"));
    }
    numbers.join(", ")
}

impl Failure {
    fn of(self, sample: &Sample) -> (u64, &'static str) {
        match self {
            Self::Server => (sample.server_errors, "429 or 5xx"),
            Self::Client => (sample.client_errors, "another 4xx"),
            Self::Conflict => (sample.conflicts, "409"),
            Self::Invalid => (sample.invalid, "422"),
        }
    }
}

impl Sample {
    /// Per object and minute.
    fn per_object(&self, number: u64) -> f64 {
        let minutes = self.time.as_secs_f64() / 60.0;
        if self.objects == 0 || minutes <= 0.0 { 0.0 } else { count(number) / count(self.objects) / minutes }
    }

    /// Per pod and minute.
    fn per_pod(&self, number: u64) -> f64 {
        let minutes = self.time.as_secs_f64() / 60.0;
        if minutes <= 0.0 { 0.0 } else { per(number, self.pods) / minutes }
    }

    /// What it would write if it did as `old` does.
    fn expected_writes(&self, old: &Self) -> f64 {
        old.per_object(old.writes) * count(self.objects) * self.time.as_secs_f64() / 60.0
    }

    fn mean_latency(&self) -> Option<Duration> {
        let timed = u32::try_from(self.timed).unwrap_or(u32::MAX);
        (self.timed >= MIN_TIMED).then(|| self.latency / timed)
    }

    fn all_first_writes(&self) -> u64 {
        self.first_writes.iter().fold(0, |all, count| all.saturating_add(*count))
    }

    /// Within how many seconds after a change half of the first writes came; `None` where too few are known.
    pub fn half_of_first_writes(&self) -> Option<u64> {
        let all = self.all_first_writes();
        let mut so_far = 0_u64;
        let half = self.first_writes.iter().position(|count| {
            so_far = so_far.saturating_add(*count);
            so_far >= all.div_ceil(2)
        });
        FIRST_WRITE_BOUNDS.get(half?).copied().filter(|_| all >= MIN_FIRST_WRITES)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of minutes are far below 2^52")]
fn count(number: u64) -> f64 {
    number as f64
}

fn share(number: u64, all: u64) -> f64 {
    per(number, all)
}

fn per(number: u64, each: u64) -> f64 {
    if each == 0 { 0.0 } else { count(number) / count(each) }
}

fn times(number: u64) -> String {
    if number == 1 { "once".to_owned() } else { format!("{number} times") }
}

fn objects(number: u64) -> String {
    if number == 1 { "1 object".to_owned() } else { format!("{number} objects") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A minute of an operator that writes each of its objects once.
    fn ordinary(objects: u64) -> Sample {
        Sample {
            pods: 1,
            time: Duration::from_mins(1),
            objects,
            requests: objects + 10,
            writes: objects,
            latency: Duration::from_millis(2 * objects),
            timed: objects,
            first_writes: [objects, 0, 0, 0, 0, 0, 0],
            ..Sample::default()
        }
    }

    #[test]
    fn as_good_as_the_old_version_passes() {
        let (verdict, message) = compare(&ordinary(30), Some(&ordinary(900)));
        assert_eq!(verdict, CheckVerdict::Passed, "{message}");
        assert!(message.starts_with("objects 30 (900), requests 40 (910), writes per object and minute 1.00 (1.00)"));
        assert_eq!(compare(&ordinary(30), None).0, CheckVerdict::Passed, "there is no old version any more");
    }

    #[test]
    fn each_way_of_being_worse_fails_and_is_named() {
        type Spoil = fn(&mut Sample);
        let cases: [(&str, Spoil); 12] = [
            ("of its requests were answered with 422", |new| new.invalid = 10),
            ("answered with another 4xx", |new| new.client_errors = 10),
            ("answered with 429 or 5xx", |new| new.server_errors = 10),
            ("answered with 409", |new| new.conflicts = 20),
            ("it wrote 300.0 times per object", |new| new.writes = 9000),
            ("it deleted 2 objects", |new| new.deletes = 2),
            ("it wrote 0 times, where the old version writes 30 times", |new| new.writes = 0),
            ("its containers were restarted once", |new| new.restarts = 1),
            ("it began 200 watches a minute", |new| new.watches = 200),
            ("its requests took 1000 ms each", |new| new.latency = Duration::from_secs(30)),
            ("it wrote half of what changed up to 8 s after the change, the old version up to 1 s", |new| {
                new.first_writes = [10, 4, 0, 16, 0, 0, 0];
            }),
            ("its pods lost their leader-election locks once", |new| new.lock_losses = 1),
        ];
        for (says, spoil) in cases {
            let mut new = ordinary(30);
            spoil(&mut new);
            let (verdict, message) = compare(&new, Some(&ordinary(900)));
            assert_eq!(verdict, CheckVerdict::Failed, "{says}: {message}");
            assert!(message.contains(says), "{says}: {message}");
        }
    }

    #[test]
    fn a_shadow_may_write_nothing_or_the_same_again_or_too_late_but_delete_nothing() {
        let first_writes = [0, 0, 0, 0, 0, 0, 30];
        let shadow =
            |writes, deletes| Sample { shadow: true, writes, deletes, conflicts: 30, first_writes, ..ordinary(30) };
        for writes in [0, 9000] {
            let (verdict, message) = compare(&shadow(writes, 0), Some(&ordinary(900)));
            assert_eq!(verdict, CheckVerdict::Passed, "{message}");
        }
        let (verdict, message) = compare(&shadow(30, 2), Some(&ordinary(900)));
        assert_eq!(verdict, CheckVerdict::Failed, "{message}");
        let idle = Sample { requests: 0, conflicts: 0, ..shadow(0, 0) };
        assert_eq!(compare(&idle, Some(&ordinary(900))).0, CheckVerdict::Inconclusive);
    }

    #[test]
    fn what_the_old_version_does_as_well_is_no_failure() {
        let spoil = |objects: u64| Sample {
            invalid: objects,
            conflicts: objects,
            deletes: objects,
            restarts: 1,
            lock_losses: 1,
            ..ordinary(objects)
        };
        let (verdict, message) = compare(&spoil(30), Some(&spoil(900)));
        assert_eq!(verdict, CheckVerdict::Passed, "{message}");
    }

    #[test]
    fn some_late_first_writes_and_an_operator_that_is_always_late_are_no_failure() {
        let with = |first_writes| Sample { first_writes, ..ordinary(30) };
        for (new, old, passes) in [
            ([10, 0, 0, 0, 0, 0, 9], [90, 0, 0, 0, 0, 0, 0], true),
            ([0, 0, 0, 0, 20, 0, 0], [0, 0, 0, 90, 0, 0, 0], true),
            ([0, 0, 20, 0, 0, 0, 0], [90, 0, 0, 0, 0, 0, 0], true),
            ([0, 0, 0, 0, 0, 0, 9], [90, 0, 0, 0, 0, 0, 0], true),
            ([0, 0, 0, 0, 0, 0, 10], [0, 0, 0, 9, 0, 0, 0], true),
            ([0, 0, 0, 0, 20, 0, 0], [0, 0, 90, 0, 0, 0, 0], false),
            ([u64::MAX; 7], [90, 0, 0, 0, 0, 0, 0], true),
        ] {
            let (verdict, message) = compare(&with(new), Some(&with(old)));
            assert_eq!(verdict == CheckVerdict::Passed, passes, "{message}");
        }
    }

    #[test]
    fn too_little_is_never_a_success() {
        let idle = Sample { writes: 0, requests: 0, timed: 0, ..ordinary(1) };
        for (new, old) in
            [(idle, ordinary(900)), (ordinary(30), idle), (Sample { writes: 0, ..ordinary(1) }, ordinary(9))]
        {
            let (verdict, message) = compare(&new, Some(&old));
            assert_eq!(verdict, CheckVerdict::Inconclusive, "{message}");
            assert!(message.starts_with("too little to compare"), "{message}");
        }
    }
}
