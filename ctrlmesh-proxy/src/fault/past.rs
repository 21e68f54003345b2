//! Remembers which version a collection had some time ago, so that a list can be answered from that state.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use tokio::time::Instant;

use crate::policy::ReadResource;

/// Collections of one pod that are recorded.
const MAX_COLLECTIONS: usize = 64;

/// So often is the version looked up within the age that is asked for.
const LOOKS_PER_AGE: u32 = 8;

/// The versions of the collections that are recorded in one pod.
#[derive(Debug, Default)]
pub(super) struct PastVersions {
    collections: Mutex<HashMap<Recorded, Versions>>,
}

/// A collection whose versions are recorded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Recorded {
    pub(crate) of: ReadResource,
    /// How old the state is to be.
    pub(crate) age: Duration,
}

/// The versions of one collection, each with a time at which it was the newest.
#[derive(Debug, Default)]
struct Versions {
    is_recorded: bool,
    seen: VecDeque<(Instant, u64)>,
}

/// Records the versions of a collection, until it is dropped.
#[derive(Debug)]
pub(crate) struct Recording {
    of: Arc<PastVersions>,
    what: Recorded,
}

impl PastVersions {
    /// The newest version that is old enough. One that is much older does not count: the API server may not have its
    /// state any more, or not the events since.
    pub(super) fn version(&self, of: &Recorded, now: Instant) -> Option<u64> {
        let newest = |versions: &Versions| versions.seen.iter().rev().find(|(at, _)| *at + of.age <= now).copied();
        let (at, version) = lock(&self.collections).get(of).and_then(newest)?;
        (now <= at + of.too_old()).then_some(version)
    }

    /// `None` where it is recorded already, or where there are too many.
    pub(super) fn record(self: &Arc<Self>, what: Recorded) -> Option<Recording> {
        let now = Instant::now();
        let mut collections = lock(&self.collections);
        if collections.len() >= MAX_COLLECTIONS {
            collections.retain(|of, versions| versions.is_recorded || !versions.are_too_old(of, now));
        }
        if collections.len() >= MAX_COLLECTIONS && !collections.contains_key(&what) {
            return None;
        }
        let versions = collections.entry(what.clone()).or_default();
        let was_recorded = std::mem::replace(&mut versions.is_recorded, true);
        drop(collections);
        (!was_recorded).then(|| Recording { of: self.clone(), what })
    }
}

impl Recorded {
    fn interval(&self) -> Duration {
        self.age / LOOKS_PER_AGE
    }

    fn too_old(&self) -> Duration {
        self.age + 2 * self.interval()
    }
}

impl Versions {
    fn are_too_old(&self, of: &Recorded, now: Instant) -> bool {
        self.seen.back().is_none_or(|(at, _)| *at + of.too_old() < now)
    }
}

impl Recording {
    /// The time between two looks.
    pub(crate) fn interval(&self) -> Duration {
        self.what.interval()
    }

    /// Adds the version that is the newest now.
    pub(crate) fn add(&self, version: u64) {
        let now = Instant::now();
        if let Some(Versions { seen, .. }) = lock(&self.of.collections).get_mut(&self.what) {
            // Of those that are old enough, the newest is enough.
            while seen.get(1).is_some_and(|(at, _)| *at + self.what.age <= now) {
                seen.pop_front();
            }
            seen.push_back((now, version));
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(versions) = lock(&self.of.collections).get_mut(&self.what) {
            versions.is_recorded = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::resource::ResourceKey;
    use tokio::time;

    use super::*;

    fn of(resource: &str) -> ReadResource {
        ReadResource::new(ResourceKey::of_host("", resource))
    }

    fn pods(age: u64) -> Recorded {
        Recorded { of: of("pods"), age: Duration::from_secs(age) }
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_version_that_is_old_enough_is_known_for_a_while() {
        let past = Arc::new(PastVersions::default());
        let (of, step) = (pods(8), Duration::from_secs(1));
        let recording = past.record(of.clone()).unwrap();
        assert_eq!(recording.interval(), step);
        assert!(past.record(of.clone()).is_none(), "it is recorded once");
        for version in 0..30_u64 {
            recording.add(version);
            assert_eq!(past.version(&of, Instant::now()), version.checked_sub(8), "version {version}");
            assert!(lock(&past.collections)[&of].seen.len() <= 10);
            time::advance(step).await;
        }
        drop(recording);
        assert_eq!(past.version(&of, Instant::now()), Some(22));
        time::advance(8 * step).await;
        assert_eq!(past.version(&of, Instant::now()), Some(29), "9 s old");
        time::advance(2 * step).await;
        assert_eq!(past.version(&of, Instant::now()), None, "11 s old");
        assert!(past.record(of).is_some(), "it may be recorded anew");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_recorded_no_more_makes_room() {
        let past = Arc::new(PastVersions::default());
        let all = |age| Recorded { of: of(&format!("kind-{age}")), ..pods(1) };
        let recordings: Vec<Recording> = (0..MAX_COLLECTIONS).map(|one| past.record(all(one)).unwrap()).collect();
        assert!(past.record(pods(1)).is_none(), "there are too many");
        recordings[0].add(1);
        drop(recordings);
        assert!(past.record(pods(1)).is_some());
        assert_eq!(lock(&past.collections).len(), 2, "of the others, only one has a version");
        time::advance(Duration::from_secs(2)).await;
        assert_eq!(past.version(&all(0), Instant::now()), None);
    }
}
