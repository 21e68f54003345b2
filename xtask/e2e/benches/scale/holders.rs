//! Which slots the pods of one operator may write by what their proxies have in force, and whether two may write one.
//!
//! Pure: times are values. A pod holds a slot from when its proxy puts a policy in force that names the pod's shard as
//! the owner. It holds the slot until its proxy has a policy in force that does not, its policy has lapsed, or its last
//! process has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::policy::fence::{CONFIRMED_FOR, Fence, WRITES_END_WITHIN};
use ctrlmesh_common::slots::{COUNT, SlotSet};
use tokio::time::Instant;

/// How long a write may pass after a proxy has asked for the confirmation that it got.
const WRITES_FOR: Duration = CONFIRMED_FOR.saturating_add(WRITES_END_WITHIN);

/// The pods of one operator whose processes have not ended, by UID.
#[derive(Debug, Default)]
pub(crate) struct Holders(BTreeMap<String, Replica>);

/// One pod.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) name: String,
    /// Which rolling restart made it.
    round: u32,
    is_ready: bool,
    /// What the pod's proxy has in force; nothing before its first policy.
    fence: Option<Fence>,
    /// Until when writes pass where the policy lapses.
    passes_until: Option<Instant>,
}

/// Two pods that hold the same slots, or one that may write all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error("{one} and {other} hold the slots {slots} at once")]
    HeldTwice { one: String, other: String, slots: SlotSet },
    #[error("{pod} has a policy without a fence that does not hide everything")]
    Unfenced { pod: String },
}

impl Holders {
    /// A pod begins to run.
    pub(crate) fn begin(&mut self, uid: &str, name: &str, round: u32) {
        let replica = Replica { name: name.to_owned(), round, is_ready: false, fence: None, passes_until: None };
        self.0.entry(uid.to_owned()).or_insert(replica);
    }

    pub(crate) fn set_ready(&mut self, uid: &str, is_ready: bool) {
        if let Some(replica) = self.0.get_mut(uid) {
            replica.is_ready = is_ready;
        }
    }

    /// Its last process has ended.
    pub(crate) fn end(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// The pod's proxy puts a policy in force. That of a pod that has ended changes nothing.
    ///
    /// # Errors
    /// Where somebody else holds what the pod gets.
    pub(crate) fn apply(&mut self, uid: &str, policy: Policy, now: Instant) -> Result<(), Violation> {
        let Some(replica) = self.0.get_mut(uid) else { return Ok(()) };
        if policy.fence.is_none() && !policy.means_the_same(&Policy::nothing()) {
            return Err(Violation::Unfenced { pod: replica.name.clone() });
        }
        replica.fence = policy.fence;
        self.check(uid, now)
    }

    /// The manager has confirmed the pod's policy, as its proxy asked at `asked`.
    ///
    /// # Errors
    /// Where somebody else holds what the pod may write again.
    pub(crate) fn confirm(&mut self, uid: &str, asked: Instant, now: Instant) -> Result<(), Violation> {
        let Some(replica) = self.0.get_mut(uid) else { return Ok(()) };
        replica.passes_until = replica.passes_until.max(Some(asked + WRITES_FOR));
        self.check(uid, now)
    }

    fn check(&self, uid: &str, now: Instant) -> Result<(), Violation> {
        let Some(one) = self.0.get(uid) else { return Ok(()) };
        let held = one.held(now);
        for other in self.0.iter().filter(|(other, _)| *other != uid).map(|(_, other)| other) {
            let slots = held.intersection(other.held(now));
            if !slots.is_empty() {
                return Err(Violation::HeldTwice { one: one.name.clone(), other: other.name.clone(), slots });
            }
        }
        Ok(())
    }

    /// By UID.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = (&String, &Replica)> {
        self.0.iter()
    }

    pub(crate) fn get(&self, uid: &str) -> Option<&Replica> {
        self.0.get(uid)
    }

    /// How many pods are ready that the rolling restart `round` made.
    pub(crate) fn ready(&self, round: u32) -> usize {
        self.0.values().filter(|replica| replica.is_ready && replica.round == round).count()
    }

    /// Whether there are so many pods, all ready and made by the rolling restart `round`, which hold all slots, each as
    /// many as the others or one more.
    pub(crate) fn are_even(&self, replicas: usize, round: u32, now: Instant) -> bool {
        let fewest = usize::from(COUNT) / replicas;
        let is_one = |replica: &Replica| {
            let size = replica.held(now).len();
            replica.is_ready && replica.round == round && (fewest..=fewest + 1).contains(&size)
        };
        // None is held twice, or the benchmark has failed by now.
        let held = self.0.values().fold(SlotSet::EMPTY, |all, replica| all.union(replica.held(now)));
        self.0.len() == replicas && self.0.values().all(is_one) && held == SlotSet::ALL
    }
}

impl Replica {
    /// What it may write.
    pub(crate) fn held(&self, now: Instant) -> SlotSet {
        let Some(fence) = &self.fence else { return SlotSet::EMPTY };
        let passes = !fence.lapses || self.passes_until.is_some_and(|until| now < until);
        let own = fence.slots.iter().filter(|(_, owner)| fence.owner.as_ref() == Some(*owner));
        if passes { own.map(|(slot, _)| *slot).collect() } else { SlotSet::EMPTY }
    }

    /// Whether its policy passes writes only while it is confirmed, and is not.
    pub(crate) fn awaits_confirmation(&self, now: Instant) -> bool {
        self.fence.as_ref().is_some_and(|fence| fence.lapses) && self.passes_until.is_none_or(|until| until <= now)
    }

    /// The shard for which it writes.
    pub(crate) fn shard(&self) -> Option<&str> {
        self.fence.as_ref()?.owner.as_deref()
    }
}
