//! What may a client still hold that it read under an earlier policy?
//!
//! A client that goes on from a version goes on from what it read up to there, and under which policy it read that, the
//! request does not say. So the policies are remembered under which somebody was answered, and each may be the one,
//! until a version is known that is newer than whatever was read under it. That version is asked of the API server, for
//! each resource, once nobody reads that under it any more, so whoever reads collections says so for as long as it
//! takes. Of what is too long ago, only the resources are remembered of which it said something. All of it is written
//! down, since clients outlive this process.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_runtime::sync::lock;

mod reads;
mod summary;
mod file;
mod versions;

use file::WrittenPolicy;
use reads::Reads;
use summary::Past;
use versions::Versions;

pub use file::{Kept, tidy};
pub use reads::{ReadOf, Unread};

/// How many policies are remembered: enough for as many changes while one list is read.
const MAX_REMEMBERED: usize = 32;

/// The policies of one pod under which its operator may have read.
#[derive(Debug, Default)]
pub struct History {
    remembered: Mutex<Remembered>,
    kept: Option<Kept>,
    versions: Versions,
}

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

/// Somebody reads a collection under a policy, until this is dropped.
#[derive(Debug)]
pub struct Reading {
    policy: Arc<InForce>,
    of: ReadOf,
}

/// More policies were in force than are remembered, or it is not known which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy changed more often than is remembered")]
pub struct Forgotten;

impl History {
    /// Of a pod that was served before by a process of which nothing is known.
    pub fn unknown() -> Arc<Self> {
        let forgotten = Some(Past::unknown());
        let remembered = Remembered { policies: Vec::new(), forgotten };
        Arc::new(Self { remembered: Mutex::new(remembered), ..Self::default() })
    }

    /// Of a pod of which a former process may have kept something; where it did not, nobody served the pod before.
    pub fn kept(kept: Kept) -> Arc<Self> {
        let remembered = match kept.read() {
            Ok(Some(written)) => {
                let policies = written.policies.into_iter().map(InForce::written_before);
                let policies = policies.map(Arc::new).collect();
                Remembered { policies, forgotten: written.forgotten.map(Past::from) }
            }
            Ok(None) => Remembered::default(),
            Err(()) => Remembered { policies: Vec::new(), forgotten: Some(Past::unknown()) },
        };
        let (remembered, kept) = (Mutex::new(remembered), Some(kept));
        Arc::new(Self { remembered, kept, versions: Versions::default() })
    }

    /// Remembers `policy`, which is in force now, and those before it under which somebody was answered, or may be yet.
    pub fn in_force(&self, policy: &Arc<Policy>) -> Arc<InForce> {
        let mut remembered = self.remembered();
        let known = remembered.policies.iter().position(|known| known.means_the_same(policy));
        let last = known.is_some_and(|at| at + 1 == remembered.policies.len());
        let reads = known.map(|at| remembered.policies.remove(at).reads.clone());
        let reads = reads.unwrap_or_default();
        reads.again();
        remembered.policies.retain(|past| past.reads.are_read() || !past.reads.is_empty());
        let now = Arc::new(InForce { policy: policy.clone(), reads });
        remembered.policies.push(now.clone());
        if remembered.policies.len() > MAX_REMEMBERED {
            let oldest = remembered.policies.remove(0);
            match &mut remembered.forgotten {
                Some(past) => past.add(&oldest),
                none => *none = Some(Past::of(&oldest)),
            }
        }
        if !last {
            self.write_down(&remembered);
        }
        now
    }

    /// Remembers that the pod is served no more: it may read everything, past us, until it is served again.
    pub fn let_go(&self) {
        self.in_force(&Arc::default()).reads.answered_all();
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
        let mut remembered = self.remembered();
        let mut suspects: Vec<Arc<InForce>> = Vec::new();
        for past in remembered.policies.iter().filter(|past| !now.shares(past)) {
            let same = |other: &Policy| {
                other.selector_for(group, resource) == past.selector_for(group, resource)
                    && other.lock_for(group, resource) == past.lock_for(group, resource)
            };
            let known = same(now) || suspects.iter().any(|other| same(other));
            if !known && !past.reads.until(group, resource).is_before(version) {
                suspects.push(past.clone());
            }
        }
        let forgotten = remembered.forgotten.as_mut();
        let lost = forgotten.is_some_and(|past| past.is_suspect(now, (group, resource), version));
        drop(remembered);
        if lost { Err(Forgotten) } else { Ok(suspects) }
    }

    /// Of which policies other than `now` a version of a resource is to be asked: nobody reads it under them any more,
    /// and none is known.
    pub fn unread(&self, now: &InForce, (group, resource): (&str, &str)) -> Vec<Unread> {
        let mut remembered = self.remembered();
        let Remembered { policies, forgotten } = &mut *remembered;
        let past = policies.iter().filter(|past| !now.shares(past));
        let unread = past.filter_map(|past| Reads::unread(&past.reads, group, resource));
        let mut unread: Vec<_> = unread.collect();
        unread.extend(forgotten.iter_mut().flat_map(|past| past.unread(group, resource)));
        drop(remembered);
        unread
    }

    /// Says of all of them that what was read of a resource is of `version` at most, which the API server gave after
    /// they were found.
    pub fn was_read_until(&self, unread: &[Unread], resource: (&str, &str), version: u64) {
        for unread in unread {
            unread.was_read_until(resource, version);
        }
        self.write_down(&self.remembered());
    }

    /// Whether versions of a resource compare with the one at which the policy changed, where that is known.
    pub fn compare(&self, resource: (&str, &str), changed_at: u64) -> Option<bool> {
        self.versions.compare(resource, changed_at)
    }

    /// Takes in the newest version of a resource, which the API server gave after the policy had changed; whether they
    /// compare.
    pub fn found(&self, resource: (&str, &str), changed_at: u64, newest: u64) -> bool {
        self.versions.found(resource, changed_at, newest)
    }

    /// Keeps it for the next process, which cannot know who was answered since: whoever might have been, was.
    fn write_down(&self, remembered: &Remembered) {
        let Some(kept) = &self.kept else { return };
        let policies = remembered.policies.iter().map(|past| past.written());
        kept.write(policies.collect(), remembered.forgotten.as_ref().map(Past::written));
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        lock(&self.remembered)
    }
}

impl InForce {
    fn written_before(written: WrittenPolicy) -> Self {
        Self { policy: written.policy.into(), reads: Reads::of_all(written.until).into() }
    }

    fn written(&self) -> WrittenPolicy {
        WrittenPolicy { policy: self.policy.as_ref().clone(), until: self.reads.known() }
    }

    /// Says that somebody reads under it. Whoever does looks afterwards whether it is still in force: whoever finds it
    /// unread did so before.
    pub fn read(self: &Arc<Self>, of: ReadOf) -> Reading {
        self.reads.begin(of);
        Reading { policy: self.clone(), of }
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

impl Reading {
    /// Under which policy.
    pub fn policy(&self) -> &Arc<InForce> {
        &self.policy
    }

    /// Of what.
    pub fn of(&self) -> ReadOf {
        self.of
    }

    /// Says that the API server answered: from here on the reader may hold something of the resource.
    pub fn answered(&self, group: &str, resource: &str) {
        self.policy.reads.answered(group, resource);
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.policy.reads.end(self.of);
    }
}

#[cfg(test)]
mod tests;
