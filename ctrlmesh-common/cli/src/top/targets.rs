//! Finds the proxies of a cluster among its pods.
//!
//! Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::version::part::{NODE_PROXY, SIDECAR, image_of};

/// A pod with a proxy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target {
    pub(super) namespace: String,
    pub(super) pod: String,
    /// Whether the proxy serves that pod alone.
    pub(super) is_sidecar: bool,
}

/// The node proxies, one a node, and the sidecars. While one node proxy follows another, the port is the newer one's.
pub(super) fn targets(node_proxies: &[Pod], enrolled: &[Pod]) -> Vec<Target> {
    let target = |pod: &Pod, is_sidecar| Target {
        namespace: pod.namespace().unwrap_or_default(),
        pod: pod.name_any(),
        is_sidecar,
    };
    let nodes = newest_by_node(node_proxies);
    let sidecars = enrolled.iter().filter(|pod| image_of(pod, SIDECAR).is_some() && runs(pod));
    nodes.into_values().map(|pod| target(pod, false)).chain(sidecars.map(|pod| target(pod, true))).collect()
}

/// The node proxies that run, one a node.
pub(crate) fn newest_by_node(node_proxies: &[Pod]) -> BTreeMap<Option<&str>, &Pod> {
    let mut nodes: BTreeMap<Option<&str>, &Pod> = BTreeMap::new();
    for pod in node_proxies.iter().filter(|pod| image_of(pod, NODE_PROXY).is_some() && runs(pod)) {
        let newest = nodes.entry(pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref())).or_insert(pod);
        if pod.metadata.creation_timestamp > newest.metadata.creation_timestamp {
            *newest = pod;
        }
    }
    nodes
}

fn runs(pod: &Pod) -> bool {
    pod.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Running"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, container: &str, node: &str, created: &str, phase: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": "ops", "name": name, "creationTimestamp": created},
            "spec": {"nodeName": node, "containers": [{"name": container, "image": "i"}]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn one_proxy_of_a_node_is_asked_and_each_sidecar() {
        let [old, new] = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"];
        let proxies = [
            pod("new", NODE_PROXY, "n1", new, "Running"),
            pod("old", NODE_PROXY, "n1", old, "Running"),
            pod("other", NODE_PROXY, "n2", old, "Running"),
            pod("starting", NODE_PROXY, "n3", new, "Pending"),
        ];
        let enrolled = [pod("web", "app", "n1", old, "Running"), pod("side", SIDECAR, "n1", old, "Running")];
        let found = targets(&proxies, &enrolled);
        let names: Vec<_> = found.iter().map(|one| (one.pod.as_str(), one.is_sidecar)).collect();
        assert_eq!(names, [("new", false), ("other", false), ("side", true)]);
    }
}
