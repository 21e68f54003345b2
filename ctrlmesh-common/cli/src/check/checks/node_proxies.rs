//! Checks that each node that should have a node proxy has one that is ready, and says why others have none.

use std::collections::BTreeSet;

use ctrlmesh_manager::install::rbac;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;

use super::super::finding::{Finding, Group, State};
use super::super::node::{self, can_have_proxy};
use super::super::pages;
use super::super::pods::{is_ready, why_not_ready};
use super::super::snapshot::{Installed, Snapshot};
use crate::text::counted;
use crate::version::part::has_ended;

/// Nodes that are named one by one.
const SHOWN: usize = 10;

/// For so long a new node may lack a node proxy, in seconds.
const JOINING: i64 = 300;

const CHECK: &str = "node proxy";

/// The nodes that have a node proxy that is ready.
pub(super) fn served(installed: &Installed) -> BTreeSet<String> {
    let pods = installed.node_proxies.iter().flatten().filter(|pod| is_ready(pod));
    pods.filter_map(node_of).map(str::to_owned).collect()
}

pub(super) fn check(snapshot: &Snapshot, installed: &Installed) -> Vec<Finding> {
    let of_set = |set: &Option<DaemonSet>| {
        let Some(set) = set else {
            let found = format!("there is no DaemonSet ctrlmesh-node in namespace {}", rbac::NAMESPACE);
            let advice = format!("install ctrlmesh, `kubectl apply -k deploy/`: {}", pages::INSTALL);
            return vec![Group::Nodes.failed(CHECK, found, advice)];
        };
        match (&snapshot.nodes, &installed.node_proxies) {
            (Ok(nodes), Ok(pods)) => by_node(set, nodes, pods, snapshot.server.date),
            _ => vec![by_number(set)],
        }
    };
    Group::Nodes.of(CHECK, &installed.daemon_set, of_set)
}

fn by_node(set: &DaemonSet, nodes: &[Node], pods: &[Pod], now: Option<Timestamp>) -> Vec<Finding> {
    let wanted: Vec<&Node> = nodes.iter().filter(|node| is_wanted(set, node)).collect();
    let of_node = |node: &Node| -> Vec<&Pod> {
        pods.iter().filter(|pod| node_of(pod) == node.metadata.name.as_deref()).collect()
    };
    let lacking: Vec<&&Node> = wanted.iter().filter(|node| !of_node(node).into_iter().any(is_ready)).collect();
    if lacking.is_empty() {
        let found = format!("ready on {}", counted(wanted.len(), "Linux node"));
        return vec![Group::Nodes.ok(CHECK, found)];
    }
    let lacks = |node: &Node| if joins(node, now) { joining(node) } else { lacks(node, &of_node(node)) };
    let mut findings: Vec<Finding> = lacking.iter().map(|node| lacks(node)).collect();
    // What fails comes first, so that no node which is only away hides it.
    findings.sort_by_key(|finding| finding.state != State::Failed);
    if findings.len() > SHOWN {
        let is_failed = findings[SHOWN].state == State::Failed;
        findings.truncate(SHOWN);
        let found = format!("{} of {} nodes lack one", lacking.len(), wanted.len());
        let advice = format!("look at all: `kubectl -n {} get pods -o wide`", rbac::NAMESPACE);
        let group = Group::Nodes;
        let all = if is_failed { group.failed(CHECK, found, advice) } else { group.warning(CHECK, found, advice) };
        findings.push(all);
    }
    findings
}

/// Whether the node has joined just now. Its node proxy starts once the node has its images.
fn joins(node: &Node, now: Option<Timestamp>) -> bool {
    let created = node.metadata.creation_timestamp.as_ref().map(|time| time.0);
    created.zip(now).is_some_and(|(created, now)| now.duration_since(created).as_secs() < JOINING)
}

fn joining(node: &Node) -> Finding {
    let found = format!("{} joined less than {JOINING} s ago, and has none that is ready yet", node.name_any());
    Group::Nodes.warning(CHECK, found, "check again once its images are pulled")
}

fn lacks(node: &Node, pods: &[&Pod]) -> Finding {
    let name = node.name_any();
    if !node::is_ready(node) {
        let advice = format!("look at the node first: `kubectl describe node {name}`");
        return Group::Nodes.warning(CHECK, format!("{name} is not ready itself"), advice);
    }
    // During an update there are two, and one that was evicted may stay.
    let newest = |pod: &&&Pod| {
        let is_there = pod.metadata.deletion_timestamp.is_none() && !has_ended(pod);
        (is_there, pod.metadata.creation_timestamp.as_ref().map(|time| time.0))
    };
    let Some(pod) = pods.iter().max_by_key(newest) else {
        let advice =
            format!("see what stands in the way: `kubectl -n {} describe daemonset ctrlmesh-node`", rbac::NAMESPACE);
        return Group::Nodes.failed(CHECK, format!("{name} has no pod of DaemonSet ctrlmesh-node"), advice);
    };
    let found = format!("{name}: pod {} is not ready: {}", pod.name_any(), why_not_ready(pod));
    let advice = format!(
        "look at its log, `kubectl -n {} logs {}`, and find the message: {}",
        rbac::NAMESPACE,
        pod.name_any(),
        pages::TROUBLESHOOTING
    );
    Group::Nodes.failed(CHECK, found, advice)
}

/// Where nodes or pods cannot be listed.
fn by_number(set: &DaemonSet) -> Finding {
    let status = set.status.clone().unwrap_or_default();
    let found = format!("{} of {} ready", status.number_ready, status.desired_number_scheduled);
    if status.number_ready >= status.desired_number_scheduled {
        return Group::Nodes.ok(CHECK, found);
    }
    let advice = format!("see which nodes lack one: `kubectl -n {} get pods -o wide`", rbac::NAMESPACE);
    Group::Nodes.failed(CHECK, found, advice)
}

/// Whether the DaemonSet has a pod for the node. It tolerates every taint.
fn is_wanted(set: &DaemonSet, node: &Node) -> bool {
    let selector = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()?.node_selector.as_ref());
    let is_selected = selector.into_iter().flatten().all(|(key, value)| node.labels().get(key) == Some(value));
    can_have_proxy(node) && is_selected
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    fn pod(node: &str, state: serde_json::Value) -> Pod {
        let container = json!({"name": "proxy", "image": "p", "imageID": "", "ready": false, "restartCount": 3,
            "state": state, "lastState": {"terminated": {"exitCode": 1, "message": "the kernel (5.10) is too old"}}});
        serde_json::from_value(json!({"metadata": {"name": "ctrlmesh-node-x"}, "spec": {"nodeName": node,
            "containers": []}, "status": {"containerStatuses": [container]}}))
        .unwrap()
    }

    #[test]
    fn every_linux_node_with_a_ready_proxy_is_good() {
        let (snapshot, installed) = (samples::snapshot(), samples::installed());
        let findings = check(&snapshot, &installed);
        assert_eq!(findings, [Group::Nodes.ok(CHECK, "ready on 1 Linux node")]);
        assert_eq!(served(&installed), ["node-1".to_owned()].into());
    }

    #[test]
    fn a_node_that_joined_just_now_is_warned_of() {
        let (mut snapshot, mut installed) = (samples::snapshot(), samples::installed());
        installed.node_proxies = Ok(Vec::new());
        let joined = |seconds| Some(Time(samples::now() - SignedDuration::from_secs(seconds)));
        for (seconds, state) in [(10, State::Warning), (JOINING, State::Failed)] {
            snapshot.nodes.as_mut().unwrap()[0].metadata.creation_timestamp = joined(seconds);
            assert_eq!(check(&snapshot, &installed)[0].state, state, "{seconds}");
        }
    }

    #[test]
    fn a_node_without_one_is_named_with_the_reason() {
        let (snapshot, mut installed) = (samples::snapshot(), samples::installed());
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}});
        installed.node_proxies = Ok(vec![pod("node-1", waiting)]);
        let findings = check(&snapshot, &installed);
        assert_eq!(findings[0].state, State::Failed);
        let expected = "node-1: pod ctrlmesh-node-x is not ready: container proxy: CrashLoopBackOff; it ended before: \
            the kernel (5.10) is too old";
        assert_eq!(findings[0].message, expected);
        installed.node_proxies = Ok(Vec::new());
        assert!(check(&snapshot, &installed)[0].message.ends_with("has no pod of DaemonSet ctrlmesh-node"));
        installed.daemon_set = Ok(None);
        assert_eq!(check(&snapshot, &installed)[0].state, State::Failed);
    }

    #[test]
    fn a_node_that_is_away_is_warned_of() {
        let (mut snapshot, mut installed) = (samples::snapshot(), samples::installed());
        installed.node_proxies = Ok(Vec::new());
        let nodes = snapshot.nodes.as_mut().unwrap();
        nodes[0].status.as_mut().unwrap().conditions = None;
        assert_eq!(check(&snapshot, &installed)[0].state, State::Warning);
    }

    #[test]
    fn without_the_right_to_list_nodes_the_numbers_count() {
        let (mut snapshot, mut installed) = (samples::snapshot(), samples::installed());
        let forbidden = Unanswered::Forbidden { right: "list nodes in all namespaces".to_owned() };
        snapshot.nodes = Err(forbidden.clone());
        assert_eq!(check(&snapshot, &installed), [Group::Nodes.ok(CHECK, "1 of 1 ready")]);
        installed.daemon_set = Err(forbidden);
        assert_eq!(check(&snapshot, &installed)[0].state, State::Skipped);
    }
}
