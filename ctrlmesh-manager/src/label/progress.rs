//! How far has labelling come?
//!
//! Of interest is a kind whose objects lack labels when it is gone through for the first time: after the keys or the hash
//! were changed, it is all of them, and until it is done shards do not see all that is theirs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::gauge::Gauge;

/// How far it has come, for whoever holds a copy.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<BTreeMap<String, Pass>>>);

/// What is known of a kind that is not finished.
#[derive(Clone, Debug, Default)]
struct Pass {
    /// Whether one that lacked labels has them.
    labelled: bool,
    /// Why one of them has not.
    failed: Option<String>,
}

/// Whether a kind is finished. It is not at first.
#[derive(Debug)]
pub(super) struct Unfinished {
    gauge: Gauge,
    progress: Progress,
    kind: String,
    is_set: bool,
}

// === impl Progress ===

impl Progress {
    /// What is left to do, where there is any.
    pub fn left(&self) -> Option<String> {
        let kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // No count: what says it would have to be written again for each object.
        let failed = kinds.iter().find_map(|(kind, pass)| Some((kind, pass.failed.as_ref()?)));
        if let Some((kind, why)) = failed {
            return Some(format!("not all objects of {kind} can be labelled: {why}"));
        }
        let begun = kinds.values().any(|pass| pass.labelled);
        begun.then(|| {
            let names: Vec<&str> = kinds.keys().map(String::as_str).collect();
            format!("not all objects of these kinds are labelled yet: {}", names.join(", "))
        })
    }

    fn of(&self, kind: &str, change: impl FnOnce(&mut Pass)) {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pass) = kinds.get_mut(kind) {
            change(pass);
        }
    }
}

// === impl Unfinished ===

impl Unfinished {
    pub(super) fn new(gauge: &Gauge, progress: &Progress, kind: &str) -> Self {
        let (gauge, progress, kind) = (gauge.clone(), progress.clone(), kind.to_owned());
        let mut this = Self { gauge, progress, kind, is_set: false };
        this.set(true);
        this
    }

    /// Says whether it is; returns whether that has changed.
    pub(super) fn set(&mut self, unfinished: bool) -> bool {
        if unfinished == self.is_set {
            return false;
        }
        self.is_set = unfinished;
        let mut kinds = self.progress.0.lock().unwrap_or_else(PoisonError::into_inner);
        if unfinished {
            self.gauge.inc();
            kinds.insert(self.kind.clone(), Pass::default());
        } else {
            self.gauge.dec();
            kinds.remove(&self.kind);
        }
        true
    }

    /// One that lacked labels has them.
    pub(super) fn labelled(&self) {
        self.progress.of(&self.kind, |pass| pass.labelled = true);
    }

    /// One cannot have them. Of several reasons the first is told, until there is none.
    pub(super) fn failed(&mut self, why: &str) {
        self.set(true);
        self.progress.of(&self.kind, |pass| {
            pass.failed.get_or_insert_with(|| why.to_owned());
        });
    }

    /// Why one cannot.
    pub(super) fn why(&self) -> Option<String> {
        let kinds = self.progress.0.lock().unwrap_or_else(PoisonError::into_inner);
        kinds.get(&self.kind)?.failed.clone()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_said_once_something_lacked_labels_and_until_it_is_gone_through() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let begin = |kind| Unfinished::new(&gauge, &progress, kind);
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
    fn what_cannot_be_labelled_is_said_also_of_a_kind_that_was_gone_through() {
        let (gauge, progress) = (Gauge::default(), Progress::default());
        let mut pods = Unfinished::new(&gauge, &progress, "pods");
        pods.set(false);
        pods.failed("forbidden");
        pods.failed("another reason");
        assert_eq!(pods.why().as_deref(), Some("forbidden"));
        let left = progress.left().unwrap();
        assert_eq!(left, "not all objects of pods can be labelled: forbidden");
        assert_eq!(gauge.get(), 1);
        pods.set(false);
        assert_eq!((progress.left(), gauge.get()), (None, 0));
    }
}
