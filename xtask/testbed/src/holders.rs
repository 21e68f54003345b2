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
pub struct Holders(BTreeMap<String, Replica>);

/// One pod.
#[derive(Debug)]
pub struct Replica {
    /// Of the pod.
    pub name: String,
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
pub enum Violation {
    /// Two pods hold the same slots.
    #[error("{one} and {other} hold the slots {slots} at once")]
    HeldTwice {
        /// The one that got them now.
        one: String,
        /// The one that has them.
        other: String,
        /// Which.
        slots: SlotSet,
    },
    /// A pod may write all.
    #[error("{pod} has a policy that fences nothing and does not hide everything")]
    Unfenced {
        /// Which.
        pod: String,
    },
}

impl Holders {
    /// A pod begins to run.
    pub fn begin(&mut self, uid: &str, name: &str, round: u32) {
        let replica = Replica { name: name.to_owned(), round, is_ready: false, fence: None, passes_until: None };
        self.0.entry(uid.to_owned()).or_insert(replica);
    }

    /// The API server says whether a pod is ready.
    pub fn set_ready(&mut self, uid: &str, is_ready: bool) {
        if let Some(replica) = self.0.get_mut(uid) {
            replica.is_ready = is_ready;
        }
    }

    /// Its last process has ended.
    pub fn end(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// The pod's proxy puts a policy in force. That of a pod that has ended changes nothing.
    ///
    /// # Errors
    /// Where somebody else holds what the pod gets.
    pub fn apply(&mut self, uid: &str, policy: Policy, now: Instant) -> Result<(), Violation> {
        let Some(replica) = self.0.get_mut(uid) else { return Ok(()) };
        let is_harmless = policy.fence.is_some() || policy.means_the_same(&Policy::nothing());
        if policy.passes_everything() || !is_harmless {
            return Err(Violation::Unfenced { pod: replica.name.clone() });
        }
        replica.fence = policy.fence;
        self.check(uid, now)
    }

    /// The manager has confirmed the pod's policy, as its proxy asked at `asked`.
    ///
    /// # Errors
    /// Where somebody else holds what the pod may write again.
    pub fn confirm(&mut self, uid: &str, asked: Instant, now: Instant) -> Result<(), Violation> {
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
    pub fn replicas(&self) -> impl Iterator<Item = (&String, &Replica)> {
        self.0.iter()
    }

    /// By its UID.
    pub fn get(&self, uid: &str) -> Option<&Replica> {
        self.0.get(uid)
    }

    /// How many pods are ready that the rolling restart `round` made.
    pub fn ready(&self, round: u32) -> usize {
        self.0.values().filter(|replica| replica.is_ready && replica.round == round).count()
    }

    /// Whether there are so many pods, all ready and made by the rolling restart `round`, which hold all slots, each as
    /// many as the others or one more.
    pub fn are_even(&self, replicas: usize, round: u32, now: Instant) -> bool {
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
    pub fn held(&self, now: Instant) -> SlotSet {
        let Some(fence) = &self.fence else { return SlotSet::EMPTY };
        let passes = !fence.lapses || self.passes_until.is_some_and(|until| now < until);
        let own = fence.slots.iter().filter(|(_, owner)| fence.owner.as_ref() == Some(*owner));
        if passes { own.map(|(slot, _)| *slot).collect() } else { SlotSet::EMPTY }
    }

    /// Whether its policy passes writes only while it is confirmed, and is not.
    pub fn awaits_confirmation(&self, now: Instant) -> bool {
        self.fence.as_ref().is_some_and(|fence| fence.lapses) && self.passes_until.is_none_or(|until| until <= now)
    }

    /// The shard for which it writes.
    pub fn shard(&self) -> Option<&str> {
        self.fence.as_ref()?.owner.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Mode;
    use ctrlmesh_common::slots::Slot;

    use super::*;

    /// A policy by which the shard `owner` owns `own`, and `b` the rest.
    fn policy(owner: &str, own: SlotSet, lapses: bool) -> Policy {
        let rest = own.complement().iter().map(|slot| (slot, "b".to_owned()));
        let slots = own.iter().map(|slot| (slot, "a".to_owned())).chain(rest).collect();
        let fence = Fence { owner: Some(owner.to_owned()), slots, lapses, ..Fence::default() };
        Policy { fence: Some(fence), ..Policy::default() }
    }

    fn first(count: usize) -> SlotSet {
        SlotSet::ALL.iter().take(count).collect()
    }

    fn two() -> Holders {
        let mut holders = Holders::default();
        for uid in ["a", "b"] {
            holders.begin(uid, uid, 0);
            holders.set_ready(uid, true);
        }
        holders
    }

    #[test]
    fn a_slot_that_two_pods_may_write_is_found() {
        let (mut holders, now) = (two(), Instant::now());
        holders.apply("a", policy("a", first(16), false), now).unwrap();
        holders.apply("b", policy("b", first(16), false), now).unwrap();
        assert!(holders.are_even(2, 0, now) && !holders.are_even(2, 1, now) && !holders.are_even(3, 0, now));
        // Granted before the other one has acknowledged that it was taken away.
        let violation = holders.apply("b", policy("b", first(15), false), now).unwrap_err();
        let slots: SlotSet = [Slot::try_from(15).unwrap()].into_iter().collect();
        assert_eq!(violation, Violation::HeldTwice { one: "b".to_owned(), other: "a".to_owned(), slots });
        holders.apply("a", policy("a", first(15), false), now).unwrap();
        assert!(!holders.are_even(2, 0, now), "15 and 17");
    }

    #[test]
    fn a_pod_holds_its_slots_until_its_processes_end() {
        let (mut holders, now) = (two(), Instant::now());
        holders.apply("a", policy("a", first(16), false), now).unwrap();
        holders.set_ready("a", false);
        assert!(holders.apply("b", policy("b", SlotSet::EMPTY, false), now).is_err());
        holders.end("a");
        holders.apply("b", policy("b", SlotSet::EMPTY, false), now).unwrap();
        holders.apply("a", policy("a", first(16), false), now).unwrap();
        assert!(holders.are_even(1, 0, now), "one that has ended holds nothing");
    }

    #[test]
    fn a_policy_that_lapses_counts_while_it_is_confirmed() {
        let (mut holders, now) = (two(), Instant::now());
        holders.apply("a", policy("a", first(16), true), now).unwrap();
        assert!(holders.get("a").unwrap().awaits_confirmation(now) && holders.get("a").unwrap().held(now).is_empty());
        holders.confirm("a", now, now).unwrap();
        assert_eq!(holders.get("a").unwrap().held(now).len(), 16);
        let later = now + Duration::from_secs(19);
        assert!(holders.apply("b", policy("b", SlotSet::EMPTY, false), later).is_err(), "a write may be under way");
        let lapsed = now + Duration::from_secs(20);
        holders.apply("b", policy("b", SlotSet::EMPTY, false), lapsed).unwrap();
        assert!(holders.confirm("a", lapsed, lapsed).is_err(), "confirmed after its slots were granted");
    }

    #[test]
    fn a_pod_without_a_fence_may_only_see_nothing() {
        let (mut holders, now) = (two(), Instant::now());
        holders.apply("a", Policy::nothing(), now).unwrap();
        let passes = Policy { mode: Mode::Pass, ..policy("a", first(16), false) };
        for unfenced in [Policy::default(), passes] {
            let unfenced = holders.apply("a", unfenced, now);
            assert_eq!(unfenced, Err(Violation::Unfenced { pod: "a".to_owned() }));
        }
    }
}
