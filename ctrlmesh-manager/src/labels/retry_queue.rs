//! Objects that could not be labelled, and when each is retried.
//!
//! Pure. Each object has its own growing delay. So one that can never be labelled costs a request now and then, and not
//! a new list of its kind.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::time::Instant;

use super::Change;

/// First delay, and the longest one by default.
const AGAIN: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(10));

/// Remembered objects. Of more, only their existence is remembered.
const MOST: usize = 10_000;

#[derive(Debug)]
pub(super) struct RetryQueue {
    objects: BTreeMap<Name, Failed>,
    /// Longest delay.
    within: Duration,
    /// Whether there are more than can be remembered.
    more: bool,
    /// Terminating objects that a migration waits for.
    leaving: BTreeSet<Name>,
}

/// Namespace and name.
type Name = (Option<String>, Option<String>);

#[derive(Debug)]
struct Failed {
    uid: Option<String>,
    change: Change,
    failures: u32,
    at: Instant,
}

impl Default for RetryQueue {
    fn default() -> Self {
        Self::within(AGAIN.1)
    }
}

impl RetryQueue {
    /// With this longest delay.
    pub(super) fn within(within: Duration) -> Self {
        Self { objects: BTreeMap::new(), within, more: false, leaving: BTreeSet::new() }
    }

    /// A migration waits for the end of this terminating object.
    pub(super) fn leaves(&mut self, meta: &ObjectMeta) {
        self.done(meta);
        if self.leaving.len() < MOST {
            self.leaving.insert(name(meta));
        }
    }

    /// A new list begins; it shows all terminating objects again.
    pub(super) fn listed_anew(&mut self) {
        self.leaving.clear();
    }

    pub(super) fn failed(&mut self, meta: &ObjectMeta, change: Change, now: Instant) {
        let failures = self.failures(meta);
        self.remember(meta, change, failures + 1, now + self.wait(failures));
    }

    /// The object changed meanwhile. It is retried at once, and with a growing delay if that goes on. Returns whether
    /// that happened before.
    pub(super) fn changed(&mut self, meta: &ObjectMeta, change: Change, now: Instant) -> bool {
        let failures = self.failures(meta);
        let wait = failures.checked_sub(1).map_or(Duration::ZERO, |before| self.wait(before));
        self.remember(meta, change, failures + 1, now + wait);
        failures > 0
    }

    fn failures(&self, meta: &ObjectMeta) -> u32 {
        self.objects.get(&name(meta)).map_or(0, |one| one.failures)
    }

    fn wait(&self, failures: u32) -> Duration {
        AGAIN.0.saturating_mul(2_u32.saturating_pow(failures)).min(self.within)
    }

    fn remember(&mut self, meta: &ObjectMeta, change: Change, failures: u32, at: Instant) {
        if failures == 1 && self.objects.len() >= MOST {
            self.more = true;
            return;
        }
        let failed = Failed { uid: meta.uid.clone(), change, failures, at };
        self.objects.insert(name(meta), failed);
    }

    pub(super) fn done(&mut self, meta: &ObjectMeta) {
        self.objects.remove(&name(meta));
        self.leaving.remove(&name(meta));
    }

    /// Keeps only objects whose names are `left`.
    pub(super) fn keep(&mut self, left: impl Fn(&String) -> bool) {
        self.objects.retain(|(_, name), _| name.as_ref().is_some_and(&left));
    }

    /// Whether the object's retry is later than `now`.
    pub(super) fn waits(&self, meta: &ObjectMeta, now: Instant) -> bool {
        self.objects.get(&name(meta)).is_some_and(|one| one.at > now)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty() && !self.more && self.leaving.is_empty()
    }

    /// Whether only objects are left that were not remembered, so that the kind must be listed again. Resets that.
    pub(super) fn overflows(&mut self) -> bool {
        self.objects.is_empty() && std::mem::take(&mut self.more)
    }

    /// The time of the next retry.
    pub(super) fn due(&self) -> Option<Instant> {
        self.objects.values().map(|one| one.at).min()
    }

    /// The next object that is due, and its change. It stays until [`RetryQueue::done`].
    pub(super) fn next(&self, now: Instant) -> Option<(ObjectMeta, Change)> {
        let due = self.objects.iter().filter(|(_, one)| one.at <= now);
        let ((namespace, name), one) = due.min_by_key(|(_, one)| one.at)?;
        let meta = ObjectMeta {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: one.uid.clone(),
            ..ObjectMeta::default()
        };
        Some((meta, one.change.clone()))
    }
}

fn name(meta: &ObjectMeta) -> Name {
    (meta.namespace.clone(), meta.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str) -> ObjectMeta {
        ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
    }

    fn labels() -> Change {
        [("a".to_owned(), Some("1".to_owned()))].into()
    }

    #[test]
    fn each_failed_object_is_retried_with_a_growing_delay() {
        let mut retries = RetryQueue::default();
        let start = Instant::now();
        assert_eq!((retries.is_empty(), retries.due()), (true, None));
        retries.failed(&object("a"), labels(), start);
        assert_eq!(retries.next(start), None, "not at once");
        let mut waits = Vec::new();
        let mut now = start;
        for _ in 0..9 {
            let due = retries.due().unwrap();
            waits.push((due - now).as_secs());
            now = due;
            let (again, needs) = retries.next(now).unwrap();
            assert_eq!((again.name.as_deref(), needs), (Some("a"), labels()));
            retries.failed(&again, labels(), now);
        }
        assert_eq!(waits, [5, 10, 20, 40, 80, 160, 320, 600, 600]);
        retries.failed(&object("b"), labels(), now);
        assert_eq!(retries.due(), Some(now + AGAIN.0), "each has its own time");
        retries.done(&object("a"));
        retries.done(&object("b"));
        assert!(retries.is_empty());
    }

    #[test]
    fn a_changed_object_is_retried_at_once_and_then_later() {
        let (mut retries, now) = (RetryQueue::default(), Instant::now());
        retries.leaves(&object("a"));
        assert!(!retries.changed(&object("a"), labels(), now));
        assert!(retries.next(now).is_some());
        assert!(retries.changed(&object("a"), labels(), now));
        assert_eq!((retries.next(now), retries.due()), (None, Some(now + AGAIN.0)));
        retries.failed(&object("a"), labels(), now);
        assert_eq!(retries.due(), Some(now + 4 * AGAIN.0));
        retries.leaves(&object("a"));
        assert!(retries.due().is_none() && !retries.is_empty());
    }

    #[test]
    fn a_terminating_object_is_waited_for_until_it_is_gone() {
        let mut retries = RetryQueue::default();
        retries.failed(&object("a"), labels(), Instant::now());
        retries.leaves(&object("a"));
        retries.leaves(&object("b"));
        assert_eq!((retries.is_empty(), retries.due()), (false, None), "it is not tried");
        retries.done(&object("a"));
        assert!(!retries.is_empty());
        retries.listed_anew();
        assert!(retries.is_empty());
    }

    #[test]
    fn an_overflow_is_remembered() {
        let mut retries = RetryQueue::default();
        let now = Instant::now();
        for number in 0..=MOST {
            retries.failed(&object(&number.to_string()), labels(), now);
        }
        assert_eq!(retries.objects.len(), MOST);
        assert!(!retries.overflows(), "first those that are known");
        for number in 0..MOST {
            retries.done(&object(&number.to_string()));
        }
        assert!(!retries.is_empty() && retries.overflows());
        assert!(retries.is_empty() && !retries.overflows());
    }
}
