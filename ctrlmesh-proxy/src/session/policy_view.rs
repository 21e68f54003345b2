//! The policy as one client connection sees it.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_request::decide;
use ctrlmesh_request::request::RequestInfo;

use crate::policy::{
    Current, History, HistoryExceeded, InForce, PendingVersions, ReadOf, ReadResource, Reading, Validity, Write,
    Writes, WritesUnder,
};
use crate::session::ServedPod;
use ctrlmesh_runtime::drain::Drain;

/// The policy in force. As long as it does not change, reading it takes no lock.
#[derive(Debug)]
pub(crate) struct PolicyView {
    snapshot: RefCell<Snapshot>,
    history: Arc<History>,
    writes: Arc<Writes>,
    validity: Validity,
}

/// The policy under which a request begins.
#[derive(Debug)]
pub(crate) struct BegunRequest {
    pub(crate) policy: Arc<InForce>,
    /// Of a request for a collection.
    pub(crate) reading: Option<Reading>,
    /// Of a request that writes.
    pub(crate) write: Option<Write>,
    /// Of a request that passes only while the policy is confirmed.
    pub(crate) validity: Option<Validity>,
}

#[derive(Debug)]
struct Snapshot {
    current: Current,
    policy: Arc<Policy>,
    in_force: Arc<InForce>,
    writes: Arc<WritesUnder>,
    /// The resources of which the history knows that they were answered under this policy.
    answered: Vec<ReadResource>,
}

impl PolicyView {
    pub(crate) fn new(served: ServedPod) -> Self {
        let ServedPod { policy: mut current, history, writes, validity, .. } = served;
        let policy = current.borrow_and_update().clone();
        let in_force = history.in_force(&policy);
        let writes_under = writes.under(&policy);
        let snapshot = Snapshot { current, policy, in_force, writes: writes_under, answered: Vec::new() };
        Self { snapshot: RefCell::new(snapshot), history, writes, validity }
    }

    pub(crate) fn current(&self) -> Arc<InForce> {
        let snapshot = &mut *self.snapshot.borrow_mut();
        // Closed at shutdown: the last policy stays.
        if snapshot.current.has_changed().unwrap_or(true) {
            snapshot.refresh(&self.history, &self.writes);
        }
        snapshot.in_force.clone()
    }

    /// Registers a request as a reader of a collection and as a write, whatever it is, under the current policy.
    pub(crate) fn begin(&self, info: &RequestInfo<'_>) -> BegunRequest {
        loop {
            let policy = self.current();
            let reading = info.is_collection().then(|| {
                let of = ReadOf::resource(info.resource_key());
                policy.read(of)
            });
            let written = decide::written(&policy, info);
            let write = written.map(|written| self.snapshot.borrow().writes.begin(written));
            let validity = decide::lapses(&policy, info).then(|| self.validity.clone());
            let begun = BegunRequest { policy, reading, write, validity };
            // Where the policy was replaced meanwhile, that may have happened without notice of this request.
            let registered = begun.reading.is_some() || begun.write.is_some();
            if !registered || !self.refresh() {
                return begun;
            }
        }
    }

    /// Registers a reader of a collection under the current policy.
    pub(crate) fn read(&self, of: ReadOf) -> Reading {
        loop {
            let reading = self.current().read(of);
            // Where the policy was replaced meanwhile, that may have happened without notice of this reader.
            if !self.refresh() {
                return reading;
            }
        }
    }

    fn refresh(&self) -> bool {
        self.snapshot.borrow_mut().refresh(&self.history, &self.writes)
    }

    pub(crate) fn has_changed_since(&self, policy: &Arc<InForce>) -> bool {
        !Arc::ptr_eq(&self.current(), policy)
    }

    /// Records that the API server answered a reader. Takes no lock where that is known already.
    pub(crate) fn answered(&self, reading: &Reading, info: &RequestInfo<'_>) {
        let Snapshot { in_force, answered, .. } = &mut *self.snapshot.borrow_mut();
        let of = info.resource_key();
        let is_current = Arc::ptr_eq(in_force, reading.policy());
        if is_current && answered.iter().any(|known| known.key() == of) {
            return;
        }
        reading.answered(of);
        if is_current {
            answered.push(ReadResource::new(of));
        }
    }

    /// Earlier policies under which a client may have read the version that its watch or next page continues from.
    pub(crate) fn suspects(&self, now: &InForce, info: &RequestInfo<'_>) -> Result<Vec<Arc<InForce>>, HistoryExceeded> {
        match decide::goes_on_from(info) {
            Some(version) => self.history.suspects(now, info.resource_key(), version),
            // The client is sent the whole collection.
            None => Ok(Vec::new()),
        }
    }

    /// Whether no client may have read that version under an earlier policy.
    pub(crate) fn is_newer_than_past(&self, now: &InForce, info: &RequestInfo<'_>, version: u64) -> bool {
        let suspects = self.history.suspects(now, info.resource_key(), version);
        suspects.is_ok_and(|suspects| suspects.is_empty())
    }

    /// Earlier policies of which it is not known up to which version clients read under them.
    pub(crate) fn unread(&self, now: &InForce, info: &RequestInfo<'_>) -> Vec<PendingVersions> {
        self.history.unread(now, info.resource_key())
    }

    /// Records that clients read under those policies up to `version` at most.
    pub(crate) fn was_read_until(&self, unread: &[PendingVersions], info: &RequestInfo<'_>, version: u64) {
        self.history.was_read_until(unread, info.resource_key(), version);
    }

    /// Whether versions of the resource compare with the one at which the policy changed; `None` if not known yet.
    pub(crate) fn compare(&self, info: &RequestInfo<'_>, changed_at: u64) -> Option<bool> {
        self.history.compare(info.resource_key(), changed_at)
    }

    /// Records the newest version of the resource, and returns whether its versions compare with `changed_at`.
    pub(crate) fn found(&self, info: &RequestInfo<'_>, changed_at: u64, newest: u64) -> bool {
        self.history.found(info.resource_key(), changed_at, newest)
    }

    /// Completes at the next change of the policy, or when shutdown begins.
    pub(crate) fn change_or_shutdown(&self, drain: &Drain) -> Pin<Box<dyn Future<Output = ()>>> {
        let mut current = self.snapshot.borrow().current.clone();
        let drain = drain.clone();
        Box::pin(async move {
            tokio::select! {
                () = drain.started() => {}
                changed = current.changed() => if changed.is_err() {
                    // The policy's source has ended.
                    drain.started().await;
                }
            }
        })
    }
}

impl Snapshot {
    /// Takes the channel's policy, and returns whether it is another. The channel's own change mark does not count: a
    /// sender may replace a policy without it.
    fn refresh(&mut self, history: &History, writes: &Writes) -> bool {
        let Self { current, policy, in_force, writes: writes_under, answered } = self;
        let latest = {
            let latest = current.borrow_and_update();
            if Arc::ptr_eq(&latest, policy) {
                return false;
            }
            latest.clone()
        };
        *in_force = history.in_force(&latest);
        *writes_under = writes.under(&latest);
        *policy = latest;
        answered.clear();
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use ctrlmesh_common::resource::ResourceKey;
    use tokio::sync::watch;

    use super::*;
    use crate::guard::PodGuards;
    use crate::metrics::Metrics;

    #[test]
    fn a_policy_replaced_without_notice_is_read() {
        let (done, read) = mpsc::channel();
        // In a thread of its own, because a failing view would loop for ever.
        thread::spawn(move || {
            let (sender, current) = watch::channel(Arc::<Policy>::default());
            let guards = PodGuards::new(current.clone(), &Metrics::new(), None);
            let view = PolicyView::new(ServedPod::new(current, Arc::default(), guards, None));
            let silently = Arc::new(Policy { epoch: 7, ..Policy::default() });
            sender.send_if_modified(|policy| {
                *policy = silently;
                false
            });
            done.send(view.read(ReadOf::resource(ResourceKey::of_host("", "pods"))).policy().epoch).unwrap();
        });
        assert_eq!(read.recv_timeout(Duration::from_mins(1)), Ok(7));
    }
}
