//! Knows whether a pod's leader-election lock is held by a process of the pod that has ended.
//!
//! A process that ends leaves its lock behind. Its successor in the same pod would wait until the Lease has run out:
//! 15 s by client-go's defaults. The identity of a holder is the pod's host name and something random (`id` in
//! `pkg/leaderelection` of controller-runtime). So a Lease that is held by this very pod, but not by the process that
//! runs, is free. Processes of one pod that hold one lock follow each other: a container begins when the one before
//! it has ended.
//!
//! Here it is also known whether the pod waits for its lock, which the manager is told.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use ctrlmesh_common::wire::LockState;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_runtime::unix_time;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::policy::{PublishLock, while_served};

/// Who of a pod holds the pod's lock. Its connections share it.
#[derive(Debug, Default)]
pub struct OwnLock {
    /// The pod's name; empty if it is not known.
    pod: String,
    present: Mutex<Present>,
    /// `None` until the pod has asked for the lock.
    state: watch::Sender<Option<LockState>>,
}

/// The process that runs.
#[derive(Debug, Default)]
struct Present {
    /// With which it wrote the lock last, over a connection that is open.
    identity: Option<String>,
    /// Over how many open connections the lock was written.
    connections: usize,
}

/// A connection of the pod. Once none is left over which the lock was written, its process counts as ended. Where it
/// has not, and only connects anew, it takes the lock from itself.
#[derive(Debug)]
pub(crate) struct LockConnection {
    own: Arc<OwnLock>,
    has_written: Cell<bool>,
}

impl OwnLock {
    /// Of the pod of this name, which is empty if it is not known.
    pub(crate) fn of(pod: &str) -> Arc<Self> {
        Arc::new(Self { pod: pod.to_owned(), ..Self::default() })
    }

    /// Publishes whether the pod waits for the lock, as long as it is served.
    pub(crate) async fn report(self: Arc<Self>, publish: PublishLock, drain: Drain, gone: Option<CancellationToken>) {
        let mut changes = self.state.subscribe();
        let publishing = async {
            loop {
                publish.publish(changes.borrow_and_update().map(Arc::new));
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        while_served(publishing, &drain, gone.as_ref()).await;
    }

    fn set(&self, waits: bool) {
        self.state.send_if_modified(|state| match state {
            Some(state) if state.waits == waits => false,
            Some(state) => {
                (state.waits, state.changes) = (waits, state.changes + 1);
                true
            }
            None => {
                *state = Some(LockState { since: unix_time::millis(SystemTime::now()), waits, changes: 0 });
                true
            }
        });
    }

    pub(crate) fn connection(self: &Arc<Self>) -> LockConnection {
        LockConnection { own: self.clone(), has_written: Cell::new(false) }
    }

    fn is_of_pod(&self, identity: &str) -> bool {
        let random = identity.strip_prefix(&self.pod).and_then(|rest| rest.strip_prefix('_'));
        !self.pod.is_empty() && random.is_some_and(|random| !random.is_empty())
    }
}

impl LockConnection {
    /// The client writes the lock, and is to hold it with this identity.
    pub(crate) fn writes(&self, identity: &str) {
        let mut present = lock(&self.own.present);
        if !self.has_written.replace(true) {
            present.connections += 1;
        }
        if present.identity.as_deref() != Some(identity) {
            present.identity = Some(identity.to_owned());
        }
    }

    /// The API server took such a write: the client holds the lock.
    pub(crate) fn has_taken(&self) {
        self.own.set(false);
    }

    /// The client reads that the lock has this holder.
    pub(crate) fn reads(&self, holder: &str) {
        let is_own = lock(&self.own.present).identity.as_deref() == Some(holder);
        self.own.set(!is_own);
    }

    /// Whether a process of this pod that has ended left the lock to this holder.
    pub(crate) fn is_left_behind(&self, holder: &str) -> bool {
        self.own.is_of_pod(holder) && lock(&self.own.present).identity.as_deref() != Some(holder)
    }
}

impl LockConnection {
    /// The client has closed it. What goes on of its requests is not the client's any more.
    pub(crate) fn end(&self) {
        if self.has_written.take() {
            let mut present = lock(&self.own.present);
            present.connections -= 1;
            if present.connections == 0 {
                present.identity = None;
            }
        }
    }
}

impl Drop for LockConnection {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_an_ended_process_of_the_pod_holds_is_left_behind() {
        let own = OwnLock::of("op-0");
        let new = own.connection();
        for (holder, expected) in [
            ("op-0_uuid", true),
            ("op-0", false),
            ("op-0_", false),
            ("op-01_uuid", false),
            ("op-1_op-0_x", false),
            ("", false),
        ] {
            assert_eq!(new.is_left_behind(holder), expected, "{holder}");
        }
        assert!(!OwnLock::of("").connection().is_left_behind("_uuid"), "the pod is not known");
    }

    #[test]
    fn a_pod_waits_while_another_holds_its_lock() {
        let own = OwnLock::of("op-0");
        let connection = own.connection();
        let state = || own.state.borrow().map(|state| (state.waits, state.changes));
        assert_eq!(state(), None, "it has not asked for it");
        connection.reads("op-1_x");
        connection.reads("op-1_x");
        assert_eq!(state(), Some((true, 0)));
        // It tries, and the API server may refuse.
        connection.writes("op-0_y");
        assert_eq!(state(), Some((true, 0)));
        connection.has_taken();
        connection.reads("op-0_y");
        assert_eq!(state(), Some((false, 1)));
        connection.reads("op-1_x");
        assert_eq!(state(), Some((true, 2)));
    }

    #[test]
    fn a_process_has_ended_once_its_connections_have() {
        let own = OwnLock::of("op-0");
        let (first, second, reader) = (own.connection(), own.connection(), own.connection());
        first.writes("op-0_one");
        second.writes("op-0_one");
        first.writes("op-0_one");
        assert!(!reader.is_left_behind("op-0_one") && reader.is_left_behind("op-0_two"));
        drop(first);
        assert!(!reader.is_left_behind("op-0_one"));
        drop(second);
        assert!(reader.is_left_behind("op-0_one"), "the next process asks");
        reader.writes("op-0_two");
        assert!(reader.is_left_behind("op-0_one") && !reader.is_left_behind("op-0_two"));
    }
}
