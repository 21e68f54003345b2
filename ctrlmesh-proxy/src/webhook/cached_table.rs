//! Knows since when the watches of a pod show what its policy gives it.
//!
//! An operator that is given a namespace sees its objects a moment later. A review in that moment would be answered
//! from a cache without them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_runtime::sync::lock;
use tokio::time;
use tokio::time::Instant;

use crate::policy::History;

/// From when the events are sent to when the operator has them in its cache, which nobody but the operator sees: long,
/// since an operator that gets much at once is busy.
const CACHE_DELAY: Duration = Duration::from_secs(1);

/// The policy that the watches follow, and since when. `None` before the first review.
#[derive(Debug, Default)]
pub(super) struct CachedTable(Mutex<Option<(Arc<Policy>, Instant)>>);

impl CachedTable {
    /// Waits until no watch shows the share of an earlier policy, and the operator has had time to read its events. A
    /// watch that does not follow holds up the first reviews only, and not beyond `until`.
    pub(super) async fn wait(&self, policy: &Arc<Policy>, history: &History, until: Instant) {
        let since = if let Some(since) = self.since(policy) {
            since
        } else {
            drop(time::timeout_at(until, history.read_by_nobody_but(policy)).await);
            self.record(policy)
        };
        time::sleep_until((since + CACHE_DELAY).min(until)).await;
    }

    fn since(&self, policy: &Arc<Policy>) -> Option<Instant> {
        lock(&self.0).as_ref().filter(|(followed, _)| gives_the_same(followed, policy)).map(|(_, since)| *since)
    }

    /// The moment that the first of several reviews has recorded.
    fn record(&self, policy: &Arc<Policy>) -> Instant {
        let known = self.since(policy);
        let since = known.unwrap_or_else(Instant::now);
        *lock(&self.0) = Some((policy.clone(), since));
        since
    }
}

/// Whether both are of one ownership table. Others change where pods are, and no cache.
pub(super) fn gives_the_same(one: &Arc<Policy>, other: &Arc<Policy>) -> bool {
    Arc::ptr_eq(one, other) || one.epoch == other.epoch && one.fence == other.fence
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Limit;
    use ctrlmesh_common::resource::ResourceKey;
    use ctrlmesh_common::selector::Selector;

    use super::*;
    use crate::policy::ReadOf;

    const UNTIL: Duration = Duration::from_secs(5);

    fn policy(epoch: u64) -> Arc<Policy> {
        let selector = Selector::parse(&format!("epoch={epoch}")).unwrap();
        Arc::new(Policy { epoch, limits: vec![Limit { selector, ..Limit::default() }], ..Policy::default() })
    }

    /// How long a review waits.
    async fn waited(followed: &CachedTable, policy: &Arc<Policy>, history: &History) -> Duration {
        let begun = Instant::now();
        followed.wait(policy, history, begun + UNTIL).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn only_reviews_soon_after_a_new_table_wait() {
        let (followed, history) = (CachedTable::default(), History::default());
        assert_eq!(waited(&followed, &policy(1), &history).await, CACHE_DELAY);
        assert_eq!(waited(&followed, &policy(1), &history).await, Duration::ZERO);
        assert_eq!(waited(&followed, &policy(2), &history).await, CACHE_DELAY);
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_wait_for_watches_of_an_earlier_table() {
        let (followed, history) = (CachedTable::default(), History::default());
        let watch = history.in_force(&policy(1)).read(ReadOf::resource(ResourceKey::of_host("", "pods")));
        let follows = async {
            time::sleep(CACHE_DELAY).await;
            drop(watch);
        };
        let second = policy(2);
        let (waited, ()) = tokio::join!(waited(&followed, &second, &history), follows);
        assert_eq!(waited, 2 * CACHE_DELAY);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_does_not_follow_holds_up_the_first_review_only() {
        let (followed, history) = (CachedTable::default(), History::default());
        let _watch = history.in_force(&policy(1)).read(ReadOf::resource(ResourceKey::of_host("", "pods")));
        let second = policy(2);
        assert_eq!(waited(&followed, &second, &history).await, UNTIL);
        assert_eq!(waited(&followed, &second, &history).await, CACHE_DELAY);
        assert_eq!(waited(&followed, &second, &history).await, Duration::ZERO);
    }
}
