//! What may a client still hold that it read under an earlier policy?
//!
//! A client that goes on from a version goes on from what it read up to there, and under which policy it read that, the
//! request does not say. So the policies that were in force are remembered, and each may be the one, until a version
//! is known that is newer than whatever was read under it. That version is asked of the API server once nobody reads
//! under it any more, so whoever reads collections says so for as long as it takes.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ctrlmesh_common::policy::Policy;

/// How many policies are remembered: enough for as many changes while one list is read.
const MAX_REMEMBERED: usize = 32;

/// The policies of one pod that were in force since the proxy began to serve it.
#[derive(Debug, Default)]
pub struct History(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    /// The one that came into force last stands last.
    policies: Vec<Arc<InForce>>,
    /// Whether one was forgotten that a client may have read under.
    forgotten: bool,
}

/// A policy that is in force, or was.
#[derive(Debug)]
pub struct InForce {
    policy: Arc<Policy>,
    readers: AtomicUsize,
    read_until: Mutex<ReadUntil>,
}

/// For each resource, by group and name, a version that is newer than what was read under a policy.
#[derive(Debug, Default)]
struct ReadUntil {
    versions: HashMap<(String, String), u64>,
    /// How often the policy came into force: what was asked for before counts no more.
    times: u64,
}

/// Somebody reads a collection under a policy, until this is dropped.
#[derive(Debug)]
pub struct Reading(Arc<InForce>);

/// When a policy that nobody reads under was found so.
#[derive(Clone, Copy, Debug)]
pub struct Unread {
    times: u64,
}

/// More policies were in force than are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy changed more often than is remembered")]
pub struct Forgotten;

// === impl History ===

impl History {
    /// Remembers `policy`, which is in force now.
    pub fn in_force(&self, policy: &Arc<Policy>) -> Arc<InForce> {
        let mut remembered = self.remembered();
        let known = remembered.policies.iter().position(|known| known.policy == *policy);
        let now = match known {
            Some(at) => remembered.policies.remove(at),
            None => Arc::new(InForce::new(policy.clone())),
        };
        now.again();
        remembered.policies.push(now.clone());
        if remembered.policies.len() > MAX_REMEMBERED {
            remembered.policies.remove(0);
            remembered.forgotten = true;
        }
        now
    }

    /// The policies under which a client may have read what it has of a resource up to `version`, other than `now` and
    /// those that say the same of the resource.
    ///
    /// # Errors
    /// Where one of them may have been forgotten.
    pub fn suspects(
        &self,
        now: &InForce,
        (group, resource): (&str, &str),
        version: u64,
    ) -> Result<Vec<Arc<InForce>>, Forgotten> {
        let remembered = self.remembered();
        let mut proved = false;
        let mut suspects: Vec<Arc<InForce>> = Vec::new();
        for past in remembered.policies.iter().filter(|past| past.policy != now.policy) {
            if past.read_until(group, resource).is_some_and(|until| until < version) {
                proved = true;
                continue;
            }
            let says = |policy: &Policy| policy.selector_for(group, resource);
            let same = |other: &Policy| says(other) == says(past) && other.lock == past.lock;
            if !same(now) && !suspects.iter().any(|other| same(other)) {
                suspects.push(past.clone());
            }
        }
        if remembered.forgotten && !proved { Err(Forgotten) } else { Ok(suspects) }
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl InForce ===

impl InForce {
    fn new(policy: Arc<Policy>) -> Self {
        Self { policy, readers: AtomicUsize::new(0), read_until: Mutex::default() }
    }

    /// Says that somebody reads under it. Whoever does looks afterwards whether it is still in force: whoever finds it
    /// unread did so before.
    pub fn read(self: &Arc<Self>) -> Reading {
        self.readers.fetch_add(1, Ordering::SeqCst);
        Reading(self.clone())
    }

    /// Whether nobody reads under it; asked once another is in force.
    pub fn unread(&self) -> Option<Unread> {
        let times = self.lock().times;
        (self.readers.load(Ordering::SeqCst) == 0).then_some(Unread { times })
    }

    /// Says that what was read of a resource under it is of `version` at most, which the API server gave after `unread`.
    pub fn was_read_until(&self, unread: Unread, (group, resource): (&str, &str), version: u64) {
        let mut read_until = self.lock();
        if read_until.times == unread.times {
            read_until.versions.insert((group.to_owned(), resource.to_owned()), version);
        }
    }

    fn read_until(&self, group: &str, resource: &str) -> Option<u64> {
        let key = (group.to_owned(), resource.to_owned());
        self.lock().versions.get(&key).copied()
    }

    fn again(&self) {
        let mut read_until = self.lock();
        read_until.times += 1;
        read_until.versions.clear();
    }

    fn lock(&self) -> MutexGuard<'_, ReadUntil> {
        self.read_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for InForce {
    type Target = Policy;

    fn deref(&self) -> &Policy {
        &self.policy
    }
}

// === impl Reading ===

impl Reading {
    /// Under which policy.
    pub fn policy(&self) -> &Arc<InForce> {
        &self.0
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Limit;
    use ctrlmesh_common::selector::Selector;

    use super::*;

    const PODS: (&str, &str) = ("", "pods");

    fn policy(selector: &str, epoch: u64) -> Arc<Policy> {
        let selector = Selector::parse(selector).unwrap();
        let limits = vec![Limit { selector, ..Limit::default() }];
        Arc::new(Policy { epoch, limits, ..Policy::default() })
    }

    fn epochs(suspects: Vec<Arc<InForce>>) -> Vec<u64> {
        suspects.iter().map(|past| past.epoch).collect()
    }

    #[test]
    fn every_policy_that_said_otherwise_is_suspected_once() {
        let history = History::default();
        for (epoch, selector) in ["a=1", "a=2", "a=1", "a=3"].into_iter().enumerate() {
            history.in_force(&policy(selector, epoch as u64));
        }
        let now = history.in_force(&policy("a=3", 4));
        assert_eq!(epochs(history.suspects(&now, PODS, 7).unwrap()), [0, 1]);
    }

    #[test]
    fn a_version_newer_than_what_was_read_under_a_policy_clears_it() {
        let history = History::default();
        let old = history.in_force(&policy("a=1", 1));
        let now = history.in_force(&policy("a=2", 2));
        old.was_read_until(old.unread().unwrap(), PODS, 10);
        assert_eq!(epochs(history.suspects(&now, PODS, 10).unwrap()), [1]);
        assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
        assert_eq!(epochs(history.suspects(&now, ("", "nodes"), 11).unwrap()), [1]);
    }

    #[test]
    fn what_is_still_read_under_a_policy_has_no_last_version() {
        let history = History::default();
        let old = history.in_force(&policy("a=1", 1));
        let reading = old.read();
        history.in_force(&policy("a=2", 2));
        assert!(old.unread().is_none());
        drop(reading);
        assert!(old.unread().is_some());
    }

    #[test]
    fn a_policy_that_comes_back_is_read_again() {
        let history = History::default();
        let old = history.in_force(&policy("a=1", 1));
        history.in_force(&policy("a=2", 2));
        let unread = old.unread().unwrap();
        assert!(Arc::ptr_eq(&old, &history.in_force(&policy("a=1", 1))));
        let now = history.in_force(&policy("a=2", 2));
        // The answer to what was asked before it came back.
        old.was_read_until(unread, PODS, 10);
        assert_eq!(epochs(history.suspects(&now, PODS, 11).unwrap()), [1]);
    }

    #[test]
    fn what_is_forgotten_may_be_anything_until_a_later_policy_is_cleared() {
        let history = History::default();
        let all: Vec<_> =
            (0..=33).map(|n| history.in_force(&policy(&format!("a={n}"), n))).collect();
        let now = all.last().unwrap();
        assert_eq!(history.suspects(now, PODS, 7).unwrap_err(), Forgotten);
        let last = &all[32];
        last.was_read_until(last.unread().unwrap(), PODS, 10);
        assert!(history.suspects(now, PODS, 10).is_err());
        assert_eq!(history.suspects(now, PODS, 11).unwrap().len(), 30);
    }
}
