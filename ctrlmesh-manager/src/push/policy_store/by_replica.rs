//! What each replica got of each pod.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::rules::pod::PodName;

/// By the replica that got it; none is this one.
pub(super) type OfPod<T> = BTreeMap<Option<Arc<str>>, T>;

/// Of each pod.
pub(super) type ByReplica<T> = BTreeMap<PodName, OfPod<T>>;

/// Keeps what `counts` says, and returns whether anything is forgotten.
pub(super) fn retain<T>(by_pod: &mut ByReplica<T>, counts: impl Fn(&PodName, &Option<Arc<str>>, &T) -> bool) -> bool {
    let mut forgotten = false;
    by_pod.retain(|pod, all| {
        let before = all.len();
        all.retain(|replica, one| counts(pod, replica, one));
        forgotten |= all.len() < before;
        !all.is_empty()
    });
    forgotten
}
