//! Keeps the latest receipt of each pod's proxy, per replica that got it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use ctrlmesh_common::wire::{GuardState, WebhookState};
use ctrlmesh_runtime::sync::lock;
use tokio::sync::watch;

use super::by_replica::{self, ByReplica, OfPod};
use crate::rules::pod::PodName;

#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    pub uid: String,
    pub node: Option<String>,
    /// UID of the proxy's pod: during a handover there are two.
    pub by: Arc<str>,
    /// Epoch in force.
    pub epoch: u64,
    /// Digest of the policy in force.
    pub digest: u64,
    /// Why the newest policy was refused.
    pub refused: Option<String>,
    pub connected: bool,
    /// Whether it is not connected because the replica is gone to which it was.
    pub lost: bool,
    pub last_contact: SystemTime,
    /// What the pod's guards have done.
    pub guards: Arc<[GuardState]>,
    /// What becomes of calls to the pod's webhook, if the proxy has said it.
    pub webhook: Option<WebhookState>,
}

#[derive(Debug)]
pub(super) struct Receipts {
    by_pod: Mutex<ByReplica<Receipt>>,
    changed: watch::Sender<u64>,
}

impl Default for Receipts {
    fn default() -> Self {
        Self { by_pod: Mutex::default(), changed: watch::Sender::new(0) }
    }
}

impl Receipts {
    pub(super) fn newest(&self) -> BTreeMap<PodName, Receipt> {
        let by_pod = lock(&self.by_pod);
        let newest = |(pod, all): (&PodName, &OfPod<Receipt>)| Some((pod.clone(), newest(all)?.clone()));
        by_pod.iter().filter_map(newest).collect()
    }

    pub(super) fn read_newest<T: FromIterator<R>, R>(&self, read: impl Fn(&Receipt) -> R) -> T {
        lock(&self.by_pod).values().filter_map(newest).map(read).collect()
    }

    pub(super) fn here(&self) -> BTreeMap<PodName, Receipt> {
        let by_pod = lock(&self.by_pod);
        let here = |(pod, all): (&PodName, &OfPod<Receipt>)| Some((pod.clone(), all.get(&None)?.clone()));
        by_pod.iter().filter_map(here).collect()
    }

    /// Counts changes, also those of others that send to it.
    pub(super) fn changed(&self) -> watch::Sender<u64> {
        self.changed.clone()
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Takes a receipt that replica `at` got; none: this one.
    pub(super) fn take(&self, at: Option<&Arc<str>>, pod: &PodName, receipt: Receipt) {
        let mut by_pod = lock(&self.by_pod);
        let of_pod = by_pod.entry(pod.clone()).or_default();
        let before = of_pod.get(&at.cloned());
        let another_serves = before.is_some_and(|before| before.connected && before.by != receipt.by);
        if another_serves && !receipt.connected {
            // The successor connected before the old proxy left.
            return;
        }
        of_pod.insert(at.cloned(), receipt);
        forget_older(of_pod);
        drop(by_pod);
        self.change();
    }

    /// Marks the proxies of replica `at` as disconnected, from `now` on.
    pub(super) fn lose(&self, at: &Arc<str>, now: SystemTime) {
        let at = Some(at.clone());
        let mut by_pod = lock(&self.by_pod);
        for of_pod in by_pod.values_mut() {
            let Some(receipt) = of_pod.get_mut(&at) else { continue };
            if receipt.connected {
                (receipt.connected, receipt.lost, receipt.last_contact) = (false, true, now);
            }
            forget_older(of_pod);
        }
        drop(by_pod);
        self.change();
    }

    /// Drops the receipts of pods that do not exist any more.
    pub(super) fn keep(&self, is_there: impl Fn(&PodName, &str) -> bool) {
        if by_replica::retain(&mut lock(&self.by_pod), |pod, _, receipt| is_there(pod, &receipt.uid)) {
            self.change();
        }
    }

    fn change(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// The receipt of a connected proxy, or else the latest one.
fn newest(receipts: &OfPod<Receipt>) -> Option<&Receipt> {
    receipts.values().max_by_key(|receipt| weight(receipt))
}

fn weight(receipt: &Receipt) -> (bool, SystemTime) {
    (receipt.connected, receipt.last_contact)
}

/// Drops outdated receipts of other replicas: otherwise each replica that comes and goes would leave one behind.
fn forget_older(receipts: &mut OfPod<Receipt>) {
    let counts = newest(receipts).map(weight);
    receipts.retain(|at, one| at.is_none() || one.connected || Some(weight(one)) == counts);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{name, receipt};
    use super::*;

    #[test]
    fn former_replicas_leave_one_receipt_behind() {
        let receipts = Receipts::default();
        let kept = || receipts.by_pod.lock().unwrap()[&name("a")].len();
        for number in 1..=10 {
            let replica: Arc<str> = Arc::from(format!("replica-{number}"));
            receipts.take(Some(&replica), &name("a"), receipt("a", number));
            assert_eq!(kept(), 1, "the one before is gone");
            receipts.lose(&replica, SystemTime::UNIX_EPOCH + Duration::from_secs(number));
            assert_eq!(receipts.newest()[&name("a")].epoch, number);
        }
        receipts.take(None, &name("a"), receipt("a", 20));
        receipts.take(Some(&Arc::from("late")), &name("a"), Receipt { connected: false, ..receipt("a", 30) });
        assert_eq!((kept(), receipts.newest()[&name("a")].epoch), (1, 20), "it is connected here");
    }
}
