//! What may a client still hold that it read under an earlier policy?
//!
//! A client that goes on from a version goes on from what it read up to there, and under which policy it read that, the
//! request does not say. So the policies that were in force are remembered, and each may be the one, until a version
//! is known that is newer than whatever was read under it. That version is asked of the API server once nobody reads
//! under it any more, so whoever reads collections says so for as long as it takes. Of what is too long ago, only the
//! resources are remembered of which it said something.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ctrlmesh_common::policy::{LOCK_RESOURCES, Limit, Policy};
use ctrlmesh_common::resource::ResourceMatch;

/// How many policies are remembered: enough for as many changes while one list is read.
const MAX_REMEMBERED: usize = 32;

/// How many resources are remembered of which those that are not said different things.
const MAX_CHANGED: usize = 256;

/// The policies of one pod that were in force since the proxy began to serve it.
#[derive(Debug, Default)]
pub struct History(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    /// The one that came into force last stands last. No two mean the same.
    policies: Vec<Arc<InForce>>,
    /// What is left of those before them.
    forgotten: Option<Past>,
}

/// A policy that is in force, or was.
#[derive(Debug)]
pub struct InForce {
    policy: Arc<Policy>,
    /// Shared by all that mean the same.
    reads: Arc<Reads>,
}

/// Who reads under policies that mean the same, and how far was read.
#[derive(Debug, Default)]
pub(super) struct Reads {
    readers: AtomicUsize,
    until: Mutex<ReadUntil>,
}

/// For each resource, by group and name, a version that is newer than what was read.
#[derive(Debug, Default)]
struct ReadUntil {
    versions: HashMap<(String, String), u64>,
    /// How often this came into force: what was asked for before counts no more.
    times: u64,
}

/// Policies that are not remembered one by one.
#[derive(Debug)]
struct Past {
    /// The first of them.
    first: Arc<Policy>,
    /// The resources of which another said something else; of any, where that is too much to remember.
    changed: Option<Vec<ResourceMatch>>,
    /// Whether another named another lock.
    relocked: bool,
    /// Those that somebody still reads under.
    read: Vec<Arc<Reads>>,
    /// How far was read under all of them.
    reads: Arc<Reads>,
}

/// Somebody reads a collection under a policy, until this is dropped.
#[derive(Debug)]
pub struct Reading(Arc<InForce>);

/// Of whom a version is to be asked that is newer than what was read.
#[derive(Debug)]
pub struct Unread {
    reads: Arc<Reads>,
    times: u64,
}

/// More policies were in force than are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy changed more often than is remembered")]
pub struct Forgotten;

// === impl History ===

impl History {
    /// Of a pod that `policy` is served by from now on: it may have been before this process began, too.
    pub fn begun(policy: &Arc<Policy>) -> Arc<Self> {
        let history = Self::default();
        history.in_force(policy);
        Arc::new(history)
    }

    /// Remembers `policy`, which is in force now.
    pub fn in_force(&self, policy: &Arc<Policy>) -> Arc<InForce> {
        let mut remembered = self.remembered();
        let known = remembered.policies.iter().position(|known| known.means_the_same(policy));
        let reads = known.map(|at| remembered.policies.remove(at).reads.clone());
        let reads = reads.unwrap_or_default();
        reads.again();
        let now = Arc::new(InForce { policy: policy.clone(), reads });
        remembered.policies.push(now.clone());
        if remembered.policies.len() > MAX_REMEMBERED {
            let oldest = remembered.policies.remove(0);
            match &mut remembered.forgotten {
                Some(past) => past.add(&oldest),
                none => *none = Some(Past::of(&oldest)),
            }
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
        let cleared = |reads: &Reads| reads.until(group, resource).is_some_and(|it| it < version);
        let mut suspects: Vec<Arc<InForce>> = Vec::new();
        for past in remembered.policies.iter().filter(|past| !now.shares(past)) {
            let same = |other: &Policy| {
                other.selector_for(group, resource) == past.selector_for(group, resource)
                    && other.lock_for(group, resource) == past.lock_for(group, resource)
            };
            let known = same(now) || suspects.iter().any(|other| same(other));
            if !known && !cleared(&past.reads) {
                suspects.push(past.clone());
            }
        }
        let lost = remembered
            .forgotten
            .as_ref()
            .is_some_and(|past| past.differs(now, group, resource) && !cleared(&past.reads));
        drop(remembered);
        if lost { Err(Forgotten) } else { Ok(suspects) }
    }

    /// Of which policies other than `now` a version of a resource is to be asked: nobody reads under them any more, and
    /// none is known.
    pub fn unread(&self, now: &InForce, (group, resource): (&str, &str)) -> Vec<Unread> {
        let mut remembered = self.remembered();
        let Remembered { policies, forgotten } = &mut *remembered;
        let past = policies.iter().filter(|past| !now.shares(past)).map(|past| &past.reads);
        let forgotten = forgotten.as_mut().and_then(|past| past.is_unread().then_some(&past.reads));
        let unread = past.chain(forgotten);
        let unread = unread.filter_map(|reads| Reads::unread(reads, group, resource)).collect();
        drop(remembered);
        unread
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl InForce ===

impl InForce {
    /// Says that somebody reads under it. Whoever does looks afterwards whether it is still in force: whoever finds it
    /// unread did so before.
    pub fn read(self: &Arc<Self>) -> Reading {
        self.reads.readers.fetch_add(1, Ordering::SeqCst);
        Reading(self.clone())
    }

    /// Whether the other means the same.
    fn shares(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.reads, &other.reads)
    }
}

impl Deref for InForce {
    type Target = Policy;

    fn deref(&self) -> &Policy {
        &self.policy
    }
}

// === impl Reads ===

impl Reads {
    /// Whether nobody reads, and no version is known; asked once another policy is in force.
    fn unread(this: &Arc<Self>, group: &str, resource: &str) -> Option<Unread> {
        let key = (group.to_owned(), resource.to_owned());
        let (known, times) = {
            let until = this.lock();
            (until.versions.contains_key(&key), until.times)
        };
        let unread = !known && this.is_unread();
        unread.then(|| Unread { reads: this.clone(), times })
    }

    fn is_unread(&self) -> bool {
        self.readers.load(Ordering::SeqCst) == 0
    }

    fn until(&self, group: &str, resource: &str) -> Option<u64> {
        let key = (group.to_owned(), resource.to_owned());
        self.lock().versions.get(&key).copied()
    }

    fn again(&self) {
        let mut until = self.lock();
        until.times += 1;
        until.versions.clear();
    }

    /// Takes in what was read elsewhere: what is not known of both is not known.
    fn add(&self, other: &Self) {
        let (mut until, other) = (self.lock(), other.lock());
        until.times += 1;
        until.versions.retain(|key, _| other.versions.contains_key(key));
        for (key, version) in &mut until.versions {
            *version = (*version).max(other.versions[key]);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ReadUntil> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Unread ===

impl Unread {
    /// Says that what was read of a resource is of `version` at most, which the API server gave after this was found.
    pub fn was_read_until(&self, (group, resource): (&str, &str), version: u64) {
        let mut until = self.reads.lock();
        if until.times == self.times {
            until.versions.insert((group.to_owned(), resource.to_owned()), version);
        }
    }
}

// === impl Past ===

impl Past {
    fn of(first: &InForce) -> Self {
        let reads = Reads::default();
        reads.lock().versions.clone_from(&first.reads.lock().versions);
        Self {
            first: first.policy.clone(),
            changed: Some(Vec::new()),
            relocked: false,
            read: vec![first.reads.clone()],
            reads: reads.into(),
        }
    }

    fn add(&mut self, next: &InForce) {
        self.reads.add(&next.reads);
        self.is_unread();
        self.read.push(next.reads.clone());
        let first = self.first.clone();
        self.relocked |= next.lock != first.lock;
        if next.mode != first.mode {
            self.changed = None;
        }
        let not_in = |others: &Policy, limit: &Limit| {
            !others.limits.iter().any(|other| other.means_the_same(limit))
        };
        for limit in next.limits.iter().filter(|limit| not_in(&first, limit)) {
            self.change(limit);
        }
        for limit in first.limits.iter().filter(|limit| not_in(next, limit)) {
            self.change(limit);
        }
    }

    fn change(&mut self, limit: &Limit) {
        let Some(changed) = &mut self.changed else { return };
        for resources in &limit.relate_resources {
            if !changed.contains(resources) {
                changed.push(resources.clone());
            }
        }
        if limit.relate_resources.is_empty() || changed.len() > MAX_CHANGED {
            self.changed = None;
        }
    }

    /// Whether one of them may have said something else of a resource than `now` does.
    fn differs(&self, now: &Policy, group: &str, resource: &str) -> bool {
        let covered = |all: &[ResourceMatch]| all.iter().any(|one| one.covers(group, resource));
        self.changed.as_deref().is_none_or(covered)
            || self.relocked && LOCK_RESOURCES.contains(&(group, resource))
            || self.first.selector_for(group, resource) != now.selector_for(group, resource)
            || self.first.lock_for(group, resource) != now.lock_for(group, resource)
    }

    /// Whether nobody reads under any of them.
    fn is_unread(&mut self) -> bool {
        self.read.retain(|reads| !reads.is_unread());
        self.read.is_empty()
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
        self.0.reads.readers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
