//! One asynchronous lock per namespace, so that pods of a namespace are placed in turn.
//!
//! Other namespaces do not wait for that lock. But only two pods are placed at once in all, so two slow ones delay
//! every other. No thread waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ctrlmesh_runtime::sync::lock;
use tokio::sync::OwnedMutexGuard;

use crate::admission::admit::RecentPods;

/// By namespace: the pods that were admitted a moment ago.
#[derive(Debug, Default)]
pub(super) struct NamespaceLocks(Mutex<HashMap<String, Arc<tokio::sync::Mutex<RecentPods>>>>);

impl NamespaceLocks {
    /// Locks `namespace`, until the guard is dropped.
    pub(super) async fn lock(&self, namespace: &str) -> OwnedMutexGuard<RecentPods> {
        let turn = {
            let (mut all, now) = (lock(&self.0), Instant::now());
            all.retain(|_, turn| Arc::get_mut(turn).is_none_or(|turn| !turn.get_mut().is_over(now)));
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
    fn only_pods_of_one_namespace_wait_for_each_other() {
        let locks = NamespaceLocks::default();
        let first = locks.lock("a").now_or_never().unwrap();
        let mut second = std::pin::pin!(locks.lock("a"));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(locks.lock("b").now_or_never().is_some());
        drop(first);
        assert!(second.now_or_never().is_some());
        drop(locks.lock("c").now_or_never());
        assert_eq!(locks.0.lock().unwrap().len(), 1, "where nobody was admitted nothing is kept");
    }
}
