//! What is each pod to be told, and what did its proxy make of it?
//!
//! Only the newest is kept: who reads late reads what holds now, and nobody waits for a slow reader. A reader follows
//! one node or one pod, and is woken by changes of that only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use bytes::Bytes;
use ctrlmesh_common::policy::Redirect;
use tokio::sync::watch;

use crate::rules::compile::Told;
use crate::rules::pod::PodName;

mod receipts;

pub use receipts::Receipt;
use receipts::Receipts;

/// What one pod is to be told.
#[derive(Clone, Debug, PartialEq)]
pub struct Posted {
    /// The pod.
    pub pod: PodName,
    /// Its UID: another incarnation is told nothing.
    pub uid: String,
    /// The node that it is bound to, once it is.
    pub node: Option<String>,
    /// What it is told; none where nothing can be said of it now, and it keeps what it has.
    pub said: Option<Said>,
}

/// What is said of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    /// Whether a proxy inside the pod serves it, and the node's only sends connections there.
    pub inside: bool,
    /// The policy's epoch.
    pub epoch: u64,
    /// The policy's digest.
    pub digest: u64,
    /// The policy, in JSON.
    pub policy: Bytes,
    /// The ShardingConfig that the epoch is of, as `NAMESPACE/NAME`; none where none speaks of the pod.
    pub operator: Option<String>,
    /// Its resourceVersion.
    pub version: u64,
}

/// Whom somebody follows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    /// All pods of a node.
    Node(String),
    /// One incarnation of a pod.
    Pod(PodName, String),
}

/// What all pods are to be told.
#[derive(Debug)]
pub struct Board {
    posted: RwLock<Posts>,
    readers: Mutex<HashMap<Subject, watch::Sender<()>>>,
    /// Whether anything was ever published: before that nothing is known of any pod.
    begun: watch::Sender<bool>,
    /// The namespaces of all enrolled pods.
    namespaces: watch::Sender<BTreeSet<String>>,
    receipts: Receipts,
}

#[derive(Debug, Default)]
struct Posts {
    by_pod: BTreeMap<PodName, Arc<Posted>>,
    by_node: HashMap<String, BTreeSet<PodName>>,
}

/// Follows one subject until it is dropped.
#[derive(Debug)]
pub struct Reader {
    board: Arc<Board>,
    subject: Subject,
    changes: watch::Receiver<()>,
}

// === impl Board ===

impl Default for Board {
    fn default() -> Self {
        Self {
            posted: RwLock::default(),
            readers: Mutex::default(),
            begun: watch::Sender::new(false),
            namespaces: watch::Sender::default(),
            receipts: Receipts::default(),
        }
    }
}

impl Board {
    /// Says what all pods are to be told from now on; whoever is not among them is told nothing.
    pub fn publish(&self, all: impl IntoIterator<Item = Posted>) {
        let next: BTreeMap<PodName, Arc<Posted>> =
            all.into_iter().map(|posted| (posted.pod.clone(), Arc::new(posted))).collect();
        let namespaces = next.keys().map(|pod| pod.namespace.clone()).collect();
        let changed = self.post(next);
        self.namespaces.send_if_modified(|known| {
            let is_new = *known != namespaces;
            *known = namespaces;
            is_new
        });
        {
            let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            for subject in &changed {
                if let Some(sender) = readers.get_mut(subject) {
                    sender.send_replace(());
                }
            }
        }
        self.forget_receipts();
        self.begun.send_replace(true);
    }

    /// Takes what is to be told; returns whom it is news to.
    fn post(&self, mut next: BTreeMap<PodName, Arc<Posted>>) -> BTreeSet<Subject> {
        let mut posted = self.posted.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = BTreeSet::new();
        for (pod, old) in &posted.by_pod {
            match next.get_mut(pod) {
                // What is the same stays the same allocation.
                Some(new) if *new == *old => *new = old.clone(),
                Some(new) if new.says_what(old) => {}
                _ => changed.extend(old.subjects()),
            }
        }
        for (pod, new) in &next {
            if !posted.by_pod.get(pod).is_some_and(|old| new.says_what(old)) {
                changed.extend(new.subjects());
            }
        }
        let mut by_node: HashMap<String, BTreeSet<PodName>> = HashMap::new();
        for new in next.values() {
            if let Some(node) = &new.node {
                by_node.entry(node.clone()).or_default().insert(new.pod.clone());
            }
        }
        *posted = Posts { by_pod: next, by_node };
        changed
    }

    /// Waits until it was published for the first time.
    pub async fn begun(&self) {
        // The sender is ours, so it is there.
        drop(self.begun.subscribe().wait_for(|begun| *begun).await);
    }

    /// The namespaces of all enrolled pods, as they change.
    pub fn namespaces(&self) -> watch::Receiver<BTreeSet<String>> {
        self.namespaces.subscribe()
    }

    /// Follows `subject`.
    pub fn follow(self: &Arc<Self>, subject: Subject) -> Reader {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = readers.entry(subject.clone()).or_insert_with(|| watch::Sender::new(()));
        let changes = sender.subscribe();
        drop(readers);
        Reader { board: self.clone(), subject, changes }
    }

    /// What the proxy of each pod said last.
    pub fn receipts(&self) -> BTreeMap<PodName, Receipt> {
        self.receipts.newest()
    }

    /// What proxies said to this replica.
    pub fn heard_here(&self) -> BTreeMap<PodName, Receipt> {
        self.receipts.here()
    }

    /// Changes whenever a receipt does; how often that is, the reader decides.
    pub fn receipts_changed(&self) -> watch::Receiver<u64> {
        self.receipts.changes()
    }

    /// Takes what a pod's proxy said to the replica `at`; nothing: to this one. Of another incarnation's nothing is
    /// kept.
    pub fn receive(&self, at: Option<&Arc<str>>, pod: &PodName, receipt: Receipt) {
        if self.find(pod, &receipt.uid).is_some() {
            self.receipts.take(at, pod, receipt);
        }
    }

    /// The replica `at` is not heard any more, from `now` on: nobody is connected to it, as far as is known. Until now
    /// those that were had nothing to say.
    pub fn lose(&self, at: &Arc<str>, now: SystemTime) {
        self.receipts.lose(at, now);
    }

    /// What that incarnation of a pod is told, where it is enrolled.
    pub fn find(&self, pod: &PodName, uid: &str) -> Option<Arc<Posted>> {
        let posted = self.posted.read().unwrap_or_else(PoisonError::into_inner);
        posted.by_pod.get(pod).filter(|posted| posted.uid == uid).cloned()
    }

    /// Of pods that are gone nothing is kept.
    fn forget_receipts(&self) {
        let posted = self.posted.read().unwrap_or_else(PoisonError::into_inner);
        self.receipts.keep(|pod, uid| posted.by_pod.get(pod).is_some_and(|one| one.uid == uid));
    }
}

// === impl Subject ===

impl Subject {
    /// Whether it may have to do with a pod that is called so.
    pub fn may_be(&self, pod: &PodName) -> bool {
        match self {
            Self::Node(_) => true,
            Self::Pod(own, _) => own == pod,
        }
    }
}

// === impl Posts ===

impl Posts {
    fn of(&self, subject: &Subject) -> Vec<Arc<Posted>> {
        match subject {
            Subject::Node(node) => {
                let pods = self.by_node.get(node).into_iter().flatten();
                pods.filter_map(|pod| self.by_pod.get(pod).cloned()).collect()
            }
            Subject::Pod(pod, uid) => {
                let one = self.by_pod.get(pod).filter(|posted| posted.uid == *uid);
                one.cloned().into_iter().collect()
            }
        }
    }
}

// === impl Reader ===

impl Reader {
    /// What its pods are to be told now.
    pub fn read(&mut self) -> Vec<Arc<Posted>> {
        self.changes.mark_unchanged();
        self.board.posted.read().unwrap_or_else(PoisonError::into_inner).of(&self.subject)
    }

    /// Whom it follows.
    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Whether what its proxy says of a pod with a proxy `inside` counts: of those, the one inside says what holds.
    pub fn speaks_for(&self, inside: bool) -> bool {
        !inside || matches!(self.subject, Subject::Pod(..))
    }

    /// Waits until something of it has changed since it was read.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut readers = self.board.readers.lock().unwrap_or_else(PoisonError::into_inner);
        if readers.get(&self.subject).is_some_and(|sender| sender.receiver_count() <= 1) {
            readers.remove(&self.subject);
        }
    }
}

// === impl Posted ===

impl Posted {
    /// Whether a proxy that was told `other` need not be told this.
    fn says_what(&self, other: &Self) -> bool {
        let digest = |posted: &Self| posted.said.as_ref().map(|said| said.digest);
        (&self.uid, &self.node, digest(self)) == (&other.uid, &other.node, digest(other))
    }

    /// Whether a proxy inside the pod serves it; none where no ShardingConfig speaks of it.
    pub fn served_inside(&self) -> Option<bool> {
        self.said.as_ref().filter(|said| said.operator.is_some()).map(|said| said.inside)
    }

    fn subjects(&self) -> impl Iterator<Item = Subject> {
        let node = self.node.clone().map(Subject::Node);
        [Subject::Pod(self.pod.clone(), self.uid.clone())].into_iter().chain(node)
    }
}

// === impl Said ===

impl From<&Told> for Said {
    fn from(told: &Told) -> Self {
        let sent = told.sent();
        Self {
            inside: told.policy.redirect != Redirect::Node,
            epoch: told.policy.epoch,
            digest: sent.digest,
            policy: sent.text.clone(),
            operator: told.operator.clone(),
            version: told.version,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
