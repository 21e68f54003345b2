//! What the proxy needs of a request when its response comes.

use ctrlmesh_request::decide::Rename;
use http::StatusCode;
use tokio::time::Instant;

use crate::fault::MetFaults;
use crate::guard::Probe;
use crate::policy::{Reading, Validity, Write};
use crate::serve::shadow::DryRun;
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::traffic::CountedRequest;
use crate::watch::WatchRequest;

/// What is read, where it matters for the lock in the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    List,
    /// The Lease that is the lock.
    Lease,
    Other,
}

/// A request that may be sent, or was.
pub(super) struct Pending {
    pub(super) rename: Option<Box<Rename>>,
    /// Held while a list is read under the policy.
    pub(super) reading: Option<Reading>,
    pub(super) watch: Option<WatchRequest>,
    /// Until it is sent. Then it is held until the API server answers.
    pub(super) write: Option<Write>,
    /// Of a write that passes only while the policy is confirmed.
    pub(super) validity: Option<Validity>,
    pub(super) probe: Option<Probe>,
    /// As what it counts, where it does.
    pub(super) counted: Option<Box<CountedRequest>>,
    /// Of a write that was sent as a dry run.
    pub(super) dry_run: Option<Box<DryRun>>,
    /// What is done to the answer.
    pub(super) faults: Option<Box<MetFaults>>,
    pub(super) reads: Reads,
    /// Whether the lock was renamed in the body.
    pub(super) is_body_renamed: bool,
    /// Whether the client holds the Lease that is the lock, if this succeeds.
    pub(super) takes_lock: bool,
    /// Without a response timeout.
    pub(super) long_running: bool,
    pub(super) waits: WaitTime,
}

impl Pending {
    /// It is about to be sent. Returns when, where it counts.
    pub(super) fn sent(&mut self) -> Option<Instant> {
        if let Some(probe) = &mut self.probe {
            probe.sent();
        }
        self.counted.as_ref().map(|_| Instant::now())
    }

    /// The faults that answer a list from an older state, and the list.
    pub(super) fn stale_list(&self) -> Option<(&MetFaults, &Reading)> {
        self.faults.as_deref().zip(self.reading.as_ref()).filter(|(met, _)| met.is_stale_list())
    }

    /// The API server has sent the head of its answer.
    pub(super) fn answered(&mut self, status: StatusCode, came: Instant, sent: Option<Instant>, session: &Session) {
        if let Some((counted, sent)) = self.counted.as_deref_mut().zip(sent) {
            session.traffic.answered(counted, status, [came, sent]);
        }
        if self.takes_lock && status.is_success() {
            session.lock.has_taken();
        }
        if let Some(probe) = self.probe.take() {
            probe.answered(status);
        }
    }
}
