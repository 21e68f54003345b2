//! Simulates the proxies of all nodes.
//!
//! Each puts the policies of its pods in force at once, acknowledges them, and has them confirmed where they lapse.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ctrlmesh_common::wire::{
    Content, Ended, EndedReport, Hello, PodEntry, PodId, PolicyInForce, PolicySummary, Report, Update, Verdict,
};
use ctrlmesh_proxy::manager_client::Connection;
use tempfile::TempDir;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{self, Instant};

use crate::operators::Operators;
use crate::simulated::link::{self, Followed, Link, ManagerAddress, Wait};

/// How often a policy is confirmed, as by the real one.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// The same where not all was confirmed.
const RENEW_AGAIN: Duration = Duration::from_secs(1);

/// For the answer.
const RENEW_WITHIN: Duration = Duration::from_secs(3);

/// A node, and the token of its proxy.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) token: String,
}

/// All of them.
pub(crate) struct Proxies {
    _tasks: JoinSet<()>,
    _folder: TempDir,
    /// By node.
    reports: BTreeMap<String, mpsc::UnboundedSender<Report>>,
}

/// One of them.
struct Proxy {
    link: Link,
    node: String,
    operators: Arc<Operators>,
    /// What it has in force.
    in_force: Mutex<BTreeMap<PodId, PodInForce>>,
    ticket: Mutex<Bytes>,
    /// A pod has a policy that is not confirmed.
    unconfirmed: Notify,
}

struct PodInForce {
    summary: PolicySummary,
    lapses: bool,
}

impl Proxies {
    /// Starts one for each node.
    pub(crate) fn start(nodes: &[Node], manager: ManagerAddress<'_>, operators: &Arc<Operators>) -> Self {
        let folder = TempDir::new().unwrap();
        let (mut tasks, mut reports) = (JoinSet::new(), BTreeMap::new());
        for (number, node) in (0_u32..).zip(nodes) {
            let proxy = Proxy {
                link: Link::new(manager, folder.path(), &node.name, &node.token, number),
                node: node.name.clone(),
                operators: operators.clone(),
                in_force: Mutex::default(),
                ticket: Mutex::default(),
                unconfirmed: Notify::new(),
            };
            let (sender, outbox) = mpsc::unbounded_channel();
            reports.insert(node.name.clone(), sender);
            tasks.spawn(proxy.live(outbox));
        }
        Self { _tasks: tasks, _folder: folder, reports }
    }

    /// The proxy of `node` reports that these containers of a pod have ended.
    pub(crate) fn report_ended(&self, node: &str, pod: PodId, containers: Vec<String>) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
        let ended = Ended { since: u64::try_from(now).unwrap(), containers };
        let content = Content::Ended(EndedReport { pod: Some(pod), ended: Some(ended) });
        self.reports[node].send(Report { content: Some(content) }).unwrap();
    }
}

impl Proxy {
    async fn live(self, mut outbox: mpsc::UnboundedReceiver<Report>) {
        let mut wait = Wait::begin().await;
        loop {
            let begun = Instant::now();
            if let Err(error) = self.follow(&mut outbox).await {
                eprintln!("{}: {error:#}", self.node);
            }
            wait.before_next(begun.elapsed() > RENEW_EVERY).await;
        }
    }

    async fn follow(&self, outbox: &mut mpsc::UnboundedReceiver<Report>) -> anyhow::Result<()> {
        let known = self.in_force.lock().unwrap().values().map(|one| one.summary.clone()).collect();
        let hello = Hello { node: self.node.clone(), known, ..Hello::default() };
        let ticket = self.ticket.lock().unwrap().clone();
        let Followed { connection, mut updates, reports } = self.link.follow(hello, &ticket).await?;
        let take = async {
            loop {
                tokio::select! {
                    update = updates.message() => match update? {
                        Some(update) => self.take(update, &reports).await?,
                        None => return Ok(()),
                    },
                    Some(report) = outbox.recv() => reports.send(report).await?,
                }
            }
        };
        tokio::select! {
            ended = take => ended,
            () = self.renew(connection) => Ok(()),
        }
    }

    async fn take(&self, update: Update, reports: &mpsc::Sender<Report>) -> anyhow::Result<()> {
        let at = Instant::now();
        if !update.ticket.is_empty() {
            *self.ticket.lock().unwrap() = Bytes::copy_from_slice(&update.ticket);
        }
        for pod in update.gone {
            self.in_force.lock().unwrap().remove(&pod);
        }
        for entry in update.policies {
            let verdict = self.apply(entry, at);
            reports.send(Report { content: Some(Content::Verdict(verdict)) }).await?;
        }
        Ok(())
    }

    /// Nothing is under way here that a policy could forbid: it is in force at once.
    fn apply(&self, entry: PodEntry, at: Instant) -> Verdict {
        let policy = link::policy(&entry);
        let epoch = policy.epoch;
        let lapses = policy.fence.as_ref().is_some_and(|fence| fence.lapses);
        let summary = link::summary(&entry, epoch);
        let pod = entry.pod.clone().unwrap_or_default();
        self.in_force.lock().unwrap().insert(pod.clone(), PodInForce { summary, lapses });
        if self.operators.apply(&pod, policy, at) {
            self.unconfirmed.notify_one();
        }
        Verdict { pod: entry.pod, digest: entry.digest, epoch, refused: String::new() }
    }

    async fn renew(&self, mut connection: Connection) {
        loop {
            let wait = if self.renew_once(&mut connection).await { RENEW_EVERY } else { RENEW_AGAIN };
            tokio::select! {
                () = time::sleep(wait) => {}
                () = self.unconfirmed.notified() => {}
            }
        }
    }

    /// Returns whether all was confirmed.
    async fn renew_once(&self, connection: &mut Connection) -> bool {
        let policies = self.lapsing();
        let count = policies.len();
        if count == 0 {
            return true;
        }
        let (asked, ticket) = (Instant::now(), self.ticket.lock().unwrap().clone());
        let answer = time::timeout(RENEW_WITHIN, connection.renew(policies, &ticket)).await;
        let Ok(Ok(confirmed)) = answer else { return false };
        for pod in &confirmed {
            self.operators.confirm(pod, asked);
        }
        confirmed.len() == count
    }

    fn lapsing(&self) -> Vec<PolicyInForce> {
        let one = |(pod, one): (&PodId, &PodInForce)| {
            one.lapses.then(|| PolicyInForce { pod: Some(pod.clone()), digest: one.summary.digest })
        };
        self.in_force.lock().unwrap().iter().filter_map(one).collect()
    }
}
