//! The policy in force, as somebody knows it who makes something of each.

use std::sync::Arc;

use ctrlmesh_common::policy::Policy;

use super::Current;

/// The policy in force, and the last one that was taken.
#[derive(Debug)]
pub(crate) struct FollowedPolicy {
    current: Current,
    taken: Option<Arc<Policy>>,
}

impl FollowedPolicy {
    /// Nothing is taken yet.
    pub(crate) fn new(current: Current) -> Self {
        Self { current, taken: None }
    }

    /// Where changes can be waited for.
    pub(crate) fn changes(&self) -> Current {
        self.current.clone()
    }

    /// The policy in force. Where it is another than the last one that was taken, `take` gets both.
    pub(crate) fn latest(&mut self, take: impl FnOnce(Option<&Policy>, &Policy)) -> &Arc<Policy> {
        let latest = {
            let latest = self.current.borrow_and_update();
            let is_other = self.taken.as_ref().is_none_or(|taken| !Arc::ptr_eq(taken, &latest));
            is_other.then(|| latest.clone())
        };
        match latest {
            Some(latest) => {
                take(self.taken.as_deref(), &latest);
                self.taken.insert(latest)
            }
            None => self.taken.get_or_insert_with(|| self.current.borrow().clone()),
        }
    }
}
