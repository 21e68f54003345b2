//! Follows what is proved about roots that are fenced: which pods are gone, which proxies have acknowledged,
//! and what the API server enforces.
//!
//! The leader makes the next plan with it. It is gathered from the plan, from the proxies' receipts and from the probes
//! of the API server, and again when time alone proves more. Other replicas follow, so that they can lead at any time,
//! but plan with nothing: they give out what the leader wrote, not what might follow it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::handover::Server;
use ctrlmesh_common::ownership::Ownership;
use tokio::sync::watch;
use tokio::time;

use crate::cluster::backoff::Backoff;
use crate::cluster::plan::{Plan, Plans};
use crate::leader::lease::Leadership;
use crate::rules::evidence::{self, Evidences, Observed, RootEvidence};
use crate::rules::fenced::{is_fenced, is_server_fenced};
use crate::rules::object_name::full_name;
use crate::rules::pod::PodName;

/// The policy that a pod's proxy has in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce {
    /// Of the pod.
    pub uid: String,
    /// Of the policy.
    pub digest: u64,
}

pub struct EvidenceFollower<Receipts, Fences> {
    pub plans: Plans,
    /// What proxies said. The proxy of a node says nothing of a pod that a sidecar serves.
    pub receipts: Receipts,
    pub receipts_changed: watch::Receiver<u64>,
    pub fences: watch::Receiver<Fences>,
    /// What `fences` say of the root called `NAMESPACE/NAME`, with this UID.
    pub server: fn(&Fences, &str, &str) -> Server,
    /// How long a proxy's acknowledgement is waited for where the API server fences.
    pub acknowledge_within: Duration,
    pub leadership: Leadership,
}

/// How many policies are remembered of each pod of a root that moves.
const REMEMBERED: usize = 8;

/// Policies that were sent to a pod, oldest first.
type Sent = Vec<SentPolicy>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SentPolicy {
    digest: u64,
    epoch: u64,
}

/// What is remembered from one time to the next.
#[derive(Debug, Default)]
struct Times {
    /// UIDs that a table names, of pods that do not exist.
    missing_since: BTreeMap<String, Instant>,
    /// By the root's UID: `revoked.epoch`, and since when it is known.
    revoked_since: BTreeMap<String, (u64, Instant)>,
    /// By UIDs of a root that moves and of the pod. What a pod acknowledged is not asked of it again when the
    /// rest of the move makes a new policy.
    sent: BTreeMap<String, BTreeMap<String, Sent>>,
}

impl<Receipts, Fences> EvidenceFollower<Receipts, Fences>
where
    Receipts: Fn() -> BTreeMap<PodName, InForce> + Send + Sync,
    Fences: Clone + Send + Sync,
{
    /// Sends what is proved whenever that changes, until the plans end.
    pub async fn run(mut self, evidence: watch::Sender<Arc<Evidences>>) {
        let mut times = Times::default();
        loop {
            let begun = time::Instant::now();
            let plan = self.plans.borrow_and_update().clone();
            self.receipts_changed.mark_unchanged();
            let fences = self.fences.borrow_and_update().clone();
            let (mut due, mut moves) = (None, false);
            if let Some(plan) = &plan {
                moves = roots(plan).any(|(_, _, table)| table.revoked.is_some());
                let receipts = if moves { (self.receipts)() } else { BTreeMap::new() };
                let gathered;
                let server = |root: &str, uid: &str| (self.server)(&fences, root, uid);
                let (proved, again) = times.gather(plan, &receipts, server, self.acknowledge_within, Instant::now());
                let leads = self.leadership.is_held();
                (gathered, due) = if leads { (proved, again) } else { (Evidences::new(), None) };
                evidence.send_if_modified(|before| {
                    let changed = **before != gathered;
                    if changed {
                        *before = Arc::new(gathered);
                    }
                    changed
                });
            }
            // With thousands of pods, something is new all the time.
            time::sleep_until(Backoff::after(begun, time::Instant::now(), 1).until(begun)).await;
            let time_proves_more = async {
                match due {
                    Some(due) => time::sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            let changed = tokio::select! {
                changed = self.plans.changed() => changed,
                changed = self.receipts_changed.changed(), if moves => changed,
                () = changed(&mut self.fences) => Ok(()),
                () = self.leadership.changed() => Ok(()),
                () = time_proves_more => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }
}

/// For ever, if nobody probes.
async fn changed<T>(state: &mut watch::Receiver<T>) {
    if state.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Times {
    /// Also when to gather again, if nothing else happens.
    fn gather(
        &mut self,
        plan: &Plan,
        receipts: &BTreeMap<PodName, InForce>,
        server: impl Fn(&str, &str) -> Server,
        acknowledge_within: Duration,
        now: Instant,
    ) -> (Evidences, Option<Instant>) {
        if roots(plan).next().is_none() {
            *self = Self::default();
            return (Evidences::new(), None);
        }
        let pods = plan.snapshot.members.iter().chain(plan.snapshot.unenrolled.values().flatten());
        let (ended, existing): (Vec<_>, Vec<_>) = pods.partition(|pod| pod.stopped);
        let existing: BTreeSet<&str> = existing.into_iter().map(|pod| pod.uid.as_str()).collect();
        let mut stopped = plan.snapshot.stopped.clone();
        stopped.extend(ended.into_iter().map(|pod| pod.uid.clone()));
        let named: BTreeSet<&String> = roots(plan).flat_map(|(_, _, table)| evidence::uids(table)).collect();
        self.missing_since.retain(|uid, _| named.contains(uid) && !existing.contains(uid.as_str()));
        for uid in named.into_iter().filter(|uid| !existing.contains(uid.as_str())) {
            self.missing_since.entry(uid.clone()).or_insert(now);
        }
        let mut due = None;
        let (mut revoked_since, mut sent) = (BTreeMap::new(), BTreeMap::new());
        let gathered = roots(plan).map(|(name, root, table)| {
            // Another root of the same name has other epochs.
            let uid = root.metadata.uid.clone().unwrap_or_default();
            let revoked = table.revoked.as_ref().map(|revoked| {
                let known = self.revoked_since.get(&uid).filter(|(epoch, _)| *epoch == revoked.epoch);
                (revoked.epoch, known.map_or(now, |(_, since)| *since))
            });
            revoked_since.extend(revoked.map(|revoked| (uid.clone(), revoked)));
            let mut acknowledged = BTreeMap::new();
            if revoked.is_some() {
                let mut policies = self.sent.remove(&uid).unwrap_or_default();
                acknowledged = in_force(root, &name, plan, receipts, &mut policies);
                sent.insert(uid.clone(), policies);
            }
            let observed = Observed {
                server: if root.spec.root.as_ref().is_some_and(is_server_fenced) {
                    server(&name, &uid)
                } else {
                    Server::None
                },
                stopped: &stopped,
                missing_since: &self.missing_since,
                acknowledged: &acknowledged,
                revoked_since: revoked.map(|(_, since)| since),
                acknowledge_within,
            };
            let (found, again) = evidence::gather(table, observed, now);
            due = [due, again].into_iter().flatten().min();
            (name, RootEvidence { uid, ..found })
        });
        let gathered = gathered.collect();
        (self.revoked_since, self.sent) = (revoked_since, sent);
        (gathered, due)
    }
}

/// By UID, the epoch in force at each proxy that has a policy that was `sent` to it. Not by the epoch that the proxy
/// names: another operator may have the same number.
fn in_force(
    root: &ShardingConfig,
    operator: &str,
    plan: &Plan,
    receipts: &BTreeMap<PodName, InForce>,
    sent: &mut BTreeMap<String, Sent>,
) -> BTreeMap<String, u64> {
    let namespace = root.metadata.namespace.as_ref();
    let members = plan.snapshot.members.iter().filter(|pod| Some(&pod.name.namespace) == namespace);
    let mut acknowledged = BTreeMap::new();
    let mut still_sent = BTreeMap::new();
    for pod in members {
        let mut policies = sent.remove(&pod.uid).unwrap_or_default();
        let policy = plan.sendable().get(&pod.name).filter(|policy| policy.operator.as_deref() == Some(operator));
        let last = policy.map(|policy| SentPolicy { digest: policy.digest(), epoch: policy.policy.epoch });
        policies.extend(last.filter(|last| policies.last() != Some(last)));
        policies.drain(..policies.len().saturating_sub(REMEMBERED));
        let receipt = receipts.get(&pod.name).filter(|receipt| receipt.uid == pod.uid);
        let in_force = receipt.and_then(|receipt| policies.iter().rfind(|sent| sent.digest == receipt.digest));
        acknowledged.extend(in_force.map(|policy| (pod.uid.clone(), policy.epoch)));
        still_sent.insert(pod.uid.clone(), policies);
    }
    *sent = still_sent;
    acknowledged
}

/// Roots that are fenced, with their names and written tables.
fn roots(plan: &Plan) -> impl Iterator<Item = (String, &ShardingConfig, &Ownership)> {
    let fenced = plan.snapshot.configs.iter().filter(|config| config.spec.root.as_ref().is_some_and(is_fenced));
    fenced.filter_map(|root| Some((full_name(&root.metadata), root, root.status.as_ref()?.ownership.as_ref()?)))
}

#[cfg(test)]
mod tests;
