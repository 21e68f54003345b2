//! A node whose kernel does not let its proxy redirect connections: everybody is told, and pods with a proxy inside
//! work there.

use anyhow::{Context as _, Result};
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{Cluster, Space};
use serde_json::{Value, json};

use crate::mesh::operator::{self, OperatorSpec, PLAIN, goes_on};
use crate::mesh::past::Past;
use crate::mesh::{self, in_ours, until};
use crate::starts;

/// One pod with a proxy inside, which its containers are told of.
const BY_VARIABLES: OperatorSpec<'static> = OperatorSpec { annotations: &[("interception", "env")], ..PLAIN };

/// Whether pods are served there, as the node says.
fn says(cluster: &Cluster) -> Result<Value> {
    let nodes = mesh::json(cluster, &["get", "nodes"])?;
    Ok(nodes["items"][0]["metadata"]["labels"][label::EBPF].clone())
}

/// Takes the BPF file system from the node's proxies, as where the kernel has none, or gives it back.
fn file_system(cluster: &Cluster, is_there: bool) -> Result<()> {
    let folder = json!({"path": "/sys/fs/bpf", "type": "Directory"});
    let volume = if is_there {
        json!({"name": "bpf", "hostPath": folder, "emptyDir": null})
    } else {
        json!({"name": "bpf", "hostPath": null, "emptyDir": {}})
    };
    mesh::change_proxies(cluster, &json!({"spec": {"volumes": [volume]}}))
}

/// The condition that says which pods have their policy.
fn programmed(space: Space<'_>) -> Result<Value> {
    let shard: Value = serde_json::from_str(&space.kubectl(&["get", "shardingconfig", "share", "--output=json"])?)?;
    let conditions = shard["status"]["conditions"].as_array().context("conditions")?;
    Ok(conditions.iter().find(|one| one["type"] == "Programmed").cloned().unwrap_or_default())
}

/// The condition names the pod and the node, and an event says it.
fn is_told(space: Space<'_>) -> Result<()> {
    let pods = operator::pods(space)?;
    let name = pods[0]["metadata"]["name"].as_str().context("a name")?;
    until("the condition to name the pod", || {
        let condition = programmed(space)?;
        let message = condition["message"].as_str().unwrap_or_default();
        Ok((condition["reason"] == "NodeCannotServe" && message.contains(name)).then_some(()))
    })?;
    until("an event", || {
        let events = space.kubectl(&["get", "events", "--output=json", "--field-selector=reason=NodeCannotServe"])?;
        let events: Value = serde_json::from_str(&events)?;
        let of_shard = |event: &Value| event["involvedObject"]["name"] == "share" && event["type"] == "Warning";
        Ok(events["items"].as_array().is_some_and(|all| all.iter().any(of_shard)).then_some(()))
    })
}

#[test]
fn of_a_node_that_cannot_serve_everybody_is_told() -> Result<()> {
    let cluster = mesh::alone()?;
    cluster.case("unfit", |space| {
        operator::deploy(space, PLAIN)?;
        goes_on(space, "served")?;
        starts::without_proxies(&cluster)?;
        file_system(&cluster, false)?;
        starts::with_proxies(&cluster)?;
        until("the node to say that it cannot serve", || Ok((says(&cluster)? == "false").then_some(())))?;
        let past = Past::from_now(space)?;
        let before = starts::begin(space)?;
        let pods = until("a pod that nobody serves", || {
            let pods = operator::pods(space)?;
            let runs = pods.iter().all(|pod| pod["status"]["phase"] == "Running");
            Ok((runs && pods.len() == 1 && starts::names(&pods).is_disjoint(&before)).then_some(pods))
        })?;
        // It works on nothing: it does not believe whom it reaches.
        past.everybody(&pods)?;
        is_told(space)?;
        operator::change(space, BY_VARIABLES)?;
        goes_on(space, "inside")?;
        until("the condition to hold", || Ok((programmed(space)?["status"] == "True").then_some(())))?;
        file_system(&cluster, true)?;
        // A proxy that does not begin is waited for longer and longer.
        in_ours(&cluster, &["delete", "pod", "--selector=app.kubernetes.io/name=ctrlmesh-node", "--wait=false"])?;
        until("the node to say that it serves", || Ok((says(&cluster)? == "true").then_some(())))?;
        mesh::ready(&cluster)?;
        operator::change(space, PLAIN)?;
        goes_on(space, "served-again")
    })
}
