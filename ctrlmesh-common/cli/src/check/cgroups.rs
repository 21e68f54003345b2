//! Says by the kubelets' metrics which cgroups the nodes have.
//!
//! A Node object does not say it. Nodes with one kernel, system and kubelet have the same cgroups. So one node of each
//! kind is asked.
//!
//! Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;

use super::finding::{Finding, Group, listed};
use super::pages;
use crate::cluster::answer::{Answer, Unanswered};
use crate::text::{cut, line};

/// The metric of kubelets since Kubernetes 1.31: 1 or 2.
const METRIC: &str = "kubelet_cgroup_version ";

const CHECK: &str = "cgroups";

/// Kinds of nodes that are asked at most. A kubelet's metrics have some 100 KiB.
const MOST_KINDS: usize = 8;

/// Of an error, in characters.
const MESSAGE_WIDTH: usize = 200;

/// The cgroup version that each kubelet says. `None`: it says none.
pub(super) type Cgroups = Vec<(String, Answer<Option<u8>>)>;

/// One Linux node of each kind, by its name.
pub(super) fn samples(nodes: &[Node]) -> Vec<String> {
    let mut kinds: BTreeMap<[String; 3], String> = BTreeMap::new();
    for node in nodes {
        let Some(info) = node.status.as_ref().and_then(|status| status.node_info.as_ref()) else { continue };
        if info.operating_system == "linux" {
            let kind = [&info.kernel_version, &info.os_image, &info.kubelet_version].map(Clone::clone);
            kinds.entry(kind).or_insert_with(|| node.name_any());
        }
    }
    kinds.into_values().take(MOST_KINDS).collect()
}

/// The value of the metric in a kubelet's answer.
pub(super) fn version(metrics: &str) -> Option<u8> {
    metrics.lines().find_map(|line| line.strip_prefix(METRIC))?.trim().parse().ok()
}

pub(super) fn check(cgroups: &Cgroups) -> Finding {
    let group = Group::Nodes;
    let proxy = "after the installation, the node proxies say whether they find cgroup2";
    let others = cgroups.iter().filter(|(_, answer)| answer.as_ref().is_ok_and(|version| *version == Some(1)));
    let others: Vec<&str> = others.map(|(node, _)| node.as_str()).collect();
    let silent = cgroups.iter().any(|(_, answer)| answer.as_ref().is_ok_and(Option::is_none));
    if !others.is_empty() {
        let found = format!("kubelets use cgroup v1, on nodes as {}", listed(&others));
        let advice = format!("mount cgroup2 on such nodes, at /sys/fs/cgroup or beside v1: {}", pages::BEFORE);
        return group.warning(CHECK, found, advice);
    }
    for (node, answer) in cgroups {
        match answer {
            Err(Unanswered::Forbidden { right }) => {
                return group.skipped(CHECK, format!("not known: you may not {right}"), proxy);
            }
            Err(Unanswered::Failed { error, .. }) => {
                let error = cut(&line(error), MESSAGE_WIDTH);
                return group.skipped(
                    CHECK,
                    format!("not known: the kubelet of {node} does not say it: {error}"),
                    proxy,
                );
            }
            Ok(_) => {}
        }
    }
    if silent || cgroups.is_empty() {
        return group.skipped(CHECK, "not known: kubelets before Kubernetes 1.31 do not say it", proxy);
    }
    let nodes: Vec<&str> = cgroups.iter().map(|(node, _)| node.as_str()).collect();
    group.ok(CHECK, format!("cgroup2, by the kubelets of {}", listed(&nodes)))
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::super::snapshot::samples::node;
    use super::*;

    #[test]
    fn one_node_of_each_kind_is_asked() {
        let nodes = [
            node("a-1", "linux", "6.1.0", "amd64", "containerd://2"),
            node("a-2", "linux", "6.1.0", "amd64", "containerd://2"),
            node("b-1", "linux", "6.12.0", "amd64", "containerd://2"),
            node("w-1", "windows", "10", "amd64", "containerd://2"),
        ];
        assert_eq!(samples(&nodes), ["a-1", "b-1"]);
    }

    #[test]
    fn the_metric_is_read_beside_others() {
        let text = "# HELP kubelet_cgroup_version x\n# TYPE kubelet_cgroup_version gauge\nkubelet_cgroup_version 2\n";
        assert_eq!((version(text), version("kubelet_active_pods 3\n")), (Some(2), None));
    }

    #[test]
    fn the_check_says_what_is_not_known() {
        let forbidden = Err(Unanswered::Forbidden { right: "get nodes/proxy".to_owned() });
        for (answer, state) in [
            (Ok(Some(2)), State::Ok),
            (Ok(Some(1)), State::Warning),
            (Ok(None), State::Skipped),
            (forbidden, State::Skipped),
        ] {
            assert_eq!(check(&vec![("a-1".to_owned(), answer)]).state, state);
        }
        assert_eq!(check(&Vec::new()).state, State::Skipped);
    }
}
