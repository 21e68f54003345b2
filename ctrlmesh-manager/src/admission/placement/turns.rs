//! Whose turn is it to be given a shard?
//!
//! The pods of a namespace are given theirs one after another, because what one was given counts for the next. Those of
//! another namespace do not wait for that turn; but only two pods are judged at once in all, so that two slow ones hold up
//! every other. No thread waits at all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::OwnedMutexGuard;

use crate::admission::admit::Recent;

/// By namespace, who was admitted there a moment ago.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<String, Arc<tokio::sync::Mutex<Recent>>>>);

// === impl Turns ===

impl Turns {
    /// Waits for the turn of a pod of `namespace`, which it has until this is dropped.
    pub(super) async fn take(&self, namespace: &str) -> OwnedMutexGuard<Recent> {
        let turn = {
            let (mut all, now) =
                (self.0.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
            all.retain(|_, turn| {
                Arc::get_mut(turn).is_none_or(|turn| !turn.get_mut().is_over(now))
            });
            Arc::clone(all.entry(namespace.to_owned()).or_default())
        };
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn pods_of_one_namespace_take_turns_and_those_of_others_do_not_wait() {
        let turns = Turns::default();
        let first = turns.take("a").now_or_never().unwrap();
        let mut second = std::pin::pin!(turns.take("a"));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(turns.take("b").now_or_never().is_some());
        drop(first);
        assert!(second.now_or_never().is_some());
        drop(turns.take("c").now_or_never());
        assert_eq!(turns.0.lock().unwrap().len(), 1, "where nobody was admitted nothing is kept");
    }
}
