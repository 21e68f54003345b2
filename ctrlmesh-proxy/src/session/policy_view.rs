//! Which policy is in force for this connection?

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_request::decide;
use ctrlmesh_request::request::RequestInfo;

use crate::drain::Drain;
use crate::policy::{Current, Forgotten, History, InForce, ReadOf, Reading, Unread};

/// The policy as one client connection sees it. As long as it does not change, looking at it takes no lock.
#[derive(Debug)]
pub(crate) struct View {
    seen: RefCell<Seen>,
    history: Arc<History>,
}

#[derive(Debug)]
struct Seen {
    current: Current,
    held: Arc<Policy>,
    in_force: Arc<InForce>,
    /// Of what it is known that somebody was answered under it, by group and name.
    answered: Vec<(String, String)>,
}

impl View {
    /// Sees what `current` holds.
    pub(crate) fn of(mut current: Current, history: Arc<History>) -> Self {
        let held = current.borrow_and_update().clone();
        let in_force = history.in_force(&held);
        let seen = Seen { current, held, in_force, answered: Vec::new() };
        Self { seen: RefCell::new(seen), history }
    }

    /// What is in force now.
    pub(crate) fn current(&self) -> Arc<InForce> {
        let seen = &mut *self.seen.borrow_mut();
        // Closed at shutdown: the last one stays.
        if seen.current.has_changed().unwrap_or(true) {
            seen.takes_another(&self.history);
        }
        seen.in_force.clone()
    }

    /// The same for who reads a collection under it.
    pub(crate) fn read(&self, of: ReadOf) -> Reading {
        loop {
            let reading = self.current().read(of);
            // Replaced meanwhile: who replaced it may not have seen that it is read.
            if !self.seen.borrow_mut().takes_another(&self.history) {
                return reading;
            }
        }
    }

    /// Whether something else than `policy` is in force now.
    pub(crate) fn has_changed_since(&self, policy: &Arc<InForce>) -> bool {
        !Arc::ptr_eq(&self.current(), policy)
    }

    /// Says that the API server answered who reads. As long as that is known, it takes no lock.
    pub(crate) fn answered(&self, reading: &Reading, info: &RequestInfo<'_>) {
        let Seen { in_force, answered, .. } = &mut *self.seen.borrow_mut();
        let (group, resource) = (info.api_group(), info.resource());
        let now = Arc::ptr_eq(in_force, reading.policy());
        if now && answered.iter().any(|(one, other)| one == group && other == resource) {
            return;
        }
        reading.answered(group, resource);
        if now {
            answered.push((group.to_owned(), resource.to_owned()));
        }
    }

    /// Earlier policies under which a client may have read what it goes on from, when it asks for a watch or for a
    /// further page.
    pub(crate) fn suspects(
        &self,
        now: &InForce,
        info: &RequestInfo<'_>,
    ) -> Result<Vec<Arc<InForce>>, Forgotten> {
        match decide::goes_on_from(info) {
            Some(version) => {
                self.history.suspects(now, (info.api_group(), info.resource()), version)
            }
            // It is sent all that there is.
            None => Ok(Vec::new()),
        }
    }

    /// Of which earlier policies it is to be asked how far was read under them.
    pub(crate) fn unread(&self, now: &InForce, info: &RequestInfo<'_>) -> Vec<Unread> {
        self.history.unread(now, (info.api_group(), info.resource()))
    }

    /// Says how far was read under them.
    pub(crate) fn was_read_until(&self, unread: &[Unread], info: &RequestInfo<'_>, version: u64) {
        self.history.was_read_until(unread, (info.api_group(), info.resource()), version);
    }

    /// Whether versions of what is asked for compare with the one at which the policy changed, where that is known.
    pub(crate) fn compare(&self, info: &RequestInfo<'_>, changed_at: u64) -> Option<bool> {
        self.history.compare((info.api_group(), info.resource()), changed_at)
    }

    /// Takes in the newest version of what is asked for; whether they compare.
    pub(crate) fn found(&self, info: &RequestInfo<'_>, changed_at: u64, newest: u64) -> bool {
        self.history.found((info.api_group(), info.resource()), changed_at, newest)
    }

    /// Completes at the next change, or when shutdown begins.
    pub(crate) fn alarm(&self, drain: &Drain) -> Pin<Box<dyn Future<Output = ()>>> {
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

// === impl Seen ===

impl Seen {
    /// Takes what the channel holds, where that is something else, whatever the channel says of its changes.
    fn takes_another(&mut self, history: &History) -> bool {
        let Self { current, held, in_force, answered } = self;
        let latest = {
            let latest = current.borrow_and_update();
            if Arc::ptr_eq(&latest, held) {
                return false;
            }
            latest.clone()
        };
        *in_force = history.in_force(&latest);
        *held = latest;
        answered.clear();
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use tokio::sync::watch;

    use super::*;

    #[test]
    fn a_policy_that_was_replaced_without_a_word_is_read_all_the_same() {
        let (done, read) = mpsc::channel();
        // One that goes round for ever goes on in its thread, not in this one.
        thread::spawn(move || {
            let (sender, current) = watch::channel(Arc::<Policy>::default());
            let view = View::of(current, Arc::default());
            let silently = Arc::new(Policy { epoch: 7, ..Policy::default() });
            sender.send_if_modified(|policy| {
                *policy = silently;
                false
            });
            done.send(view.read(ReadOf::resource("", "pods")).policy().epoch).unwrap();
        });
        assert_eq!(read.recv_timeout(Duration::from_mins(1)), Ok(7));
    }
}
