//! Which policy is in force for this connection?

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use ctrlmesh_common::policy::Policy;

use crate::drain::Drain;
use crate::policy::Current;

/// The policy as one client connection sees it. As long as it does not change, looking at it takes no lock.
#[derive(Debug)]
pub(super) struct View(RefCell<Seen>);

#[derive(Debug)]
struct Seen {
    current: Current,
    held: Arc<Policy>,
}

impl View {
    /// Sees what `current` holds.
    pub(super) fn of(mut current: Current) -> Self {
        let held = current.borrow_and_update().clone();
        Self(RefCell::new(Seen { current, held }))
    }

    /// What is in force now.
    pub(super) fn current(&self) -> Arc<Policy> {
        let Seen { current, held } = &mut *self.0.borrow_mut();
        if current.has_changed().unwrap_or(false) {
            held.clone_from(&current.borrow_and_update());
        }
        held.clone()
    }

    /// Whether something else than `policy` is in force now.
    pub(super) fn has_changed_since(&self, policy: &Arc<Policy>) -> bool {
        !Arc::ptr_eq(&self.current(), policy)
    }

    /// Completes at the next change, or when shutdown begins.
    pub(super) fn alarm(&self, drain: &Drain) -> Pin<Box<dyn Future<Output = ()>>> {
        let mut current = self.0.borrow().current.clone();
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
