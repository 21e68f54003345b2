//! Simulates the connections of ten thousand proxies.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::wire::{Content, Hello, PodId, PolicySummary, Report, Verdict};
use prost::Message as _;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{self, Instant};

use crate::pods::OnePod;
use crate::simulated::link::{self, Followed, Link, ManagerAddress, Wait};

/// How often it is looked whether all have acknowledged.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// All of them.
pub(crate) struct Proxies {
    _tasks: JoinSet<()>,
    _folder: TempDir,
    counted: Arc<Rates>,
}

#[derive(Debug, Default)]
struct Rates {
    updates: AtomicUsize,
    down: AtomicUsize,
    up: AtomicUsize,
    /// When each of the latest was acknowledged.
    acknowledged: Mutex<Vec<Instant>>,
}

/// One of them.
struct Proxy {
    link: Link,
    pod: OnePod,
}

impl Proxies {
    /// Starts one for each pod.
    pub(crate) fn start(pods: &[OnePod], manager: ManagerAddress<'_>) -> Self {
        let folder = TempDir::new().unwrap();
        let (mut tasks, counted) = (JoinSet::new(), Arc::<Rates>::default());
        for (number, pod) in (0_u32..).zip(pods) {
            let link = Link::new(manager, folder.path(), &pod.uid, &pod.token, number);
            tasks.spawn(live(Proxy { link, pod: pod.clone() }, counted.clone()));
        }
        Self { _tasks: tasks, _folder: folder, counted }
    }

    /// When each of the next `count` policies was acknowledged, in this order, once all were.
    pub(crate) async fn acknowledged(&self, count: usize) -> Vec<Instant> {
        loop {
            {
                let mut times = self.counted.acknowledged.lock().unwrap();
                if times.len() >= count {
                    return std::mem::take(&mut times);
                }
            }
            time::sleep(LOOK_EVERY).await;
        }
    }

    /// Of one policy, the bytes of the message down and of that up.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let updates = self.counted.updates.load(Ordering::Relaxed).max(1);
        let of = |bytes: &AtomicUsize| bytes.load(Ordering::Relaxed) / updates;
        (of(&self.counted.down), of(&self.counted.up))
    }
}

async fn live(proxy: Proxy, counted: Arc<Rates>) {
    let mut known = None;
    let mut ticket = Bytes::new();
    let mut wait = Wait::begin().await;
    loop {
        let before = known.clone();
        drop(follow(&proxy, (&mut known, &mut ticket), &counted).await);
        wait.before_next(known != before).await;
    }
}

async fn follow(
    Proxy { link, pod }: &Proxy,
    (known, ticket): (&mut Option<PolicySummary>, &mut Bytes),
    counted: &Rates,
) -> anyhow::Result<()> {
    let id = PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() };
    let hello = Hello { pod: Some(id), known: known.iter().cloned().collect(), ..Hello::default() };
    // The connection ends with its last handle.
    let Followed { connection: _connection, mut updates, reports } = link.follow(hello, ticket).await?;
    while let Some(update) = updates.message().await? {
        counted.down.fetch_add(update.encoded_len(), Ordering::Relaxed);
        if !update.ticket.is_empty() {
            *ticket = Bytes::copy_from_slice(&update.ticket);
        }
        for entry in update.policies {
            let epoch = link::policy(&entry).epoch;
            *known = Some(link::summary(&entry, epoch));
            let verdict = Verdict { pod: entry.pod, digest: entry.digest, epoch, refused: String::new() };
            let report = Report { content: Some(Content::Verdict(verdict)) };
            counted.updates.fetch_add(1, Ordering::Relaxed);
            counted.up.fetch_add(report.encoded_len(), Ordering::Relaxed);
            reports.send(report).await?;
            counted.acknowledged.lock().unwrap().push(Instant::now());
        }
    }
    Ok(())
}
