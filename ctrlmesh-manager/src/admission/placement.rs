//! Who is given which shard next?
//!
//! Pods that are made at the same time are asked about at the same time, here and at other replicas. Those of one namespace
//! are given theirs one after another, so that each counts for the next.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedMutexGuard;

use crate::admission::admit::{self, Asked, Recent};
use crate::admission::blocking_pool::Judges;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan::Plans;
use crate::rules::pod::Member;

mod turns;

use turns::Turns;

/// Gives pods their shards.
#[derive(Debug)]
pub struct Seats {
    plans: Plans,
    turns: Turns,
    judges: Judges,
}

// === impl Seats ===

impl Seats {
    /// As `plans` say.
    pub fn new(plans: Plans) -> Self {
        Self { plans, turns: Turns::default(), judges: Judges::default() }
    }

    /// What is known now; none where nothing is yet.
    pub fn snapshot(&self) -> Option<Arc<Snapshot>> {
        self.plans.borrow().as_ref().map(|plan| Arc::clone(&plan.snapshot))
    }

    /// The pod that is asked about, where its shard depends on which others have come.
    pub fn shared(&self, asked: &Asked) -> Option<Member> {
        admit::shared(asked, &*self.snapshot()?)
    }

    /// Waits for the turn of a pod of `namespace`, which it has until what is given is dropped.
    pub async fn turn(&self, namespace: &str) -> OwnedMutexGuard<Recent> {
        self.turns.take(namespace).await
    }

    /// Judges `pod` by what is known, when there is room; none where the judge panicked.
    pub async fn judge<T: Send + 'static>(
        &self,
        pod: impl FnOnce(Option<&Snapshot>) -> T + Send + 'static,
    ) -> Option<T> {
        let plans = self.plans.clone();
        // What is known when it is its turn, not when it was asked.
        let judge = move || {
            let plan = plans.borrow().clone();
            pod(plan.as_ref().map(|plan| &*plan.snapshot))
        };
        self.judges.judge(judge).await
    }

    /// Gives `pod` a shard, for another replica that was asked about it; none where there is not exactly one for it.
    pub async fn give(&self, pod: Member) -> Option<String> {
        let mut recent = self.turn(&pod.name.namespace).await;
        let give = move |snapshot: Option<&Snapshot>| {
            admit::seat(&pod, snapshot?, &mut recent, Instant::now())
        };
        self.judge(give).await.flatten()
    }
}
