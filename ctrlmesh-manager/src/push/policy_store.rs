//! Stores the current policy of each pod, the proxies' receipts, and what else proxies report.
//!
//! Only the newest policy is kept, so slow readers delay nobody. A reader follows one node or one pod, and wakes for
//! its changes only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, RwLock};
use std::time::SystemTime;

use ctrlmesh_common::wire::{Ended, LockState, Traffic, Watched, WebhookState};
use ctrlmesh_runtime::sync::{lock, read, write};
use tokio::sync::watch;

use crate::rules::compile::CompiledPolicy;
use crate::rules::pod::PodName;

mod by_replica;
mod receipts;
mod sidecar_webhooks;
mod reports;

pub use receipts::Receipt;
use receipts::Receipts;
pub use reports::{PodTraffic, PodWatches, ProxyState, Reported, Reports};
pub use sidecar_webhooks::SidecarWebhook;
use sidecar_webhooks::SidecarWebhooks;

#[derive(Clone, Debug, PartialEq)]
pub struct EnrolledPod {
    pub name: PodName,
    /// A pod with another UID gets nothing.
    pub uid: String,
    pub node: Option<String>,
    /// None where no policy can be compiled now; the proxy keeps what it has.
    pub policy: Option<Arc<CompiledPolicy>>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    Node(String),
    /// A pod and its UID.
    Pod(PodName, String),
}

#[derive(Debug)]
pub struct PolicyStore {
    pods: RwLock<Pods>,
    readers: Mutex<HashMap<Subject, watch::Sender<()>>>,
    /// False until the first publication: before that, no pod is known.
    begun: watch::Sender<bool>,
    namespaces: watch::Sender<BTreeSet<String>>,
    receipts: Receipts,
    sidecar_webhooks: SidecarWebhooks,
    traffic: Reports<Traffic>,
    watches: Reports<Watched>,
    ended: Reports<Ended>,
    locks: Reports<LockState>,
}

#[derive(Debug, Default)]
struct Pods {
    by_name: BTreeMap<PodName, Arc<EnrolledPod>>,
    by_node: HashMap<String, BTreeSet<PodName>>,
}

#[derive(Debug)]
pub struct Reader {
    store: Arc<PolicyStore>,
    subject: Subject,
    changes: watch::Receiver<()>,
}

impl Default for PolicyStore {
    fn default() -> Self {
        let receipts = Receipts::default();
        let sidecar_webhooks = SidecarWebhooks::new(receipts.changed());
        Self {
            pods: RwLock::default(),
            readers: Mutex::default(),
            begun: watch::Sender::new(false),
            namespaces: watch::Sender::default(),
            receipts,
            sidecar_webhooks,
            traffic: Reports::default(),
            watches: Reports::default(),
            ended: Reports::default(),
            locks: Reports::default(),
        }
    }
}

impl PolicyStore {
    /// Replaces all policies. Pods that are missing get none.
    pub fn publish(&self, all: impl IntoIterator<Item = EnrolledPod>) {
        let next: BTreeMap<PodName, Arc<EnrolledPod>> =
            all.into_iter().map(|pod| (pod.name.clone(), Arc::new(pod))).collect();
        let namespaces = next.keys().map(|pod| pod.namespace.clone()).collect();
        let changed = self.replace(next);
        self.namespaces.send_if_modified(|known| {
            let is_new = *known != namespaces;
            *known = namespaces;
            is_new
        });
        {
            let mut readers = lock(&self.readers);
            for subject in &changed {
                if let Some(sender) = readers.get_mut(subject) {
                    sender.send_replace(());
                }
            }
        }
        self.forget_receipts();
        self.begun.send_replace(true);
    }

    /// Returns whose policies changed.
    fn replace(&self, mut next: BTreeMap<PodName, Arc<EnrolledPod>>) -> BTreeSet<Subject> {
        let mut pods = write(&self.pods);
        let mut changed = BTreeSet::new();
        for (pod, old) in &pods.by_name {
            match next.get_mut(pod) {
                // Equal policies keep their allocation.
                Some(new) if *new == *old => *new = old.clone(),
                Some(new) if new.is_same_for_proxies(old) => {}
                _ => changed.extend(old.subjects()),
            }
        }
        for (pod, new) in &next {
            if !pods.by_name.get(pod).is_some_and(|old| new.is_same_for_proxies(old)) {
                changed.extend(new.subjects());
            }
        }
        let mut by_node: HashMap<String, BTreeSet<PodName>> = HashMap::new();
        for new in next.values() {
            if let Some(node) = &new.node {
                by_node.entry(node.clone()).or_default().insert(new.name.clone());
            }
        }
        *pods = Pods { by_name: next, by_node };
        changed
    }

    pub async fn begun(&self) {
        // The sender is a field of this struct.
        drop(self.begun.subscribe().wait_for(|begun| *begun).await);
    }

    pub fn namespaces(&self) -> watch::Receiver<BTreeSet<String>> {
        self.namespaces.subscribe()
    }

    pub fn follow(self: &Arc<Self>, subject: Subject) -> Reader {
        let mut readers = lock(&self.readers);
        let sender = readers.entry(subject.clone()).or_insert_with(|| watch::Sender::new(()));
        let changes = sender.subscribe();
        drop(readers);
        Reader { store: self.clone(), subject, changes }
    }

    pub fn receipts(&self) -> BTreeMap<PodName, Receipt> {
        self.receipts.newest()
    }

    /// What `read` makes of the newest receipt of each pod.
    pub fn read_receipts<T: FromIterator<R>, R>(&self, read: impl Fn(&Receipt) -> R) -> T {
        self.receipts.read_newest(read)
    }

    pub fn heard_here(&self) -> BTreeMap<PodName, Receipt> {
        self.receipts.here()
    }

    /// What node proxies say of the webhooks of pods with a sidecar.
    pub fn sidecar_webhooks(&self) -> BTreeMap<PodName, WebhookState> {
        self.sidecar_webhooks.states()
    }

    pub fn sidecar_webhooks_here(&self) -> BTreeMap<PodName, SidecarWebhook> {
        self.sidecar_webhooks.here()
    }

    /// What the requests of pods have come to, of pods whose policies ask for it.
    pub fn traffic(&self) -> &Reports<Traffic> {
        &self.traffic
    }

    /// Which kinds pods watch.
    pub fn watches(&self) -> &Reports<Watched> {
        &self.watches
    }

    /// Which containers of pods have ended.
    pub fn ended(&self) -> &Reports<Ended> {
        &self.ended
    }

    /// Which pods wait for their lock.
    pub fn locks(&self) -> &Reports<LockState> {
        &self.locks
    }

    /// Changes with every receipt, and with what node proxies say of webhooks.
    pub fn receipts_changed(&self) -> watch::Receiver<u64> {
        self.receipts.changes()
    }

    /// Takes a receipt that replica `at` got; none: this one. Receipts for another UID are dropped.
    pub fn receive(&self, at: Option<&Arc<str>>, pod: &PodName, receipt: Receipt) {
        if self.find(pod, &receipt.uid).is_some() {
            self.receipts.take(at, pod, receipt);
        }
    }

    /// Takes what the proxy `by` says to replica `at` of the webhook of a pod with a sidecar; none: this one.
    pub fn receive_webhook(
        &self,
        at: Option<&Arc<str>>,
        (pod, uid): (&PodName, &str),
        by: &Arc<str>,
        state: Option<WebhookState>,
    ) {
        match state {
            None => self.sidecar_webhooks.forget(at, pod, by),
            Some(state) if self.find(pod, uid).is_some() => {
                let said = SidecarWebhook { uid: uid.to_owned(), by: by.clone(), state };
                self.sidecar_webhooks.take(at, pod, said);
            }
            Some(_) => {}
        }
    }

    /// Takes what the proxy `by` reports to replica `at` of the requests of a pod; none: this one. Without counts, and
    /// where the pod's policy asks for none, they are not kept.
    pub fn receive_traffic(
        &self,
        at: Option<&Arc<str>>,
        (pod, uid): (&PodName, &str),
        by: &Arc<str>,
        traffic: Option<Traffic>,
    ) {
        if traffic.is_none() || self.find(pod, uid).is_some_and(|pod| pod.may_report_traffic()) {
            self.traffic.receive(at, (pod, uid), by, traffic);
        }
    }

    /// Takes what the proxy `by` reports to replica `at` of a pod; none: this one. `states` are those of this store
    /// that it belongs to.
    pub fn receive_state<S: ProxyState + Clone>(
        &self,
        states: &Reports<S>,
        at: Option<&Arc<str>>,
        (pod, uid): (&PodName, &str),
        by: &Arc<str>,
        state: Option<S>,
    ) {
        // A replica may know a pod a moment earlier. What nobody knows is forgotten at the next publication.
        if state.is_none() || at.is_some() || self.find(pod, uid).is_some() {
            states.receive(at, (pod, uid), by, state);
        }
    }

    /// The proxy `by` of a pod left this replica: its reports stay until there are others.
    pub fn reporter_left(&self, pod: &PodName, by: &str) {
        self.traffic.left(pod, by);
        self.watches.left(pod, by);
        self.ended.left(pod, by);
        self.locks.left(pod, by);
    }

    /// What replica `at` has got of webhooks does not count any more.
    pub fn lose_webhooks(&self, at: &Arc<str>) {
        self.sidecar_webhooks.lose(at);
    }

    /// Replica `at` is gone: its proxies count as disconnected from `now` on.
    pub fn lose(&self, at: &Arc<str>, now: SystemTime) {
        self.receipts.lose(at, now);
        self.traffic.lose(at);
        self.watches.lose(at);
        self.ended.lose(at);
        self.locks.lose(at);
        self.lose_webhooks(at);
    }

    /// None where this pod is not enrolled.
    pub fn find(&self, pod: &PodName, uid: &str) -> Option<Arc<EnrolledPod>> {
        let pods = read(&self.pods);
        pods.by_name.get(pod).filter(|one| one.uid == uid).cloned()
    }

    fn forget_receipts(&self) {
        let pods = read(&self.pods);
        let is_there = |pod: &PodName, uid: &str| pods.by_name.get(pod).is_some_and(|one| one.uid == uid);
        self.receipts.keep(is_there);
        self.sidecar_webhooks.keep(is_there);
        self.watches.keep(is_there);
        self.ended.keep(is_there);
        self.locks.keep(is_there);
        self.traffic.keep(|pod, uid| {
            let pod = pods.by_name.get(pod).filter(|one| one.uid == uid);
            pod.is_some_and(|pod| pod.may_report_traffic())
        });
    }
}

impl Subject {
    /// Whether it may cover this pod.
    pub fn may_be(&self, pod: &PodName) -> bool {
        match self {
            Self::Node(_) => true,
            Self::Pod(own, _) => own == pod,
        }
    }
}

impl Pods {
    fn of(&self, subject: &Subject) -> Vec<Arc<EnrolledPod>> {
        match subject {
            Subject::Node(node) => {
                let pods = self.by_node.get(node).into_iter().flatten();
                pods.filter_map(|pod| self.by_name.get(pod).cloned()).collect()
            }
            Subject::Pod(pod, uid) => {
                let one = self.by_name.get(pod).filter(|one| one.uid == *uid);
                one.cloned().into_iter().collect()
            }
        }
    }
}

impl Reader {
    pub fn read(&mut self) -> Vec<Arc<EnrolledPod>> {
        self.changes.mark_unchanged();
        read(&self.store.pods).of(&self.subject)
    }

    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Whether this proxy's receipts count for a pod. Where there is a sidecar, only the sidecar's do.
    pub fn speaks_for(&self, inside: bool) -> bool {
        !inside || matches!(self.subject, Subject::Pod(..))
    }

    /// Waits for a change after the last read.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut readers = lock(&self.store.readers);
        if readers.get(&self.subject).is_some_and(|sender| sender.receiver_count() <= 1) {
            readers.remove(&self.subject);
        }
    }
}

impl EnrolledPod {
    /// Whether a proxy that has `other` needs no update.
    fn is_same_for_proxies(&self, other: &Self) -> bool {
        let digest = |one: &Self| one.policy.as_ref().map(|policy| policy.digest());
        (&self.uid, &self.node, digest(self)) == (&other.uid, &other.node, digest(other))
    }

    /// Whether a sidecar serves the pod. None where no ShardingConfig covers the pod.
    pub fn is_served_inside(&self) -> Option<bool> {
        let policy = self.policy.as_ref().filter(|policy| policy.operator.is_some());
        policy.map(|policy| policy.is_served_inside())
    }

    /// Without a policy, the proxy keeps one that is not known here.
    fn may_report_traffic(&self) -> bool {
        self.policy.as_ref().is_none_or(|policy| policy.policy.report_traffic)
    }

    fn subjects(&self) -> impl Iterator<Item = Subject> {
        let node = self.node.clone().map(Subject::Node);
        [Subject::Pod(self.name.clone(), self.uid.clone())].into_iter().chain(node)
    }
}

#[cfg(test)]
pub(crate) mod tests;
