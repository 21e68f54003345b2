//! Checks what nodes say about themselves.

use std::collections::BTreeSet;

use ctrlmesh_common::names::label;
use k8s_openapi::api::core::v1::{Node, NodeSystemInfo};
use kube::ResourceExt as _;

use super::super::finding::{Finding, Group, listed};
use super::super::node::{can_have_proxy, info};
use super::super::pages;
use crate::text::counted;
use crate::version::image::numbers;

/// The oldest Linux whose programs for `connect()` may refuse a connection.
const OLDEST_KERNEL: [u64; 2] = [6, 1];

/// Runtimes by which ctrlmesh was tried, or whose cgroups are known.
const RUNTIMES: [&str; 2] = ["containerd", "cri-o"];

/// For which images can be built, as kubelets name them.
const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];

/// The checks of all nodes. Those in `served` have a node proxy that is ready, so their kernels do.
pub(super) fn check(nodes: &[Node], served: &BTreeSet<String>) -> Vec<Finding> {
    let linux: Vec<(&Node, &NodeSystemInfo)> =
        nodes.iter().filter_map(|node| Some((node, info(node)?))).filter(|(node, _)| can_have_proxy(node)).collect();
    if linux.is_empty() {
        let found = match nodes.len() {
            0 => "there is no node".to_owned(),
            1 => "1 node, and it is no machine with Linux".to_owned(),
            all => format!("{all} nodes, and none is a machine with Linux"),
        };
        let advice = format!("add nodes with Linux 6.1 or newer: {}", pages::BEFORE);
        return vec![Group::Nodes.failed("operating system", found, advice)];
    }
    let findings = [system(nodes.len(), linux.len()), kernel(&linux, served)];
    let findings = findings.into_iter().chain(refused(&linux, served));
    findings.chain([architecture(&linux, served), runtime(&linux)]).collect()
}

fn system(all: usize, linux: usize) -> Finding {
    let found = if all == linux {
        format!("{}{} with Linux", counted(all, "node"), if all == 1 { "" } else { ", all" })
    } else {
        let others = if linux == 1 { "is a machine" } else { "are machines" };
        let left = if all - linux == 1 { "the other one has" } else { "the others have" };
        format!("{linux} of {all} nodes {others} with Linux; {left} no proxy")
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

/// Of nodes whose own proxy has said that it cannot work there.
fn refused(nodes: &[(&Node, &NodeSystemInfo)], served: &BTreeSet<String>) -> Option<Finding> {
    let says_no = |node: &Node| node.labels().get(label::EBPF).is_some_and(|value| value == "false");
    let nodes = nodes.iter().map(|(node, _)| node).filter(|node| says_no(node) && !served.contains(&node.name_any()));
    let nodes: Vec<String> = nodes.map(|node| node.name_any()).collect();
    let advice = format!(
        "the log of the node proxy there says why; give pods on these nodes interception `env` or `kubeconfig`: {}",
        pages::INTERCEPTION
    );
    let found = || format!("the node proxy cannot redirect connections on {}", listed(&nodes));
    (!nodes.is_empty()).then(|| Group::Nodes.failed("interception", found(), advice))
}

/// Which images a registry has is not known here, but for which architectures they can be built.
fn architecture(nodes: &[(&Node, &NodeSystemInfo)], served: &BTreeSet<String>) -> Finding {
    let (group, check) = (Group::Nodes, "architecture");
    let all: BTreeSet<&str> = nodes.iter().map(|(_, info)| info.architecture.as_str()).collect();
    let said = all.iter().copied().collect::<Vec<_>>().join(", ");
    let unserved: Vec<(String, &str)> = nodes
        .iter()
        .map(|(node, info)| (node.name_any(), info.architecture.as_str()))
        .filter(|(node, _)| !served.contains(node))
        .collect();
    let foreign = unserved.iter().filter(|(_, architecture)| !ARCHITECTURES.contains(architecture));
    let foreign: Vec<String> = foreign.map(|(node, architecture)| format!("{node} has {architecture}")).collect();
    if !foreign.is_empty() {
        let found = format!("there are no images for: {}", listed(&foreign));
        let advice = format!("keep enrolled pods on nodes with {}: {}", ARCHITECTURES.join(" or "), pages::BEFORE);
        let is_everywhere = foreign.len() == nodes.len();
        return if is_everywhere { group.failed(check, found, advice) } else { group.warning(check, found, advice) };
    }
    if unserved.is_empty() || all.len() == 1 {
        return group.ok(check, said);
    }
    let advice =
        "push the images for each architecture: `cargo xtask images` builds them for the machine on which it runs";
    group.warning(check, said, advice)
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
        assert_eq!(findings[0].message, "1 of 2 nodes is a machine with Linux; the other one has no proxy");
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
    fn a_node_whose_proxy_says_that_it_cannot_work_there_fails() {
        let mut refusing = node("node-1", "linux", "6.12.1", "amd64", "containerd://2.1.0");
        refusing.labels_mut().insert(label::EBPF.to_owned(), "false".to_owned());
        let nodes = [refusing, node("node-2", "linux", "6.12.1", "amd64", "containerd://2.1.0")];
        let finding = check(&nodes, &BTreeSet::new()).remove(2);
        assert_eq!((finding.check, finding.state), ("interception", State::Failed));
        assert_eq!(finding.message, "the node proxy cannot redirect connections on node-1");
        let served = check(&nodes, &BTreeSet::from(["node-1".to_owned()]));
        assert!(served.iter().all(|one| one.state == State::Ok), "an older label: {served:?}");
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
    fn an_architecture_without_images_fails_unless_some_node_works() {
        let of = |architecture| [node("node-1", "linux", "6.12.1", architecture, "containerd://2.1.0")];
        assert!(states(&of("arm64"), &[]).contains(&("architecture", State::Ok)));
        assert!(states(&of("s390x"), &["node-1"]).contains(&("architecture", State::Ok)));
        let failed = check(&of("s390x"), &BTreeSet::new()).remove(2);
        let expected = "there are no images for: node-1 has s390x";
        assert_eq!((failed.state, failed.message.as_str()), (State::Failed, expected));
        let mixed = [of("s390x"), [node("node-2", "linux", "6.12.1", "amd64", "containerd://2.1.0")]].concat();
        assert!(states(&mixed, &[]).contains(&("architecture", State::Warning)), "one node can have a proxy");
    }

    #[test]
    fn a_cluster_without_linux_fails() {
        let windows = node("win-1", "windows", "10.0.20348", "amd64", "containerd://2.1.0");
        assert_eq!(states(&[windows], &[]), [("operating system", State::Failed)]);
        assert_eq!(states(&[], &[]), [("operating system", State::Failed)]);
        assert_eq!(check(&[], &BTreeSet::new())[0].message, "there is no node");
    }
}
