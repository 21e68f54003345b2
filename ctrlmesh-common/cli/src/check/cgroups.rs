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
use super::node::{can_have_proxy, info, is_ready};
use super::pages;
use crate::cluster::answer::{Answer, Unanswered};
use crate::text::{cut, line};

/// The metric of kubelets since Kubernetes 1.31: 1 or 2.
const METRIC: &str = "kubelet_cgroup_version ";

pub(super) const CHECK: &str = "cgroups";

/// Kinds of nodes that are asked at most. A kubelet's metrics have some 100 KiB.
const MOST_KINDS: usize = 8;

/// What to do where kubelets do not say it.
const PROXIES_SAY_IT: &str = "after the installation, the node proxies say whether they find cgroup2";

/// Of an error, in characters.
const MESSAGE_WIDTH: usize = 200;

/// What is known of the nodes' cgroups, by one node of each kind.
#[derive(Debug, Default)]
pub(super) struct Cgroups {
    /// What each kubelet says that was asked. `None`: it says no version.
    pub(super) answers: Vec<(String, Answer<Option<u8>>)>,
    /// Nodes of kinds of which no node is ready. A kubelet that is away answers nothing.
    pub(super) not_ready: Vec<String>,
}

/// The nodes to ask, and those that are not ready. There is one node of each kind, a ready one if there is one.
pub(super) fn samples(nodes: &[Node]) -> (Vec<String>, Vec<String>) {
    let mut kinds: BTreeMap<[&str; 3], &Node> = BTreeMap::new();
    for node in nodes.iter().filter(|node| can_have_proxy(node)) {
        let Some(info) = info(node) else { continue };
        let kind = [info.kernel_version.as_str(), &info.os_image, &info.kubelet_version];
        let sample = kinds.entry(kind).or_insert(node);
        if !is_ready(sample) && is_ready(node) {
            *sample = node;
        }
    }
    let (ready, not_ready): (Vec<&Node>, Vec<&Node>) = kinds.into_values().partition(|node| is_ready(node));
    (
        ready.into_iter().take(MOST_KINDS).map(Node::name_any).collect(),
        not_ready.into_iter().map(Node::name_any).collect(),
    )
}

/// The value of the metric in a kubelet's answer.
pub(super) fn version(metrics: &str) -> Option<u8> {
    metrics.lines().find_map(|line| line.strip_prefix(METRIC))?.trim().parse().ok()
}

pub(super) fn check(cgroups: &Cgroups) -> Finding {
    let group = Group::Nodes;
    let nodes = |says: fn(Option<u8>) -> bool| -> Vec<&str> {
        let that_say = cgroups.answers.iter().filter(|(_, answer)| answer.as_ref().is_ok_and(|it| says(*it)));
        that_say.map(|(node, _)| node.as_str()).collect()
    };
    let first = nodes(|version| version == Some(1));
    if !first.is_empty() {
        let found = format!("kubelets use cgroup v1, on nodes as {}", listed(&first));
        let advice = format!("mount cgroup2 on such nodes, at /sys/fs/cgroup or beside v1: {}", pages::BEFORE);
        return group.warning(CHECK, found, advice);
    }
    if let Some(unread) = cgroups.answers.iter().find_map(|(node, answer)| Some(unread(node, answer.as_ref().err()?))) {
        return group.skipped(CHECK, unread, PROXIES_SAY_IT);
    }
    if cgroups.answers.is_empty() && cgroups.not_ready.is_empty() {
        return group.skipped(CHECK, "not known: there is no Linux node to ask", PROXIES_SAY_IT);
    }
    if !nodes(|version| version.is_none()).is_empty() {
        return group.skipped(CHECK, "not known: kubelets before Kubernetes 1.31 do not say it", PROXIES_SAY_IT);
    }
    let second = nodes(|version| version.is_some());
    let known = format!("cgroup2, by the kubelets of {}", listed(&second));
    let Some(away) = cgroups.not_ready.first() else { return group.ok(CHECK, known) };
    let is = if cgroups.not_ready.len() == 1 { "is" } else { "are" };
    let unknown = format!("not known of nodes as {}, which {is} not ready", listed(&cgroups.not_ready));
    let found = if second.is_empty() { unknown } else { format!("{known}; {unknown}") };
    group.skipped(CHECK, found, format!("look at the node, `kubectl describe node {away}`, and check again"))
}

fn unread(node: &str, why: &Unanswered) -> String {
    match why {
        Unanswered::Forbidden { right } => format!("not known: you may not {right}"),
        Unanswered::Failed { error, .. } => {
            format!("not known: the kubelet of {node} does not say it: {}", cut(&line(error), MESSAGE_WIDTH))
        }
    }
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
        assert_eq!(samples(&nodes), (vec!["a-1".to_owned(), "b-1".to_owned()], Vec::new()));
    }

    #[test]
    fn a_node_that_is_not_ready_is_not_asked() {
        let mut nodes = ["a-1", "a-2"].map(|name| node(name, "linux", "6.1.0", "amd64", "containerd://2"));
        nodes[0].status.as_mut().unwrap().conditions = None;
        assert_eq!(samples(&nodes), (vec!["a-2".to_owned()], Vec::new()), "another one of its kind is ready");
        assert_eq!(samples(&nodes[..1]), (Vec::new(), vec!["a-1".to_owned()]));
    }

    #[test]
    fn a_node_that_is_not_ready_is_named_and_skipped() {
        let not_ready = vec!["b-1".to_owned()];
        let alone = check(&Cgroups { answers: Vec::new(), not_ready: not_ready.clone() });
        let expected = "not known of nodes as b-1, which is not ready";
        assert_eq!((alone.state, alone.message.as_str()), (State::Skipped, expected));
        let answers = vec![("a-1".to_owned(), Ok(Some(2)))];
        let mixed = check(&Cgroups { answers, not_ready: not_ready.clone() });
        let expected = "cgroup2, by the kubelets of a-1; not known of nodes as b-1, which is not ready";
        assert_eq!((mixed.state, mixed.message.as_str()), (State::Skipped, expected));
        assert!(mixed.advice.is_some_and(|advice| advice.contains("kubectl describe node b-1")));
        let old = vec![("a-1".to_owned(), Ok(Some(1)))];
        assert_eq!(check(&Cgroups { answers: old, not_ready }).state, State::Warning);
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
            let cgroups = Cgroups { answers: vec![("a-1".to_owned(), answer)], not_ready: Vec::new() };
            assert_eq!(check(&cgroups).state, state);
        }
        let nobody = check(&Cgroups::default());
        let expected = "not known: there is no Linux node to ask";
        assert_eq!((nobody.state, nobody.message.as_str()), (State::Skipped, expected));
    }
}
