//! Keeps the latest connection of each client.
//!
//! A client may connect again before the end of its former connection is noticed.

use std::collections::HashMap;
use std::sync::Mutex;

use ctrlmesh_runtime::sync::lock;
use tokio::sync::oneshot;

/// By UID of the client's pod.
#[derive(Debug, Default)]
pub struct LatestConnections(Mutex<HashMap<String, oneshot::Sender<()>>>);

/// Resolves when the same client connects again.
pub(super) type Replaced = oneshot::Receiver<()>;

impl LatestConnections {
    /// Registers a connection of `uid`, and ends the former one.
    pub(super) fn begin(&self, uid: &str) -> Replaced {
        let (end, replaced) = oneshot::channel();
        let mut newest = lock(&self.0);
        drop(newest.insert(uid.to_owned(), end));
        replaced
    }

    /// Ends a connection. Returns whether it was the latest one, so that the client is gone.
    pub(super) fn end(&self, uid: &str, replaced: &mut Replaced) -> bool {
        let mut newest = lock(&self.0);
        // Under the lock: only its own entry may be removed.
        let gone = replaced.try_recv() != Err(oneshot::error::TryRecvError::Closed);
        if gone {
            newest.remove(uid);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_gone_when_its_newest_connection_ends() {
        let newest = LatestConnections::default();
        let mut first = newest.begin("uid");
        let mut other = newest.begin("other");
        let mut second = newest.begin("uid");
        assert!(!newest.end("uid", &mut first), "it was replaced");
        assert!(newest.end("uid", &mut second));
        assert!(newest.end("other", &mut other));
        let mut third = newest.begin("uid");
        assert!(newest.end("uid", &mut third));
    }
}
