//! Remembers the policies under which a pod's clients may have read objects that they still hold.
//!
//! A request that continues from a version does not tell under which policy the client read that version. So every
//! policy is remembered under which a client was answered. It is a suspect until a version is known that is newer than
//! everything read under it. The proxy asks the API server for that version, for each resource, once no client reads
//! the resource under that policy. Therefore readers of collections register while they read. Of policies long ago,
//! only the resources are remembered that they limited. The history is written to a file, because clients outlive this
//! process.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::resource::ResourceKey;
use ctrlmesh_runtime::sync::lock;

mod reads;
mod summary;
mod file;
mod versions;

use file::StoredPolicy;
use reads::Reads;
use summary::ForgottenPolicies;
use versions::Versions;

pub use file::HistoryFile;
pub use reads::{PendingVersions, ReadOf, ReadResource};

/// Policies that are remembered one by one: enough for as many changes while one list is read.
const MAX_REMEMBERED: usize = 32;

/// The policies of one pod under which its operator may have read.
#[derive(Debug, Default)]
pub struct History {
    remembered: Mutex<PastPolicies>,
    kept: Option<HistoryFile>,
    versions: Versions,
}

#[derive(Debug, Default)]
struct PastPolicies {
    /// In the order in which they came into force. No two mean the same.
    policies: Vec<Arc<InForce>>,
    /// A summary of those before them.
    forgotten: Option<ForgottenPolicies>,
}

/// A policy that is in force, or was.
#[derive(Debug)]
pub struct InForce {
    policy: Arc<Policy>,
    /// Shared by all policies that mean the same.
    reads: Arc<Reads>,
}

/// Registers a reader of a collection under a policy, until it is dropped.
#[derive(Debug)]
pub struct Reading {
    policy: Arc<InForce>,
    of: ReadOf,
}

/// One of the policies in force may not be remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy changed more often than is remembered")]
pub struct HistoryExceeded;

impl History {
    /// For a pod that another process may have served, which left no history.
    pub fn unknown() -> Arc<Self> {
        let forgotten = Some(ForgottenPolicies::unknown());
        let remembered = PastPolicies { policies: Vec::new(), forgotten };
        Arc::new(Self { remembered: Mutex::new(remembered), ..Self::default() })
    }

    /// Reads a pod's file. Without one, no process has served the pod before.
    pub fn load(kept: HistoryFile) -> Arc<Self> {
        let remembered = match kept.read() {
            Ok(Some(written)) => {
                let policies = written.policies.into_iter().map(InForce::written_before);
                let policies = policies.map(Arc::new).collect();
                PastPolicies { policies, forgotten: written.forgotten.map(ForgottenPolicies::from) }
            }
            Ok(None) => PastPolicies::default(),
            Err(()) => PastPolicies { policies: Vec::new(), forgotten: Some(ForgottenPolicies::unknown()) },
        };
        let (remembered, kept) = (Mutex::new(remembered), Some(kept));
        Arc::new(Self { remembered, kept, versions: Versions::default() })
    }

    /// Remembers that `policy` is in force now. Forgets those before it under which no client was or will be answered.
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
                none => *none = Some(ForgottenPolicies::of(&oldest)),
            }
        }
        if !last {
            self.write_down(&remembered);
        }
        now
    }

    /// Remembers that the pod is served no more: until it is again, it may read everything past the proxy.
    pub fn record_release(&self) {
        self.in_force(&Arc::default()).reads.answered_all();
    }

    /// Whether a client may have read under a policy that is `held`.
    pub fn has_past(&self, held: impl Fn(&Policy) -> bool) -> bool {
        self.remembered().policies.iter().any(|past| held(past))
    }

    /// Forgets all policies: every process that read under them has ended.
    pub fn forget_readers(&self) {
        let mut remembered = self.remembered();
        *remembered = PastPolicies::default();
        self.write_down(&remembered);
        drop(remembered);
    }

    /// The policies under which a client may have read a resource up to `version`, without `now` and those that limit
    /// the resource in the same way.
    ///
    /// # Errors
    /// Where one of them may have been forgotten.
    pub fn suspects(
        &self,
        now: &InForce,
        of: ResourceKey<'_>,
        version: u64,
    ) -> Result<Vec<Arc<InForce>>, HistoryExceeded> {
        let mut remembered = self.remembered();
        let mut suspects: Vec<Arc<InForce>> = Vec::new();
        for past in remembered.policies.iter().filter(|past| !now.shares(past)) {
            let same =
                |other: &Policy| other.selector_of(of) == past.selector_of(of) && other.lock_of(of) == past.lock_of(of);
            let known = same(now) || suspects.iter().any(|other| same(other));
            if !known && !past.reads.until(of).is_before(version) {
                suspects.push(past.clone());
            }
        }
        let forgotten = remembered.forgotten.as_mut();
        let lost = forgotten.is_some_and(|past| past.is_suspect(now, of, version));
        drop(remembered);
        if lost { Err(HistoryExceeded) } else { Ok(suspects) }
    }

    /// Completes once nobody reads under a policy that does not mean the same as `now`, which is in force.
    pub(crate) async fn read_by_nobody_but(&self, now: &Policy) {
        let readers = || {
            let remembered = self.remembered();
            let mut past = remembered.policies.iter().filter(|past| !past.means_the_same(now));
            let read = past.find(|past| past.reads.are_read()).map(|past| past.reads.clone());
            drop(remembered);
            read
        };
        while let Some(reads) = readers() {
            reads.until_unread().await;
        }
    }

    /// The policies other than `now` for which the API server is to be asked for a version of a resource: no client
    /// reads it under them any more, and no version is known.
    pub fn unread(&self, now: &InForce, of: ResourceKey<'_>) -> Vec<PendingVersions> {
        let mut remembered = self.remembered();
        let PastPolicies { policies, forgotten } = &mut *remembered;
        let past = policies.iter().filter(|past| !now.shares(past));
        let unread = past.filter_map(|past| Reads::unread(&past.reads, of));
        let mut unread: Vec<_> = unread.collect();
        unread.extend(forgotten.iter_mut().flat_map(|past| past.unread(of)));
        drop(remembered);
        unread
    }

    /// Records that no client read a resource beyond `version` under those policies. The API server must have given the
    /// version after [`History::unread`] returned them.
    pub fn was_read_until(&self, unread: &[PendingVersions], of: ResourceKey<'_>, version: u64) {
        for unread in unread {
            unread.was_read_until(of, version);
        }
        self.write_down(&self.remembered());
    }

    /// Whether versions of a resource compare with the one at which the policy changed, where that is known.
    pub fn compare(&self, of: ResourceKey<'_>, changed_at: u64) -> Option<bool> {
        self.versions.compare(of, changed_at)
    }

    /// Records the newest version of a resource, which the API server gave after the policy had changed. Returns
    /// whether the two compare.
    pub fn found(&self, of: ResourceKey<'_>, changed_at: u64, newest: u64) -> bool {
        self.versions.found(of, changed_at, newest)
    }

    /// Writes the file for the next process. That one has to assume that every possible reader was answered.
    fn write_down(&self, remembered: &PastPolicies) {
        let Some(kept) = &self.kept else { return };
        let policies = remembered.policies.iter().map(|past| past.written());
        kept.write(policies.collect(), remembered.forgotten.as_ref().map(ForgottenPolicies::written));
    }

    fn remembered(&self) -> MutexGuard<'_, PastPolicies> {
        lock(&self.remembered)
    }
}

impl InForce {
    fn written_before(written: StoredPolicy) -> Self {
        Self { policy: written.policy.into(), reads: Reads::of_all(written.until).into() }
    }

    fn written(&self) -> StoredPolicy {
        StoredPolicy { policy: self.policy.as_ref().clone(), until: self.reads.known() }
    }

    /// Registers a reader. The caller then checks that the policy is still in force: a policy that was replaced before
    /// may already count as unread.
    pub fn read(self: &Arc<Self>, of: ReadOf) -> Reading {
        self.reads.begin(of);
        Reading { policy: self.clone(), of }
    }

    /// Whether both mean the same.
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
    pub fn policy(&self) -> &Arc<InForce> {
        &self.policy
    }

    pub fn of(&self) -> ReadOf {
        self.of
    }

    /// Records that the API server answered: from here on the reader may hold objects of the resource.
    pub fn answered(&self, of: ResourceKey<'_>) {
        self.policy.reads.answered(of);
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.policy.reads.end(self.of);
    }
}

#[cfg(test)]
mod tests;
