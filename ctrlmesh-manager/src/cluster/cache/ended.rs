//! Knows what proxies say of pods: which containers have ended, before the kubelet says so, and which pods wait for
//! their lock.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_runtime::sync::lock;

use super::Cache;
use crate::rules::pod::Member;

/// Their IDs, by the UID of their pod.
pub type EndedContainers = BTreeMap<String, BTreeSet<String>>;

impl Cache {
    /// Takes all containers of which it is known that they have ended.
    pub fn take_ended(&self, ended: EndedContainers) {
        let before = std::mem::replace(&mut lock(&self.state).ended, ended.clone());
        if before != ended {
            self.version.send_modify(|version| *version = version.wrapping_add(1));
        }
    }

    /// Takes the UIDs of all pods that wait for their lock.
    pub fn take_waiting(&self, waiting: BTreeSet<String>) {
        let before = std::mem::replace(&mut lock(&self.state).waiting, waiting.clone());
        if before != waiting {
            self.version.send_modify(|version| *version = version.wrapping_add(1));
        }
    }
}

/// The same pod; not ready, where one of its containers has ended. The kubelet starts that anew, with another ID.
pub(super) fn as_it_runs(member: &Member, ended: &EndedContainers) -> Member {
    let has_ended = |id: &String| ended.get(&member.uid).is_some_and(|ended| ended.contains(id));
    Member { ready: member.ready && !member.containers.iter().any(has_ended), ..member.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_not_ready_until_the_ended_container_has_a_successor() {
        let ended = EndedContainers::from([("a".to_owned(), ["old".to_owned()].into())]);
        let ready = |uid: &str, ids: &[&str]| {
            let containers = ids.iter().map(|id| (*id).to_owned()).collect();
            let member = Member { uid: uid.to_owned(), ready: true, containers, ..Member::default() };
            as_it_runs(&member, &ended).ready
        };
        assert!(!ready("a", &["old", "other"]));
        assert!(ready("a", &["new", "other"]) && ready("a", &[]));
        assert!(ready("b", &["old"]), "of another pod, nothing was said");
    }
}
