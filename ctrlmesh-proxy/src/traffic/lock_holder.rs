//! Counts how often a pod loses its leader-election lock to another.

use std::sync::Mutex;

use ctrlmesh_runtime::sync::lock;

/// Whether one pod holds its lock, by what it writes and reads of it.
#[derive(Debug, Default)]
pub(crate) struct LockHolder(Mutex<State>);

/// A lock as a pod writes or reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldLock {
    /// Its name on the server: another shard has another lock.
    pub(crate) name: String,
    /// Empty where nobody holds it.
    pub(crate) holder: String,
}

#[derive(Debug, Default)]
struct State {
    /// As the pod wrote it last; `None` where the pod does not hold it.
    own: Option<HeldLock>,
    losses: u64,
}

impl LockHolder {
    /// The API server took a write of the lock by the pod. With an empty holder it releases the lock. Returns whether
    /// the pod has come to hold it by that.
    pub(crate) fn wrote(&self, held: HeldLock) -> bool {
        let mut state = lock(&self.0);
        let is_held = !held.holder.is_empty();
        let is_new = is_held && state.own.as_ref() != Some(&held);
        state.own = Some(held).filter(|_| is_held);
        is_new
    }

    /// The pod reads who holds the lock.
    pub(crate) fn read(&self, held: &HeldLock) {
        let mut state = lock(&self.0);
        let Some(own) = state.own.take_if(|own| own.name != held.name || own.holder != held.holder) else { return };
        if own.name == held.name && held.holder.is_empty() {
            // It was cleared by hand, and the pod takes it again.
            state.own = Some(own);
        } else if own.name == held.name {
            state.losses += 1;
        }
    }

    pub(super) fn losses(&self) -> u64 {
        lock(&self.0).losses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_holder_is_a_loss_once_and_only_for_one_that_held() {
        let lock = LockHolder::default();
        let of = |name: &str, holder: &str| HeldLock { name: name.to_owned(), holder: holder.to_owned() };
        let (wrote, read) = (|holder: &str| lock.wrote(of("s1", holder)), |holder: &str| lock.read(&of("s1", holder)));
        read("other");
        assert!(wrote("me") && !wrote("me"));
        read("me");
        // As `kubectl` may leave it.
        read("");
        assert_eq!(lock.losses(), 0);
        read("other");
        read("other");
        assert_eq!(lock.losses(), 1);
        assert!(wrote("me"));
        // It releases the lock.
        assert!(!wrote(""));
        read("other");
        // The pod's shard is another for a while.
        assert!(wrote("me"));
        lock.read(&of("s2", "other"));
        read("other");
        assert_eq!(lock.losses(), 1);
    }
}
