//! Follows what is proved about roots that are fenced: which pods are gone, which proxies have acknowledged,
//! and what the API server enforces.
//!
//! The leader makes the next plan with it. It is gathered from the plan, from the proxies' receipts and from the probes
//! of the API server, and again when time alone proves more. Other replicas follow, so that they can lead at any time,
//! but give out what the leader wrote, not what might follow it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::handover::Server;
use ctrlmesh_common::ownership::Ownership;
use jiff::{SignedDuration, Timestamp};
use tokio::sync::watch;
use tokio::time;

use crate::cluster::backoff::Backoff;
use crate::cluster::confirmations::Confirmations;
use crate::cluster::plan::{Plan, Plans};
use crate::leader::lease::Leadership;
use crate::rules::evidence::{self, Evidences, Observed, RootEvidence};
use crate::rules::fenced::{is_fenced, is_server_fenced};
use crate::rules::object_name::{full_name, namespace, resource_version};
use crate::rules::pod::PodName;
use crate::rules::shared::each;

mod lapsing;

use lapsing::LapsingPods;

/// The policy that a pod's proxy has in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce {
    /// Of the pod.
    pub uid: String,
    /// Of the policy.
    pub digest: u64,
}

/// What is proved. `None`: this replica does not lead.
pub type LeadersEvidence = Option<Arc<Evidences>>;

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
    /// Of the policies of pods of which only the proxies fence.
    pub confirmations: Arc<Confirmations>,
}

/// How many policies are remembered of each pod.
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
    /// By the root's UID.
    revoked_since: BTreeMap<String, Revocation>,
    lapsing: LapsingPods,
    /// By UID: when a pod lapses, and what people are told of that.
    lapses_at: BTreeMap<String, (Instant, Timestamp)>,
    /// By UIDs of a root that moves and of the pod. What a pod acknowledged is not asked of it again when the
    /// rest of the move makes a new policy.
    sent: BTreeMap<String, BTreeMap<String, Sent>>,
}

/// A revocation of a written table.
#[derive(Clone, Copy, Debug)]
struct Revocation {
    epoch: u64,
    /// Since when it is known.
    since: Instant,
    /// Of the ShardingConfig, when it was first seen.
    version: u64,
}

/// A replica that leads.
#[derive(Clone, Copy, Debug)]
struct Leader<'a> {
    since: Instant,
    confirmations: &'a Confirmations,
}

impl<Receipts, Fences> EvidenceFollower<Receipts, Fences>
where
    Receipts: Fn() -> BTreeMap<PodName, InForce> + Send + Sync,
    Fences: Clone + Send + Sync,
{
    /// Sends what is proved whenever that changes, until the plans end.
    pub async fn run(mut self, evidence: watch::Sender<LeadersEvidence>) {
        let mut times = Times::default();
        loop {
            let begun = time::Instant::now();
            let plan = self.plans.borrow_and_update().clone();
            self.receipts_changed.mark_unchanged();
            let fences = self.fences.borrow_and_update().clone();
            let (mut due, mut listens) = (None, false);
            if let Some(plan) = &plan {
                let moves = roots(plan).any(|(_, _, table)| table.revoked.is_some());
                let receipts = if moves { (self.receipts)() } else { BTreeMap::new() };
                // The last receipt of a proxy that is silent tells whether its policy ends.
                listens = moves | times.lapsing.update(plan, &self.receipts);
                let gathered;
                let server = |root: &str, uid: &str| (self.server)(&fences, root, uid);
                let (since, confirmations) = (self.leadership.since(), &*self.confirmations);
                let leader = since.map(|since| Leader { since: since.into_std(), confirmations });
                let within = self.acknowledge_within;
                let (proved, again) = times.gather(plan, &receipts, server, within, leader, Instant::now());
                let leads = self.leadership.is_held();
                (gathered, due) = if leads { (Some(proved), again) } else { (None, None) };
                evidence.send_if_modified(|before| {
                    let changed = before.as_deref() != gathered.as_ref();
                    if changed {
                        *before = gathered.map(Arc::new);
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
                changed = self.receipts_changed.changed(), if listens => changed,
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
        of_server: impl Fn(&str, &str) -> Server,
        acknowledge_within: Duration,
        leader: Option<Leader<'_>>,
        now: Instant,
    ) -> (Evidences, Option<Instant>) {
        if roots(plan).next().is_none() {
            *self = Self { lapsing: std::mem::take(&mut self.lapsing), ..Self::default() };
            return (Evidences::new(), None);
        }
        let stopped = self.look_at_pods(plan, leader, now);
        let mut due = None;
        let (mut revoked_since, mut sent, mut told_at) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let gathered = roots(plan).map(|(name, root, table)| {
            // Another root of the same name has other epochs.
            let root_uid = root.metadata.uid.clone().unwrap_or_default();
            let revoked = table.revoked.as_ref().map(|revoked| {
                let known = self.revoked_since.get(&root_uid).filter(|known| known.epoch == revoked.epoch);
                known.copied().unwrap_or_else(|| Revocation::seen(root, revoked.epoch, now))
            });
            revoked_since.extend(revoked.map(|revoked| (root_uid.clone(), revoked)));
            let mut acknowledged = BTreeMap::new();
            if revoked.is_some() {
                let mut policies = self.sent.remove(&root_uid).unwrap_or_default();
                acknowledged = in_force(root, &name, plan, receipts, &mut policies);
                sent.insert(root_uid.clone(), policies);
            }
            let is_server_fenced = root.spec.root.as_ref().is_some_and(is_server_fenced);
            let server = if is_server_fenced { of_server(&name, &root_uid) } else { Server::None };
            let lapsing = revoked.zip(leader).filter(|_| server == Server::None);
            let lapses_at = lapsing.map(|(revoked, leader)| self.lapsing.times(table, revoked, leader, now));
            let lapses_at = lapses_at.unwrap_or_default();
            let observed = Observed {
                server,
                stopped: &stopped,
                missing_since: &self.missing_since,
                acknowledged: &acknowledged,
                revoked_since: revoked.map(|revoked| revoked.since),
                acknowledge_within,
                lapses_at: &lapses_at,
            };
            let (mut found, again) = evidence::gather(table, observed, now);
            due = [due, again].into_iter().flatten().min();
            let ahead = lapses_at.into_iter().filter(|(_, at)| *at > now);
            let ahead: Vec<_> = ahead.map(|(uid, at)| (self.told(&uid, at, now), uid, at)).collect();
            found.lapses_at = ahead.iter().map(|(told, uid, _)| (uid.clone(), *told)).collect();
            told_at.extend(ahead.into_iter().map(|(told, uid, at)| (uid, (at, told))));
            (name, RootEvidence { uid: root_uid, ..found })
        });
        let gathered = gathered.collect();
        (self.revoked_since, self.sent, self.lapses_at) = (revoked_since, sent, told_at);
        (gathered, due)
    }

    /// Remembers which pods are missing, and since when; returns those that have ended.
    fn look_at_pods(&mut self, plan: &Plan, leader: Option<Leader<'_>>, now: Instant) -> BTreeSet<String> {
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
        if let Some(leader) = leader {
            leader.confirmations.keep(|uid| existing.contains(uid) || self.missing_since.contains_key(uid));
        }
        stopped
    }

    /// What people are told of the moment at which a pod lapses: of the same moment always the same.
    fn told(&self, uid: &str, at: Instant, now: Instant) -> Timestamp {
        let before = self.lapses_at.get(uid).filter(|(before, _)| *before == at);
        before.map_or_else(|| timestamp(at, now), |(_, told)| *told)
    }
}

impl Revocation {
    fn seen(root: &ShardingConfig, epoch: u64, now: Instant) -> Self {
        Self { epoch, since: now, version: resource_version(&root.metadata) }
    }
}

/// Adds a policy that was sent, if it is another than the last one, and forgets the oldest.
fn remember<T: PartialEq>(sent: &mut Vec<T>, last: T) {
    if sent.last() != Some(&last) {
        sent.push(last);
        sent.drain(..sent.len().saturating_sub(REMEMBERED));
    }
}

/// When `at` is, to the second.
fn timestamp(at: Instant, now: Instant) -> Timestamp {
    let ahead = SignedDuration::try_from(at.saturating_duration_since(now)).unwrap_or_default();
    let at = Timestamp::now().checked_add(ahead).unwrap_or_default();
    Timestamp::from_second(at.as_second()).unwrap_or_default()
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
    let members = plan.snapshot.members_in(namespace(&root.metadata));
    let mut acknowledged = BTreeMap::new();
    let mut still_sent = BTreeMap::new();
    for pod in members {
        let mut policies = sent.remove(&pod.uid).unwrap_or_default();
        let policy = plan.sendable().get(&pod.name).filter(|policy| policy.operator.as_deref() == Some(operator));
        let last = policy.map(|policy| SentPolicy { digest: policy.digest(), epoch: policy.policy.epoch });
        if let Some(last) = last {
            remember(&mut policies, last);
        }
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
    let fenced = each(&plan.snapshot.configs).filter(|config| config.spec.root.as_ref().is_some_and(is_fenced));
    fenced.filter_map(|root| Some((full_name(&root.metadata), root, root.status.as_ref()?.ownership.as_ref()?)))
}

#[cfg(test)]
mod tests;
