//! Decides which namespaces are labelled now.
//!
//! Pure. New namespaces come first, because their objects are not labelled at admission before. A namespace that failed
//! is retried with a growing delay of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use tokio::time::Instant;

use super::retry_queue::RetryQueue;
use super::{Change, Scope, change, is_waited_for};
use crate::cluster::cache::NamespaceInfo;
use crate::rules::label_scheme::Scheme;

/// Longest delay of a retry. Objects of the namespace are not labelled at admission before.
const WITHIN: Duration = Duration::from_mins(1);

/// Delay after a conflict, for the watch to show the new version.
const MOMENT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Namespaces {
    before: BTreeSet<String>,
    retries: RetryQueue,
    /// A terminating namespace that a migration waits for.
    leaving: Option<String>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Self { before: BTreeSet::new(), retries: RetryQueue::within(WITHIN), leaving: None }
    }
}

impl Namespaces {
    /// The namespaces to label at `now`, each with its change.
    pub(super) fn due(
        &mut self,
        known: &BTreeMap<String, NamespaceInfo>,
        scheme: &Scheme,
        now: Instant,
    ) -> Vec<(ObjectMeta, Change)> {
        let (mut unlabelled, mut leaving) = (BTreeMap::<&String, Change>::new(), None);
        for (name, known) in known {
            let leaves = known.terminating.then_some(Time(Timestamp::UNIX_EPOCH));
            let labels = Some(known.labels.clone());
            let meta = ObjectMeta { labels, deletion_timestamp: leaves, ..named(name) };
            if is_waited_for(&meta, Scope::Namespace, scheme) {
                leaving.get_or_insert_with(|| name.clone());
            }
            let change = change(&meta, Scope::Namespace, scheme);
            unlabelled.extend(change.map(|change| (name, change)));
        }
        self.leaving = leaving;
        self.retries.keep(|name| unlabelled.contains_key(name));
        unlabelled.retain(|name, _| !self.retries.waits(&named(name), now));
        let (old, new): (Vec<_>, Vec<_>) = unlabelled.into_iter().partition(|(name, _)| self.before.contains(*name));
        self.before = known.keys().cloned().collect();
        let seen = |name: &String| ObjectMeta {
            uid: known[name].uid.clone(),
            resource_version: known[name].version.clone(),
            ..named(name)
        };
        new.into_iter().chain(old).map(|(name, labels)| (seen(name), labels)).collect()
    }

    pub(super) fn failed(&mut self, meta: &ObjectMeta, change: Change, now: Instant) {
        self.retries.failed(meta, change, now);
    }

    /// The namespace changed meanwhile. Returns whether that happened before.
    pub(super) fn changed(&mut self, meta: &ObjectMeta, change: Change, now: Instant) -> bool {
        self.retries.changed(meta, change, now + MOMENT)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.retries.is_empty() && self.leaving.is_none()
    }

    /// A terminating namespace that a migration waits for.
    pub(super) fn leaving(&self) -> Option<&str> {
        self.leaving.as_deref()
    }

    pub(super) fn done(&mut self, meta: &ObjectMeta) {
        self.retries.done(meta);
    }

    /// The time of the next retry.
    pub(super) fn again(&self) -> Option<Instant> {
        self.retries.due()
    }
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known<const N: usize>(names: [&str; N]) -> BTreeMap<String, NamespaceInfo> {
        names.map(|name| (name.to_owned(), NamespaceInfo::default())).into()
    }

    fn due(of: &mut Namespaces, known: &BTreeMap<String, NamespaceInfo>, now: Instant) -> Vec<String> {
        let due = of.due(known, &Scheme::default(), now);
        due.into_iter().filter_map(|(meta, _)| meta.name).collect()
    }

    #[test]
    fn new_namespaces_first_labelled_and_terminating_never() {
        let (mut namespaces, now) = (Namespaces::default(), Instant::now());
        assert_eq!(due(&mut namespaces, &known(["b", "c"]), now), ["b", "c"]);
        let mut more = known(["a", "b", "c", "d", "e"]);
        let labels = change(&named("d"), Scope::Namespace, &Scheme::default()).unwrap();
        let labels = labels.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        more.insert("d".to_owned(), NamespaceInfo { labels, ..NamespaceInfo::default() });
        more.insert("c".to_owned(), NamespaceInfo { terminating: true, ..NamespaceInfo::default() });
        assert_eq!(due(&mut namespaces, &more, now), ["a", "e", "b"]);
    }

    #[test]
    fn a_conflict_is_retried_with_the_new_version() {
        let (mut namespaces, now) = (Namespaces::default(), Instant::now());
        let mut take = |uid: &str, version: &str, now| {
            let (uid, version) = (Some(uid.to_owned()), Some(version.to_owned()));
            let known = NamespaceInfo { uid, version, ..NamespaceInfo::default() };
            let all = [("a".to_owned(), known)].into();
            let due = namespaces.due(&all, &Scheme::default(), now);
            due.into_iter().next().map(|(meta, change)| {
                let goes_on = namespaces.changed(&meta, change, now);
                (meta.uid.unwrap(), meta.resource_version.unwrap(), goes_on)
            })
        };
        assert_eq!(take("1", "5", now), Some(("1".to_owned(), "5".to_owned(), false)));
        assert_eq!(take("1", "5", now), None, "the watch is to bring it first");
        assert_eq!(take("2", "7", now + MOMENT), Some(("2".to_owned(), "7".to_owned(), true)));
    }

    #[test]
    fn retries_have_growing_delays_despite_changes() {
        let (mut namespaces, all) = (Namespaces::default(), known(["a", "b"]));
        let (mut now, mut waits) = (Instant::now(), Vec::new());
        for _ in 0..6 {
            let (meta, labels) = namespaces.due(&all, &Scheme::default(), now).into_iter().next().unwrap();
            assert_eq!(meta.name.as_deref(), Some("a"));
            namespaces.failed(&meta, labels, now);
            let again = namespaces.again().unwrap();
            let before = again - Duration::from_millis(1);
            assert_eq!(due(&mut namespaces, &all, before), ["b"], "something else has changed");
            waits.push((again - now).as_secs());
            now = again;
        }
        assert_eq!(waits, [5, 10, 20, 40, 60, 60]);
        assert_eq!(due(&mut namespaces, &known(["b"]), now), ["b"]);
        assert_eq!(namespaces.again(), None, "what is gone is not waited for");
        assert_eq!(due(&mut namespaces, &all, now), ["a", "b"], "and is new when it comes back");
    }
}
