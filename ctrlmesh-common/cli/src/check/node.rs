//! Says what a node is, and whether it is ready.
//!
//! Pure.

use k8s_openapi::api::core::v1::{Node, NodeSystemInfo};
use kube::ResourceExt as _;

/// The operating system that has proxies.
const LINUX: &str = "linux";

/// Labels of nodes that are no machines: the virtual kubelet's, and those of EKS Fargate.
const VIRTUAL: [(&str, &str); 2] = [("type", "virtual-kubelet"), ("eks.amazonaws.com/compute-type", "fargate")];

/// What a node says about its system.
pub(super) fn info(node: &Node) -> Option<&NodeSystemInfo> {
    node.status.as_ref()?.node_info.as_ref()
}

/// Whether a node runs Linux, and is a machine.
pub(super) fn can_have_proxy(node: &Node) -> bool {
    let is_virtual = VIRTUAL.iter().any(|(key, value)| node.labels().get(*key).is_some_and(|one| one == value));
    !is_virtual && info(node).is_some_and(|info| info.operating_system == LINUX)
}

pub(super) fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}
