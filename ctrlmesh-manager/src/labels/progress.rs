//! Tracks which kinds are not completely labelled.
//!
//! A kind is unfinished until its first pass ends: before that, shards miss some of their objects. A kind that cannot
//! be watched or labelled, and an unreadable list of kinds, are reported, too.
//!
//! A migration waits until every kind is finished and new objects are labelled at admission.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ctrlmesh_runtime::sync::lock;
use prometheus_client::metrics::gauge::Gauge;

use crate::rules::label_scheme::Scheme;

/// The scheme and progress of the current labeller. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct CurrentProgress(Arc<Mutex<Option<Run>>>);

type Run = (Arc<Scheme>, Progress);

/// Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    kinds: BTreeMap<String, Pass>,
    /// Why the list of kinds is incomplete.
    list: Option<String>,
    /// Whether labelling at admission works; none before the first try.
    at_once: Option<Result<(), String>>,
    /// Number of passes that have begun.
    begun: u64,
    repaired: u64,
}

/// The state of an unfinished kind.
#[derive(Clone, Debug, Default)]
struct Pass {
    /// Number of the pass. Reports of an older pass are ignored.
    by: u64,
    /// Whether an object without an owner was labelled.
    labelled: bool,
    /// Why an object could not be labelled.
    failed: Option<String>,
    unseen: Option<String>,
}

/// Reports problems with the list of kinds. Initially there are none.
#[derive(Debug)]
pub(super) struct ListProgress {
    gauge: Gauge,
    progress: Progress,
}

/// Reports the progress of one kind. Initially it is unfinished.
#[derive(Debug)]
pub(super) struct KindProgress {
    gauge: Gauge,
    progress: Progress,
    kind: String,
    by: u64,
    is_set: bool,
}

impl CurrentProgress {
    /// Starts a new progress for `scheme`; none: this replica does not label.
    pub fn set(&self, scheme: Option<Arc<Scheme>>) -> Progress {
        let progress = Progress::default();
        let current = scheme.map(|scheme| (scheme, progress.clone()));
        *lock(&self.0) = current;
        progress
    }

    /// None where another scheme is in progress.
    pub fn of(&self, scheme: &Scheme) -> Option<Progress> {
        let current = lock(&self.0).clone();
        current.filter(|(current, _)| **current == *scheme).map(|(_, progress)| progress)
    }

    /// Why some objects may have no owner; none where all have one.
    pub fn left(&self) -> Option<String> {
        let current = lock(&self.0).clone();
        current.and_then(|(_, progress)| progress.left())
    }
}

impl Progress {
    /// Why some objects may have no owner; none where all have one.
    pub fn left(&self) -> Option<String> {
        let state = lock(&self.0);
        if let Some(why) = &state.list {
            return Some(format!("not all that is listed can be labelled: {why}"));
        }
        // Without a count, so that the status is not written for every object.
        if let Some(why) = state.kinds.iter().find_map(|(kind, pass)| pass.why(kind)) {
            return Some(why);
        }
        let begun = state.kinds.values().any(|pass| pass.labelled);
        let names: Vec<String> = state.kinds.keys().cloned().collect();
        drop(state);
        begun.then(|| format!("not all objects of these kinds are labelled yet: {}", names.join(", ")))
    }

    /// Why some objects may lack a label; none where all have all.
    pub fn unfinished(&self) -> Option<String> {
        lock(&self.0).unfinished()
    }

    /// Number of labelled objects. While it grows, objects are still written without labels.
    pub fn repaired(&self) -> u64 {
        lock(&self.0).repaired
    }

    pub(super) fn repair(&self) {
        lock(&self.0).repaired += 1;
    }

    /// Reports whether labelling at admission works.
    pub(super) fn at_once(&self, set_up: Result<(), String>) {
        lock(&self.0).at_once = Some(set_up);
    }

    fn update(&self, kind: &str, by: u64, change: impl FnOnce(&mut Pass)) {
        let mut state = lock(&self.0);
        if let Some(pass) = state.kinds.get_mut(kind).filter(|pass| pass.by == by) {
            change(pass);
        }
    }
}

impl State {
    fn unfinished(&self) -> Option<String> {
        let wrong = match (&self.list, &self.at_once) {
            (Some(why), _) => Some(format!("not all that is listed can be labelled: {why}")),
            (None, Some(Err(why))) => Some(format!("what is written is not labelled at once: {why}")),
            (None, None) => Some("it has only begun".to_owned()),
            (None, Some(Ok(()))) => None,
        };
        let names = || self.kinds.keys().cloned().collect::<Vec<_>>().join(", ");
        let left = || (!self.kinds.is_empty()).then(|| format!("not gone through yet: {}", names()));
        wrong.or_else(|| self.kinds.iter().find_map(|(kind, pass)| pass.why(kind))).or_else(left)
    }
}

impl Pass {
    /// Why objects of `kind` cannot be labelled.
    fn why(&self, kind: &str) -> Option<String> {
        let unseen = self.unseen.as_ref().map(|why| format!("cannot be seen: {why}"));
        let why = unseen
            .or_else(|| Some(format!("cannot all be labelled, and are tried again: {}", self.failed.as_ref()?)))?;
        Some(format!("the objects of {kind} {why}"))
    }
}

impl ListProgress {
    pub(super) fn new(gauge: &Gauge, progress: &Progress) -> Self {
        Self { gauge: gauge.clone(), progress: progress.clone() }
    }

    /// Reports a problem, or none. Returns whether it is a new one.
    pub(super) fn report(&self, why: Option<String>) -> bool {
        let mut state = lock(&self.progress.0);
        match (&state.list, &why) {
            (None, Some(_)) => drop(self.gauge.inc()),
            (Some(_), None) => drop(self.gauge.dec()),
            _ => {}
        }
        let new = why.is_some() && state.list != why;
        state.list = why;
        new
    }
}

impl Drop for ListProgress {
    fn drop(&mut self) {
        self.report(None);
    }
}

impl KindProgress {
    pub(super) fn new(gauge: &Gauge, progress: &Progress, kind: &str) -> Self {
        let (gauge, progress, kind) = (gauge.clone(), progress.clone(), kind.to_owned());
        let by = {
            let mut state = lock(&progress.0);
            state.begun += 1;
            state.begun
        };
        let mut this = Self { gauge, progress, kind, by, is_set: false };
        this.set(true);
        this
    }

    /// Returns whether that changed.
    pub(super) fn set(&mut self, unfinished: bool) -> bool {
        if unfinished == self.is_set {
            return false;
        }
        self.is_set = unfinished;
        let mut state = lock(&self.progress.0);
        if unfinished {
            self.gauge.inc();
            // A newer pass replaces an older one that still runs.
            if state.kinds.get(&self.kind).is_none_or(|pass| pass.by < self.by) {
                let pass = Pass { by: self.by, ..Pass::default() };
                state.kinds.insert(self.kind.clone(), pass);
            }
        } else {
            self.gauge.dec();
            if state.kinds.get(&self.kind).is_some_and(|pass| pass.by == self.by) {
                state.kinds.remove(&self.kind);
            }
        }
        true
    }

    /// An object without an owner was labelled.
    pub(super) fn labelled(&self) {
        self.progress.update(&self.kind, self.by, |pass| pass.labelled = true);
    }

    /// An object could not be labelled. The first reason is kept.
    pub(super) fn failed(&mut self, why: &str) {
        self.set(true);
        self.progress.update(&self.kind, self.by, |pass| {
            pass.failed.get_or_insert_with(|| why.to_owned());
        });
    }

    /// The kind cannot be watched, or can be again. The first reason is kept.
    pub(super) fn unseen(&mut self, why: Option<&str>) {
        if why.is_some() {
            self.set(true);
        }
        self.progress.update(&self.kind, self.by, |pass| match why {
            Some(why) => drop(pass.unseen.get_or_insert_with(|| why.to_owned())),
            None => pass.unseen = None,
        });
    }

    /// Why objects of this kind cannot be labelled.
    pub(super) fn why(&self) -> Option<String> {
        let state = lock(&self.progress.0);
        state.kinds.get(&self.kind)?.why(&self.kind)
    }
}

impl Drop for KindProgress {
    fn drop(&mut self) {
        self.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlabelled_kinds_are_reported_until_their_pass_ends() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let begin = |kind| KindProgress::new(&gauge, &progress, kind);
        let (mut pods, maps) = (begin("pods"), begin("configmaps"));
        assert_eq!((progress.left(), gauge.get()), (None, 2), "nothing lacked any");
        maps.labelled();
        let left = progress.left().unwrap();
        assert!(left.ends_with(": configmaps, pods"), "{left}");
        drop(maps);
        assert_eq!((progress.left(), gauge.get()), (None, 1));
        pods.labelled();
        assert!(progress.left().is_some_and(|left| left.ends_with(": pods")));
        assert!(pods.set(false) && !pods.set(false));
        assert_eq!((progress.left(), gauge.get()), (None, 0));
    }

    #[test]
    fn all_kinds_and_admission_must_be_finished() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let list = ListProgress::new(&gauge, &progress);
        let mut pods = KindProgress::new(&gauge, &progress, "pods");
        let unfinished = || progress.unfinished().unwrap_or_default();
        assert_eq!(unfinished(), "it has only begun", "no kind is known yet");
        progress.at_once(Err("forbidden".to_owned()));
        assert!(unfinished().ends_with("forbidden"));
        progress.at_once(Ok(()));
        assert_eq!(unfinished(), "not gone through yet: pods");
        assert_eq!(progress.left(), None, "nothing lacks what shards go by");
        pods.set(false);
        assert_eq!(progress.unfinished(), None);
        list.report(Some("bad".to_owned()));
        assert!(unfinished().ends_with(": bad"));
        list.report(None);
        pods.failed("gone wrong");
        assert!(unfinished().contains("gone wrong"));
    }

    #[test]
    fn a_late_pass_does_not_end_its_successor() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        progress.at_once(Ok(()));
        let old = KindProgress::new(&gauge, &progress, "pods");
        let new = KindProgress::new(&gauge, &progress, "pods");
        drop(old);
        assert!(progress.unfinished().is_some());
        drop(new);
        assert_eq!((progress.unfinished(), gauge.get()), (None, 0));
    }

    #[test]
    fn failures_are_reported_also_after_a_pass() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let mut pods = KindProgress::new(&gauge, &progress, "pods");
        pods.set(false);
        pods.failed("forbidden");
        pods.failed("another reason");
        let left = progress.left().unwrap();
        let why = "the objects of pods cannot all be labelled, and are tried again: forbidden";
        assert_eq!((left.as_str(), pods.why().as_deref()), (why, Some(why)));
        assert_eq!(gauge.get(), 1);
        pods.set(false);
        assert_eq!((progress.left(), gauge.get()), (None, 0));
    }

    #[test]
    fn an_unwatchable_kind_is_reported_until_it_is_watched() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let mut pods = KindProgress::new(&gauge, &progress, "pods");
        pods.set(false);
        pods.unseen(Some("forbidden"));
        let why = Some("the objects of pods cannot be seen: forbidden".to_owned());
        assert_eq!((progress.left(), pods.why(), gauge.get()), (why.clone(), why, 1));
        pods.unseen(None);
        assert_eq!((progress.left(), pods.why()), (None, None));
    }

    #[test]
    fn problems_of_the_list_are_reported_once() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let list = ListProgress::new(&gauge, &progress);
        assert!(!list.report(None));
        assert!(list.report(Some("bad".to_owned())) && !list.report(Some("bad".to_owned())));
        assert!(list.report(Some("worse".to_owned())));
        assert_eq!(gauge.get(), 1);
        let left = progress.left().unwrap();
        assert!(left.ends_with("can be labelled: worse"), "{left}");
        drop(list);
        assert_eq!((progress.left(), gauge.get()), (None, 0), "another replica reads it now");
    }
}
