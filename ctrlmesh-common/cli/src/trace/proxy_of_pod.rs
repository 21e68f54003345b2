//! Finds the container of the proxy that serves a pod.
//!
//! Pure.

use ctrlmesh_common::names::label;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::top::targets::newest_by_node;
use crate::version::part::{NODE_PROXY, SIDECAR, image_of, is_ready};

/// A container in which a proxy runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProxyContainer {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) container: &'static str,
    /// Whether the proxy serves that pod alone.
    pub(super) is_sidecar: bool,
}

/// `None`: the pod has none.
pub(super) fn sidecar(pod: &Pod) -> Option<ProxyContainer> {
    image_of(pod, SIDECAR).map(|_image| container(pod, SIDECAR, true))
}

pub(super) fn is_enrolled(pod: &Pod) -> bool {
    pod.labels().get(label::ENABLE_PROXY).is_some_and(|value| value == "true")
}

/// The node proxy on the pod's node. While one follows another, the newer one has the pod once it is ready.
pub(super) fn on_node(pod: &Pod, proxies: &[Pod]) -> Option<ProxyContainer> {
    let node = pod.spec.as_ref()?.node_name.as_deref()?;
    let ready: Vec<Pod> = proxies.iter().filter(|proxy| is_ready(proxy)).cloned().collect();
    let newest = |of: &[Pod]| newest_by_node(of).get(&Some(node)).map(|proxy| container(proxy, NODE_PROXY, false));
    newest(&ready).or_else(|| newest(proxies))
}

fn container(pod: &Pod, container: &'static str, is_sidecar: bool) -> ProxyContainer {
    ProxyContainer { namespace: pod.namespace().unwrap_or_default(), pod: pod.name_any(), container, is_sidecar }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, container: &str, node: Option<&str>) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": "ops", "name": name, "labels": {label::ENABLE_PROXY: "true"}},
            "spec": {"nodeName": node, "containers": [{"name": container, "image": "i"}]},
            "status": {"phase": "Running"},
        }))
        .unwrap()
    }

    #[test]
    fn a_pod_has_its_sidecar_or_the_proxy_of_its_node() {
        let with_sidecar = sidecar(&pod("op-0", SIDECAR, Some("n1"))).unwrap();
        assert_eq!((with_sidecar.pod.as_str(), with_sidecar.is_sidecar), ("op-0", true));
        let without = pod("op-0", "manager", Some("n1"));
        assert_eq!(sidecar(&without), None);
        assert!(is_enrolled(&without));
        let proxies = [pod("node-a", NODE_PROXY, Some("n0")), pod("node-b", NODE_PROXY, Some("n1"))];
        let found = on_node(&without, &proxies).unwrap();
        assert_eq!((found.pod.as_str(), found.container, found.is_sidecar), ("node-b", NODE_PROXY, false));
        let mut newer = pod("node-c", NODE_PROXY, Some("n1"));
        newer.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
        let starting = [proxies[1].clone(), newer.clone()];
        assert_eq!(on_node(&without, &starting).unwrap().pod, "node-c", "none is ready");
        let mut serving = proxies[1].clone();
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        serving.status = serde_json::from_value(ready).unwrap();
        assert_eq!(on_node(&without, &[serving, newer]).unwrap().pod, "node-b", "the newer one waits");
        assert_eq!(on_node(&pod("op-0", "manager", Some("n2")), &proxies), None);
        assert_eq!(on_node(&pod("op-0", "manager", None), &proxies), None);
    }
}
