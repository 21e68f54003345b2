//! What did the proxies make of what they were told?

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use crate::rules::pod::PodName;

/// What a pod's proxy said last.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// The pod's UID.
    pub uid: String,
    /// The pod's node, where it is known.
    pub node: Option<String>,
    /// Who said it, by UID: of two proxies that take turns, each speaks for itself.
    pub by: Arc<str>,
    /// The epoch that is in force at the proxy.
    pub epoch: u64,
    /// The digest of the policy that it speaks of.
    pub digest: u64,
    /// Why the newest policy was refused, where it was.
    pub refused: Option<String>,
    /// Whether the proxy is connected.
    pub connected: bool,
    /// When it was last heard of.
    pub last_contact: SystemTime,
}

/// What was heard of all pods.
#[derive(Debug)]
pub(super) struct Receipts {
    by_pod: Mutex<BTreeMap<PodName, OfPod>>,
    changed: watch::Sender<u64>,
}

/// What was heard of one pod, by the replica that heard it; by nothing what was heard here.
type OfPod = BTreeMap<Option<Arc<str>>, Receipt>;

// === impl Receipts ===

impl Default for Receipts {
    fn default() -> Self {
        Self { by_pod: Mutex::default(), changed: watch::Sender::new(0) }
    }
}

impl Receipts {
    /// What the proxy of each pod said last.
    pub(super) fn newest(&self) -> BTreeMap<PodName, Receipt> {
        let by_pod = self.by_pod.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = |(pod, all): (&PodName, &OfPod)| Some((pod.clone(), newest(all)?.clone()));
        by_pod.iter().filter_map(newest).collect()
    }

    /// What proxies said to this replica.
    pub(super) fn here(&self) -> BTreeMap<PodName, Receipt> {
        let by_pod = self.by_pod.lock().unwrap_or_else(PoisonError::into_inner);
        let here = |(pod, all): (&PodName, &OfPod)| Some((pod.clone(), all.get(&None)?.clone()));
        by_pod.iter().filter_map(here).collect()
    }

    /// Changes whenever a receipt does.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Takes what a pod's proxy said to the replica `at`; nothing: to this one.
    pub(super) fn take(&self, at: Option<&Arc<str>>, pod: &PodName, receipt: Receipt) {
        let mut by_pod = self.by_pod.lock().unwrap_or_else(PoisonError::into_inner);
        let of_pod = by_pod.entry(pod.clone()).or_default();
        let before = of_pod.get(&at.cloned());
        let another_serves =
            before.is_some_and(|before| before.connected && before.by != receipt.by);
        if another_serves && !receipt.connected {
            // Its successor has taken over before it went.
            return;
        }
        of_pod.insert(at.cloned(), receipt);
        forget_older(of_pod);
        drop(by_pod);
        self.change();
    }

    /// Nobody is connected to the replica `at` any more, from `now` on.
    pub(super) fn lose(&self, at: &Arc<str>, now: SystemTime) {
        let at = Some(at.clone());
        let mut by_pod = self.by_pod.lock().unwrap_or_else(PoisonError::into_inner);
        for of_pod in by_pod.values_mut() {
            let Some(receipt) = of_pod.get_mut(&at) else { continue };
            if receipt.connected {
                (receipt.connected, receipt.last_contact) = (false, now);
            }
            forget_older(of_pod);
        }
        drop(by_pod);
        self.change();
    }

    /// Of pods that are not there, by name and UID, nothing is kept.
    pub(super) fn keep(&self, is_there: impl Fn(&PodName, &str) -> bool) {
        let mut forgotten = false;
        self.by_pod.lock().unwrap_or_else(PoisonError::into_inner).retain(|pod, receipts| {
            let before = receipts.len();
            receipts.retain(|_, receipt| is_there(pod, &receipt.uid));
            forgotten |= receipts.len() < before;
            !receipts.is_empty()
        });
        if forgotten {
            self.change();
        }
    }

    fn change(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// What is known of a pod: where its proxy is connected, or else what was heard last.
fn newest(receipts: &OfPod) -> Option<&Receipt> {
    receipts.values().max_by_key(|receipt| weight(receipt))
}

fn weight(receipt: &Receipt) -> (bool, SystemTime) {
    (receipt.connected, receipt.last_contact)
}

/// Keeps of what other replicas heard only what counts, or may again: each replica that comes and goes would leave a word
/// behind for as long as the pod lives.
fn forget_older(receipts: &mut OfPod) {
    let counts = newest(receipts).map(weight);
    receipts.retain(|at, one| at.is_none() || one.connected || Some(weight(one)) == counts);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{name, receipt};
    use super::*;

    #[test]
    fn replicas_that_come_and_go_leave_one_word_behind() {
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
        receipts.take(
            Some(&Arc::from("late")),
            &name("a"),
            Receipt { connected: false, ..receipt("a", 30) },
        );
        assert_eq!((kept(), receipts.newest()[&name("a")].epoch), (1, 20), "it is connected here");
    }
}
