//! Changes one website after the other, so that the operator always has something to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use kube::Client;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time;

use crate::bed::{Bed, sites, teams};

/// How long is waited between two changes.
const PAUSE: Duration = Duration::from_millis(50);

/// Changes websites until it is finished or dropped.
pub(crate) struct Load {
    over: Arc<AtomicBool>,
    changed: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Load {
    pub(crate) fn begin(bed: &Bed) -> Self {
        Self::of(bed, teams().collect())
    }

    /// The same, where this namespace has half of all changes.
    pub(crate) fn skewed(bed: &Bed, busy: &str) -> Self {
        let others = teams().filter(|team| team != busy);
        Self::of(bed, others.flat_map(|team| [busy.to_owned(), team]).collect())
    }

    /// Changes the websites of these namespaces by turns.
    fn of(bed: &Bed, turns: Vec<String>) -> Self {
        let (over, changed) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let task = tokio::spawn(change(bed.client.clone(), turns, over.clone(), changed.clone()));
        Self { over, changed, task }
    }

    /// Ends it; gives how many changes it made.
    pub(crate) async fn finish(self) -> Result<u64> {
        self.over.store(true, Ordering::Relaxed);
        self.task.await?;
        let changed = self.changed.load(Ordering::Relaxed);
        ensure!(changed > 0, "the load changed nothing");
        Ok(changed)
    }
}

async fn change(client: Client, turns: Vec<String>, over: Arc<AtomicBool>, changed: Arc<AtomicU64>) {
    for (number, team) in turns.iter().cycle().enumerate() {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let body = json!({"spec": {"title": format!("Change {number}")}}).to_string().into_bytes();
        let request = http::Request::patch(format!("{}/site", sites(team)));
        let request = request.header("content-type", "application/merge-patch+json").body(body);
        // The API server may be away: what counts is that the last change is worked on.
        let answer = match request {
            Ok(request) => client.request::<Value>(request).await.is_ok(),
            Err(_) => false,
        };
        changed.fetch_add(u64::from(answer), Ordering::Relaxed);
        time::sleep(PAUSE).await;
    }
}
