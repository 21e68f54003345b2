//! Which of a client's connections is its newest?
//!
//! One that comes back may be here again before it is seen that it went.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;

/// By UID of the pod that connects, its newest connection.
#[derive(Debug, Default)]
pub struct Newest(Mutex<HashMap<String, oneshot::Sender<()>>>);

/// Ends when the same client connects anew.
pub(super) type Replaced = oneshot::Receiver<()>;

// === impl Newest ===

impl Newest {
    /// The client `uid` connects; its connection before, if there is one, is replaced.
    pub(super) fn begin(&self, uid: &str) -> Replaced {
        let (end, replaced) = oneshot::channel();
        let mut newest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(newest.insert(uid.to_owned(), end));
        replaced
    }

    /// A connection of the client ends; returns whether it was its newest, so that the client is gone.
    pub(super) fn end(&self, uid: &str, replaced: &mut Replaced) -> bool {
        let mut newest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock: what is removed is to be its own.
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
        let newest = Newest::default();
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
