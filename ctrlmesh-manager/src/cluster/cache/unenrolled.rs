//! Watches pods that do not ask for a proxy, in namespaces with a root that is fenced.
//!
//! Until such a namespace was listed, its roots are not decided: a running operator must not be overlooked. A watch
//! goes on when its root is gone; there are as many as namespaces with operators.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_runtime::sync::lock;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client};

use super::{Cache, PAGE, State};
use crate::drain::Drain;
use crate::rules::fenced::is_fenced;
use crate::rules::object_name::full_name;
use crate::rules::pod::{self, Member};
use crate::rules::shared::Shared;

/// Starts a watch for each such namespace.
pub(super) async fn follow(cache: Arc<Cache>, client: Client, drain: Drain) {
    let mut changes = cache.changes();
    loop {
        for namespace in begin(&mut lock(&cache.state)) {
            let config = Config::default().page_size(PAGE).labels(&pod::unenrolled_selector());
            let pods = watcher(Api::<Pod>::namespaced(client.clone(), &namespace), config);
            let this = Arc::clone(&cache);
            let pods = Arc::clone(&cache).note_stopped(pods);
            drain.spawn_until_started(this.follow(
                pods,
                move |state| state.unenrolled.entry(namespace.clone()).or_default(),
                |pod| (full_name(&pod.metadata), Shared::from(Member::from(&pod))),
            ));
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// The pods of each namespace that was listed.
pub(super) fn known(state: &State) -> BTreeMap<String, Vec<Shared<Member>>> {
    let known = state.unenrolled.iter().filter(|(_, pods)| pods.synced);
    known.map(|(namespace, pods)| (namespace.clone(), pods.current.values().cloned().collect())).collect()
}

/// Whether every such namespace was listed.
pub(super) fn are_known(state: &State) -> bool {
    fenced(state).iter().all(|namespace| state.unenrolled.get(namespace).is_some_and(|pods| pods.synced))
}

/// Namespaces that are not watched yet; from now on they are.
fn begin(state: &mut State) -> BTreeSet<String> {
    let fenced = fenced(state).into_iter();
    let new: BTreeSet<String> = fenced.filter(|namespace| !state.unenrolled.contains_key(namespace)).collect();
    state.unenrolled.extend(new.iter().map(|namespace| (namespace.clone(), super::ObjectStore::default())));
    new
}

fn fenced(state: &State) -> BTreeSet<String> {
    let roots = state.configs.current.values().filter(|config| config.spec.root.as_ref().is_some_and(is_fenced));
    roots.filter_map(|root| root.metadata.namespace.clone()).collect()
}
