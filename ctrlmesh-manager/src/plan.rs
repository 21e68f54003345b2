//! What follows from what is in the cluster now?
//!
//! One task compiles whenever something changed, once for everybody: those who tell proxies, those who write, those who
//! admit pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task;
use tokio::time::{self, Instant};
use tracing::{error, warn};

use crate::cache::{Cache, Snapshot};
use crate::compile::{self, Compiled, Told};
use crate::drain::Drain;
use crate::pod::PodName;

/// How long changes are gathered before they are compiled: a rollout is many at once. Where compiling has just taken longer,
/// as long as that: of thousands of pods something changes all the time.
const GATHER: Duration = Duration::from_millis(20);

/// What follows.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// What it follows from.
    pub snapshot: Arc<Snapshot>,
    /// What follows.
    pub compiled: Compiled,
    /// What proxies may be told now, where that is not all of it.
    pub only_told: Option<BTreeMap<PodName, Told>>,
}

// === impl Plan ===

impl Plan {
    /// What proxies may be told now.
    pub fn told(&self) -> &BTreeMap<PodName, Told> {
        self.only_told.as_ref().unwrap_or(&self.compiled.policies)
    }

    /// Whether proxies wait for something to be written.
    pub fn waits(&self) -> bool {
        self.only_told.is_some()
    }
}

/// The newest plan. Until the cache has seen everything once, there is none.
pub type Plans = watch::Receiver<Option<Arc<Plan>>>;

/// Begins to compile what `cache` sees.
pub fn start(cache: Arc<Cache>, drain: &Drain) -> Plans {
    let (sender, plans) = watch::channel(None);
    drain.spawn_until_started(follow(cache, sender));
    plans
}

async fn follow(cache: Arc<Cache>, plans: watch::Sender<Option<Arc<Plan>>>) {
    cache.synced().await;
    let mut changes = cache.changes();
    let mut last = Arc::<Plan>::default();
    let mut troubles = Vec::new();
    loop {
        changes.mark_unchanged();
        let begun = Instant::now();
        let snapshot = cache.snapshot();
        let before = Arc::clone(&last);
        // Compiling for thousands of pods takes longer than others should have to wait.
        match task::spawn_blocking(move || of(snapshot, before.told())).await {
            Ok(plan) => {
                let new = plan.compiled.troubles.iter().filter(|one| !troubles.contains(*one));
                new.for_each(|one| warn!(object = %one.object, problem = %one.message, "refused"));
                troubles.clone_from(&plan.compiled.troubles);
                last = Arc::new(plan);
                plans.send_replace(Some(Arc::clone(&last)));
            }
            Err(error) => error!(%error, "compiling failed; the last plan stays"),
        }
        let rests_until = Instant::now() + begun.elapsed();
        if changes.changed().await.is_err() {
            return;
        }
        time::sleep_until(rests_until.max(Instant::now() + GATHER)).await;
    }
}

/// The plan for `snapshot`, where `before` is what proxies were told last.
pub fn of(snapshot: Snapshot, before: &BTreeMap<PodName, Told>) -> Plan {
    let compiled = compile::compile(snapshot.world(), before);
    let waits = compiled.operators.values().any(|record| !record.written);
    let only_told = waits.then(|| compile::tellable(&compiled, before));
    Plan { snapshot: Arc::new(snapshot), compiled, only_told }
}
