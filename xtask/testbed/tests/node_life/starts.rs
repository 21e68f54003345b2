//! Pods start again and again while the node's proxy is not there yet, is killed, and is updated: each is served, none
//! is restarted for it, and nothing passes the proxy.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{Cluster, Space};
use serde_json::{Value, json};

use crate::life;
use crate::mesh::delays::Delays;
use crate::mesh::operator::{self, OperatorSpec, PLAIN, goes_on};
use crate::mesh::past::Past;
use crate::mesh::{self, in_ours, until};

/// How many pods start at once.
const AT_ONCE: usize = 5;

/// How often they do with each fault: 100 starts, or a tenth.
fn rounds() -> usize {
    if ctrlmesh_testbed::is_full() { 20 } else { 2 }
}

/// Their names.
pub(crate) fn names(pods: &[Value]) -> BTreeSet<String> {
    pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).map(str::to_owned).collect()
}

/// Has all of the operator's pods made anew at once; returns those that go.
pub(crate) fn begin(space: Space<'_>) -> Result<BTreeSet<String>> {
    let before = operator::pods(space)?;
    space.kubectl(&["delete", "pod", "--selector=app=operator", "--wait=false"])?;
    Ok(names(&before))
}

/// Waits until there are as many others as there are to be, and each of them has had an answer.
fn begun(space: Space<'_>, before: &BTreeSet<String>) -> Result<()> {
    let ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    let pods = until("other pods to be ready", || {
        let pods = operator::pods(space)?;
        let are_there = pods.len() == AT_ONCE && pods.iter().all(ready);
        Ok((are_there && names(&pods).is_disjoint(before)).then_some(pods))
    })?;
    let pods = names(&pods);
    until("each pod to have asked for something", || {
        let requests = mesh::requests(space.cluster(), space.name(), operator::NAME)?;
        let asked: BTreeSet<&str> = requests.iter().filter_map(mesh::pod_of).collect();
        Ok(pods.iter().all(|pod| asked.contains(pod.as_str())).then_some(()))
    })
}

/// Waits until others are made: they are about to start.
fn made(space: Space<'_>, before: &BTreeSet<String>) -> Result<()> {
    until("other pods to be made", || Ok(names(&operator::pods(space)?).is_disjoint(before).then_some(())))
}

/// Waits until the first proxy of the node is told to end.
fn told_to_end(cluster: &Cluster) -> Result<()> {
    until("a proxy to be told to end", || Ok(mesh::proxies(cluster)?.first().is_none_or(mesh::is_ending).then_some(())))
}

/// Kills the proxy that runs, without having it hand anything over.
fn kill(cluster: &Cluster) -> Result<()> {
    life::kill(cluster.node().context("a node")?, "ctrlmesh-proxy")
}

/// Takes the proxy from the node.
pub(crate) fn without_proxies(cluster: &Cluster) -> Result<()> {
    mesh::change_proxies(cluster, &json!({"spec": {"nodeSelector": {"nowhere": "yes"}}}))?;
    told_to_end(cluster)?;
    // It would serve on until another one comes.
    kill(cluster)?;
    until("the proxy to be gone", || Ok(mesh::proxies(cluster)?.is_empty().then_some(())))
}

/// Gives it back.
pub(crate) fn with_proxies(cluster: &Cluster) -> Result<()> {
    mesh::change_proxies(cluster, &json!({"spec": {"nodeSelector": {"nowhere": null}}}))
}

/// Pods are there before any proxy of the node: they dial the API server itself, and do not believe it, until one
/// comes.
fn before_the_proxy(space: Space<'_>, _: usize) -> Result<()> {
    let cluster = space.cluster();
    without_proxies(cluster)?;
    let past = Past::from_now(space)?;
    let before = begin(space)?;
    let pods = until("pods that nobody serves", || {
        let pods = operator::pods(space)?;
        let running = pods.iter().filter(|pod| pod["status"]["phase"] == "Running").count();
        Ok((running == AT_ONCE && names(&pods).is_disjoint(&before)).then_some(pods))
    })?;
    // As it would be seen of those who dial past a proxy that is there.
    past.everybody(&pods)?;
    with_proxies(cluster)?;
    begun(space, &before)
}

/// The proxy is killed while they start. The next one of the DaemonSet follows it, so that the kubelet does not wait
/// longer from one kill to the next.
fn while_it_is_killed(space: Space<'_>, _: usize) -> Result<()> {
    let cluster = space.cluster();
    let before = begin(space)?;
    made(space, &before)?;
    kill(cluster)?;
    begun(space, &before)?;
    in_ours(cluster, &["delete", "pod", "--selector=app.kubernetes.io/name=ctrlmesh-node"])?;
    mesh::ready(cluster)
}

/// Another version of the proxy comes while they start, and the one before goes.
fn while_it_is_updated(space: Space<'_>, round: usize) -> Result<()> {
    let version = json!({"metadata": {"annotations": {"version": format!("next-{round}")}}});
    mesh::change_proxies(space.cluster(), &version)?;
    // It serves on until the next one does.
    told_to_end(space.cluster())?;
    let mut past = Past::from_now(space)?;
    let before = begin(space)?;
    begun(space, &before)?;
    mesh::ready(space.cluster())?;
    past.nobody(&operator::pods(space)?)
}

/// What is done to the proxy while pods start, in a round.
type Fault = fn(Space<'_>, usize) -> Result<()>;

/// Refuses restarts of the operator.
type Restarts = fn(Space<'_>) -> Result<()>;

fn none(space: Space<'_>) -> Result<()> {
    operator::none_restarted(&operator::pods(space)?)
}

#[test]
fn pods_start_while_the_node_proxy_is_late_killed_or_updated() -> Result<()> {
    let cluster = mesh::alone()?;
    let faults: [(&str, Fault, Restarts); 3] = [
        ("late", before_the_proxy, none),
        // On a busy node it may be away for longer than the operator waits for its lock.
        ("killed-while", while_it_is_killed, operator::restarted_for_the_lock_only),
        ("updated-while", while_it_is_updated, none),
    ];
    for (name, fault, restarts) in faults {
        cluster.case(name, |space| {
            operator::deploy(space, OperatorSpec { replicas: AT_ONCE, ..PLAIN })?;
            operator::foreign(space, "foreign")?;
            for round in 0..rounds() {
                fault(space, round)?;
                goes_on(space, &format!("mine-{round}"))?;
                restarts(space)?;
            }
            ensure!(!operator::is_published(space, "foreign")?, "another's website was worked on");
            let requests = operator::all_came_from(space, &[mesh::address(&cluster)?])?;
            ensure!(requests >= rounds() * AT_ONCE, "{requests} requests");
            Delays::of(space)?.say(name)
        })?;
    }
    Ok(())
}
