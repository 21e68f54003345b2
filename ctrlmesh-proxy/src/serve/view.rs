//! Which policy is in force for this connection?

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use ctrlmesh_common::policy::Policy;

use crate::drain::Drain;
use crate::policy::{Current, Forgotten, History, InForce, Reading, Unread};
use crate::request::RequestInfo;

/// The policy as one client connection sees it. As long as it does not change, looking at it takes no lock.
#[derive(Debug)]
pub(super) struct View {
    seen: RefCell<Seen>,
    history: Arc<History>,
}

#[derive(Debug)]
struct Seen {
    current: Current,
    held: Arc<Policy>,
    in_force: Arc<InForce>,
}

impl View {
    /// Sees what `current` holds.
    pub(super) fn of(mut current: Current, history: Arc<History>) -> Self {
        let held = current.borrow_and_update().clone();
        let in_force = history.in_force(&held);
        Self { seen: RefCell::new(Seen { current, held, in_force }), history }
    }

    /// What is in force now.
    pub(super) fn current(&self) -> Arc<InForce> {
        let Seen { current, held, in_force } = &mut *self.seen.borrow_mut();
        // Closed at shutdown: the last one stays.
        if current.has_changed().unwrap_or(true) {
            let latest = current.borrow_and_update().clone();
            if !Arc::ptr_eq(&latest, held) {
                *in_force = self.history.in_force(&latest);
                *held = latest;
            }
        }
        in_force.clone()
    }

    /// The same for who reads a collection under it.
    pub(super) fn read(&self) -> Reading {
        loop {
            let reading = self.current().read();
            let Seen { current, held, .. } = &*self.seen.borrow();
            // Replaced meanwhile: who replaced it may not have seen that it is read.
            if Arc::ptr_eq(&current.borrow(), held) {
                return reading;
            }
        }
    }

    /// Whether something else than `policy` is in force now.
    pub(super) fn has_changed_since(&self, policy: &Arc<InForce>) -> bool {
        !Arc::ptr_eq(&self.current(), policy)
    }

    /// Earlier policies under which a client may have read what it goes on from, when it asks for a watch.
    pub(super) fn suspects(
        &self,
        now: &InForce,
        info: &RequestInfo<'_>,
    ) -> Result<Vec<Arc<InForce>>, Forgotten> {
        let query = info.query();
        let version = query.text("resourceVersion").and_then(|version| version.parse().ok());
        match version {
            // Otherwise it is sent all that there is.
            Some(version @ 1..) if !query.is_set("sendInitialEvents") => {
                self.history.suspects(now, (info.api_group(), info.resource()), version)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Of which earlier policies it is to be asked how far was read under them.
    pub(super) fn unread(&self, now: &InForce, info: &RequestInfo<'_>) -> Vec<Unread> {
        self.history.unread(now, (info.api_group(), info.resource()))
    }

    /// Completes at the next change, or when shutdown begins.
    pub(super) fn alarm(&self, drain: &Drain) -> Pin<Box<dyn Future<Output = ()>>> {
        let mut current = self.seen.borrow().current.clone();
        let drain = drain.clone();
        Box::pin(async move {
            tokio::select! {
                () = drain.started() => {}
                changed = current.changed() => if changed.is_err() {
                    // Nobody changes it any more.
                    drain.started().await;
                }
            }
        })
    }
}
