//! How far has labelling come?
//!
//! Of interest is a kind whose objects lack labels when it is gone through for the first time: after the keys or the hash
//! were changed, it is all of them, and until it is done shards do not see all that is theirs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// How far it has come, for whoever holds a copy.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<BTreeMap<String, u64>>>);

/// A kind that is gone through; it is done when this is dropped.
#[derive(Debug)]
pub(super) struct Pass {
    progress: Progress,
    kind: String,
}

// === impl Progress ===

impl Progress {
    /// What is left to do, where there is any.
    pub fn left(&self) -> Option<String> {
        let kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let begun = kinds.values().any(|labelled| *labelled > 0);
        // No count: what says it would have to be written again for each object.
        begun.then(|| {
            let names: Vec<&str> = kinds.keys().map(String::as_str).collect();
            format!("not all objects of these kinds are labelled yet: {}", names.join(", "))
        })
    }

    pub(super) fn begin(&self, kind: &str) -> Pass {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(kind.to_owned(), 0);
        Pass { progress: self.clone(), kind: kind.to_owned() }
    }
}

// === impl Pass ===

impl Pass {
    /// One that lacked labels has them.
    pub(super) fn labelled(&self) {
        let mut kinds = self.progress.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(labelled) = kinds.get_mut(&self.kind) {
            *labelled += 1;
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.progress.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_said_once_something_lacked_labels_and_until_it_is_gone_through() {
        let progress = Progress::default();
        let (pods, maps) = (progress.begin("pods"), progress.begin("configmaps"));
        assert_eq!(progress.left(), None, "nothing lacked any");
        maps.labelled();
        let left = progress.left().unwrap();
        assert!(left.ends_with(": configmaps, pods"), "{left}");
        drop(maps);
        assert_eq!(progress.left(), None);
        pods.labelled();
        assert!(progress.left().is_some_and(|left| left.ends_with(": pods")));
    }
}
