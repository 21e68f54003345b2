//! Checks what nodes say about themselves.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, NodeSystemInfo};
use kube::ResourceExt as _;

use super::super::finding::{Finding, Group, listed};
use super::super::pages;
use crate::text::counted;
use crate::version::image::numbers;

/// The oldest Linux whose programs for `connect()` may refuse a connection.
const OLDEST_KERNEL: [u64; 2] = [6, 1];

/// The operating system that has proxies.
const LINUX: &str = "linux";

/// Runtimes by which ctrlmesh was tried, or whose cgroups are known.
const RUNTIMES: [&str; 2] = ["containerd", "cri-o"];

/// Labels of nodes that are no machines: the virtual kubelet's, and those of EKS Fargate.
const VIRTUAL: [(&str, &str); 2] = [("type", "virtual-kubelet"), ("eks.amazonaws.com/compute-type", "fargate")];

/// The checks of all nodes. Those in `served` have a node proxy that is ready, so their kernels do.
pub(super) fn check(nodes: &[Node], served: &BTreeSet<String>) -> Vec<Finding> {
    let linux: Vec<(&Node, &NodeSystemInfo)> =
        nodes.iter().filter_map(|node| Some((node, info(node)?))).filter(|(node, _)| can_have_proxy(node)).collect();
    if linux.is_empty() {
        let found = format!("{}, and none runs Linux", counted(nodes.len(), "node"));
        let advice = format!("add nodes with Linux 6.1 or newer: {}", pages::BEFORE);
        return vec![Group::Nodes.failed("operating system", found, advice)];
    }
    vec![system(nodes.len(), linux.len()), kernel(&linux, served), architecture(&linux, served), runtime(&linux)]
}

/// What a node says about its system.
pub(super) fn info(node: &Node) -> Option<&NodeSystemInfo> {
    node.status.as_ref()?.node_info.as_ref()
}

/// Whether a node runs Linux, and is a machine.
pub(super) fn can_have_proxy(node: &Node) -> bool {
    let is_virtual = VIRTUAL.iter().any(|(key, value)| node.labels().get(*key).is_some_and(|one| one == value));
    !is_virtual && info(node).is_some_and(|info| info.operating_system == LINUX)
}

fn system(all: usize, linux: usize) -> Finding {
    let found = if all == linux {
        format!("{}, all with Linux", counted(all, "node"))
    } else {
        format!("{linux} of {all} nodes are machines with Linux; the others have no proxy")
    };
    Group::Nodes.ok("operating system", found)
}

fn kernel(nodes: &[(&Node, &NodeSystemInfo)], served: &BTreeSet<String>) -> Finding {
    let is_old = |info: &NodeSystemInfo| {
        numbers(&info.kernel_version).is_none_or(|numbers| numbers.as_slice() < OLDEST_KERNEL.as_slice())
    };
    let old: Vec<String> = nodes
        .iter()
        .filter(|(node, info)| is_old(info) && !served.contains(&node.name_any()))
        .map(|(node, info)| format!("{} has {}", node.name_any(), info.kernel_version))
        .collect();
    if old.is_empty() {
        let kernels: BTreeSet<&str> = nodes.iter().map(|(_, info)| info.kernel_version.as_str()).collect();
        return Group::Nodes.ok("kernel", format!("Linux {}", listed(&kernels.into_iter().collect::<Vec<_>>())));
    }
    let advice = format!(
        "update these nodes to Linux 6.1, or use interception `env` or `kubeconfig` for pods there: {}",
        pages::INTERCEPTION
    );
    Group::Nodes.failed("kernel", format!("older than Linux 6.1: {}", listed(&old)), advice)
}

fn architecture(nodes: &[(&Node, &NodeSystemInfo)], served: &BTreeSet<String>) -> Finding {
    let all: BTreeSet<&str> = nodes.iter().map(|(_, info)| info.architecture.as_str()).collect();
    let all: Vec<&str> = all.into_iter().collect();
    let found = all.join(", ");
    if all.len() == 1 || nodes.iter().all(|(node, _)| served.contains(&node.name_any())) {
        return Group::Nodes.ok("architecture", found);
    }
    let advice =
        "push the images for each architecture: `cargo xtask images` builds them for the machine on which it runs";
    Group::Nodes.warning("architecture", found, advice)
}

fn runtime(nodes: &[(&Node, &NodeSystemInfo)]) -> Finding {
    let runtimes: BTreeSet<&str> = nodes.iter().map(|(_, info)| info.container_runtime_version.as_str()).collect();
    let (known, others): (Vec<&str>, Vec<&str>) =
        runtimes.into_iter().partition(|runtime| RUNTIMES.iter().any(|known| runtime.split(':').next() == Some(known)));
    let handlers: BTreeSet<&str> = nodes
        .iter()
        .flat_map(|(node, _)| node.status.iter().flat_map(|status| status.runtime_handlers.iter().flatten()))
        .filter_map(|handler| handler.name.as_deref().filter(|name| !name.is_empty()))
        .collect();
    let handlers: Vec<&str> = handlers.into_iter().collect();
    let also = if handlers.is_empty() { String::new() } else { format!("; handlers: {}", listed(&handlers)) };
    if others.is_empty() {
        return Group::Nodes.ok("container runtime", listed(&known) + &also);
    }
    let advice = "try one enrolled pod on such a node first: a node proxy has to find the pod's cgroup";
    Group::Nodes.warning("container runtime", format!("not tried by us: {}{also}", listed(&others)), advice)
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::State;
    use super::super::super::snapshot::samples::node;
    use super::*;

    fn states(nodes: &[Node], served: &[&str]) -> Vec<(&'static str, State)> {
        let served = served.iter().map(|name| (*name).to_owned()).collect();
        check(nodes, &served).iter().map(|one| (one.check, one.state)).collect()
    }

    #[test]
    fn linux_nodes_with_a_new_kernel_are_good() {
        let windows = node("win-1", "windows", "10.0.20348", "amd64", "containerd://2.1.0");
        let nodes = [node("node-1", "linux", "6.1.0-18-amd64", "amd64", "cri-o://1.34.0"), windows];
        let findings = check(&nodes, &BTreeSet::new());
        assert!(findings.iter().all(|one| one.state == State::Ok), "{findings:?}");
        assert_eq!(findings[0].message, "1 of 2 nodes are machines with Linux; the others have no proxy");
        assert_eq!(findings[3].message, "cri-o://1.34.0; handlers: runc");
    }

    #[test]
    fn an_old_kernel_fails_unless_a_proxy_is_ready_there() {
        let nodes = [node("node-1", "linux", "5.14.0-427.el9", "amd64", "containerd://2.1.0")];
        assert!(states(&nodes, &[]).contains(&("kernel", State::Failed)));
        assert!(states(&nodes, &["node-1"]).contains(&("kernel", State::Ok)));
        assert_eq!(check(&nodes, &BTreeSet::new())[1].message, "older than Linux 6.1: node-1 has 5.14.0-427.el9");
    }

    #[test]
    fn several_architectures_and_other_runtimes_are_warned_of() {
        let nodes = [
            node("node-1", "linux", "6.12.1", "amd64", "containerd://2.1.0"),
            node("node-2", "linux", "6.12.1", "arm64", "docker://29.0.0"),
        ];
        let expected = [
            ("operating system", State::Ok),
            ("kernel", State::Ok),
            ("architecture", State::Warning),
            ("container runtime", State::Warning),
        ];
        assert_eq!(states(&nodes, &["node-1"]), expected);
        assert!(states(&nodes, &["node-1", "node-2"]).contains(&("architecture", State::Ok)));
    }

    #[test]
    fn a_cluster_without_linux_fails() {
        let windows = node("win-1", "windows", "10.0.20348", "amd64", "containerd://2.1.0");
        assert_eq!(states(&[windows], &[]), [("operating system", State::Failed)]);
        assert_eq!(states(&[], &[]), [("operating system", State::Failed)]);
    }
}
