//! Knows what follows from the reports of proxies: which containers have ended, before the kubelet says so, which pods
//! wait for their lock, which are on silent nodes, and the loads of roots that are divided by load.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_runtime::sync::lock;

use super::{Cache, State};
use crate::rules::balance::RootLoads;
use crate::rules::pod::Member;
use crate::rules::shared::Shared;

/// Their IDs, by the UID of their pod.
pub type EndedContainers = BTreeMap<String, BTreeSet<String>>;

impl Cache {
    /// Takes all containers of which it is known that they have ended.
    pub fn take_ended(&self, ended: EndedContainers) {
        self.set(ended, |state| &mut state.ended);
    }

    /// Takes the UIDs of all pods that wait for their lock.
    pub fn take_waiting(&self, waiting: BTreeSet<String>) {
        self.set(waiting, |state| &mut state.waiting);
    }

    /// Takes the UIDs of all pods on silent nodes.
    pub fn take_silent(&self, silent: BTreeSet<String>) {
        self.set(silent, |state| &mut state.silent);
    }

    /// Takes all that is known of loads.
    pub fn take_loads(&self, loads: RootLoads) {
        self.set(Arc::new(loads), |state| &mut state.loads);
    }

    fn set<T: PartialEq + Clone>(&self, new: T, field: impl FnOnce(&mut State) -> &mut T) {
        let before = std::mem::replace(field(&mut lock(&self.state)), new.clone());
        if before != new {
            self.version.send_modify(|version| *version = version.wrapping_add(1));
        }
    }
}

/// The same pod; not ready, where its node is silent, or one of its containers has ended. The kubelet starts that anew,
/// with another ID.
pub(super) fn as_it_runs(member: &Shared<Member>, state: &State) -> Shared<Member> {
    let ended = state.ended.get(&member.uid);
    let has_ended = |id: &String| ended.is_some_and(|ended| ended.contains(id));
    let is_away = state.silent.contains(&member.uid) || member.containers.iter().any(has_ended);
    let mut member = member.clone();
    if member.ready && is_away {
        member.ready = false;
    }
    member
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_with_ended_containers_or_silent_nodes_are_not_ready() {
        let ended = EndedContainers::from([("a".to_owned(), ["old".to_owned()].into())]);
        let state = State { ended, silent: ["c".to_owned()].into(), ..State::default() };
        let ready = |uid: &str, ids: &[&str]| {
            let containers = ids.iter().map(|id| (*id).to_owned()).collect();
            let member = Member { uid: uid.to_owned(), ready: true, containers, ..Member::default() };
            as_it_runs(&Shared::from(member), &state).ready
        };
        assert!(!ready("a", &["old", "other"]));
        assert!(ready("a", &["new", "other"]) && ready("a", &[]));
        assert!(ready("b", &["old"]), "of another pod, nothing was said");
        assert!(!ready("c", &["new"]), "its node is silent");
    }
}
