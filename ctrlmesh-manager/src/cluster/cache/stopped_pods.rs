//! Remembers which pods were seen to end, because they may be deleted before the next decision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use futures::{Stream, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{self, Event};
use tokio::time::Instant;

use super::Cache;
use crate::rules::pod::Member;

/// Longer than any decision takes. After it, the pod counts as gone because it does not exist.
const KEPT: Duration = Duration::from_mins(1);

/// By UID.
#[derive(Debug, Default)]
pub(super) struct StoppedPods(BTreeMap<String, Instant>);

impl StoppedPods {
    pub(super) fn uids(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }

    fn note(&mut self, pod: &Member, now: Instant) {
        self.0.retain(|_, noted| now.saturating_duration_since(*noted) < KEPT);
        if pod.stopped {
            self.0.insert(pod.uid.clone(), now);
        }
    }
}

impl Cache {
    /// The same events; what they say of ended pods is noted first.
    pub(super) fn note_stopped(
        self: Arc<Self>,
        events: impl Stream<Item = watcher::Result<Event<Pod>>>,
    ) -> impl Stream<Item = watcher::Result<Event<Pod>>> {
        events.inspect_ok(move |event| {
            let (Event::Apply(pod) | Event::InitApply(pod) | Event::Delete(pod)) = event else { return };
            lock(&self.state).stopped.note(&Member::from(pod), Instant::now());
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ended_pods_are_remembered_and_only_for_a_while() {
        let (mut stopped, start) = (StoppedPods::default(), Instant::now());
        let pod = |uid: &str, stopped| Member { uid: uid.to_owned(), stopped, ..Member::default() };
        stopped.note(&pod("a", true), start);
        stopped.note(&pod("b", false), start);
        assert_eq!(stopped.uids(), ["a".to_owned()].into());
        stopped.note(&pod("c", true), start + KEPT);
        assert_eq!(stopped.uids(), ["c".to_owned()].into());
    }
}
