//! Assigns new pods to shards, one after another within a namespace.
//!
//! Pods that are created together are admitted together, here and by other replicas. Within a namespace they are placed
//! in turn, so that each counts for the next.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedMutexGuard;

use crate::admission::admit::{self, RecentPods, Review};
use crate::admission::blocking_pool::BlockingPool;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan::Plans;
use crate::rules::pod::Member;

mod namespace_locks;

use namespace_locks::NamespaceLocks;

#[derive(Debug)]
pub struct Placement {
    plans: Plans,
    locks: NamespaceLocks,
    pool: BlockingPool,
}

impl Placement {
    pub fn new(plans: Plans) -> Self {
        Self { plans, locks: NamespaceLocks::default(), pool: BlockingPool::default() }
    }

    /// None before the first plan.
    pub fn snapshot(&self) -> Option<Arc<Snapshot>> {
        self.plans.borrow().as_ref().map(|plan| Arc::clone(&plan.snapshot))
    }

    /// The pod of this request, where its shard depends on which other pods exist.
    pub fn shared(&self, review: &Review) -> Option<Member> {
        admit::shared_pod(review, &*self.snapshot()?)
    }

    /// Locks `namespace`, until the guard is dropped.
    pub async fn lock_namespace(&self, namespace: &str) -> OwnedMutexGuard<RecentPods> {
        self.locks.lock(namespace).await
    }

    /// Runs `work` with the current snapshot on a blocking thread; none where it panicked.
    pub async fn run<T: Send + 'static>(&self, pod: impl FnOnce(Option<&Snapshot>) -> T + Send + 'static) -> Option<T> {
        let plans = self.plans.clone();
        // The snapshot at the time of the work, not of the request.
        let work = move || {
            let plan = plans.borrow().clone();
            pod(plan.as_ref().map(|plan| &*plan.snapshot))
        };
        self.pool.run(work).await
    }

    /// Assigns `pod` a shard, for another replica. None where there is not exactly one.
    pub async fn give(&self, pod: Member) -> Option<String> {
        let mut recent = self.lock_namespace(&pod.name.namespace).await;
        let give = move |snapshot: Option<&Snapshot>| admit::assign_shard(&pod, snapshot?, &mut recent, Instant::now());
        self.run(give).await.flatten()
    }
}
