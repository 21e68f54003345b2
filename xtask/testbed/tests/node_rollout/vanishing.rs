//! A node vanishes with its part of an operator's pods: its network is cut, and they run on.

use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::SlotSet;
use ctrlmesh_testbed::{Cluster, Worker};
use jiff::Timestamp;
use serde_json::{Value, json};
use xtask::images::{self, Image};

use crate::bed::{self, Kind, Operator, REPLICAS};
use crate::elastic::{BUSY, owners};
use crate::mesh::operator::NAME;
use crate::mesh::{self, kubectl, until};
use crate::pods::has;

/// What the second node is called.
const WORKER: &str = "worker";

impl Operator<'_> {
    /// Has its pods made anew so that both nodes have some.
    fn spread(self) -> Result<()> {
        let spread = json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": NAME}},
            "matchLabelKeys": ["pod-template-hash"]}]);
        let patch = json!({"spec": {"template": {"spec": {"topologySpreadConstraints": spread}}}}).to_string();
        self.space.kubectl(&["patch", &self.target(), "--patch", &patch])?;
        self.rolled_out()
    }

    /// Cuts the second node, and waits until the pods of the other one own everything and have written to what it had:
    /// before Kubernetes says that the node is away.
    fn vanish(self, worker: &Worker) -> Result<()> {
        let (table, pods) = self.owned_by_pods(REPLICAS)?;
        let (lost, rest): (Vec<&Value>, Vec<&Value>) =
            pods.iter().partition(|pod| pod["spec"]["nodeName"] == worker.name());
        ensure!(!lost.is_empty() && !rest.is_empty(), "both nodes have some: {lost:?}, {rest:?}");
        let lost: Vec<&str> = lost.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
        let slots = lost.iter().map(|pod| {
            let shard = table.shard_of(pod).context("a pod without a shard")?;
            owners(&table).remove(shard).context("a shard without slots")
        });
        let slots = slots.collect::<Result<Vec<SlotSet>>>()?.into_iter().reduce(SlotSet::union).context("no slots")?;
        let since = Timestamp::now();
        worker.cut()?;
        let written = self.first_write(slots, &lost, since)?;
        let took = written.duration_since(since).as_secs_f64();
        let node = mesh::json(self.space.cluster(), &["get", "node", worker.name()])?;
        ensure!(has(&node, "Ready"), "Kubernetes knew it as soon: {}", node["status"]["conditions"]);
        writeln!(stderr(), "the node of {lost:?} vanished; the first write of another came {took:.3} s later")?;
        self.even(rest.len()).map(drop)
    }

    /// Mends the second node, and waits until its pods have their parts again.
    fn come_back(self, worker: &Worker) -> Result<()> {
        let since = Timestamp::now();
        worker.mend()?;
        let node = format!("node/{}", worker.name());
        kubectl(self.space.cluster(), &["wait", &node, "--for=condition=Ready", "--timeout=300s"])?;
        self.rolled_out()?;
        self.even(REPLICAS)?;
        let took = Timestamp::now().duration_since(since).as_secs_f64();
        writeln!(stderr(), "the node was there again; all shares were even {took:.3} s later")?;
        Ok(())
    }
}

/// A second node, with its proxy.
fn joined(cluster: &Cluster) -> Result<Worker> {
    let archives = images::build(&[Image::Proxy, Image::ExampleOperator], true)?;
    let worker = cluster.node().context("a node of our own")?.join(WORKER, &archives)?;
    until("the proxy of the second node", || Ok((mesh::proxies(cluster)?.len() == 2).then_some(())))?;
    mesh::ready(cluster)?;
    Ok(worker)
}

#[test]
fn others_work_on_what_a_vanished_node_had() -> Result<()> {
    // Pods of other tests would come to the second node, too.
    let cluster = bed::start_cluster()?;
    let worker = cluster.explained("join", joined(&cluster))?;
    cluster.case("vanished", |space| {
        let operator = Operator { space, kind: Kind::Deployment, good: BUSY, is_elastic: true };
        operator.deploy(&Value::Null)?;
        operator.spread()?;
        operator.vanish(&worker)?;
        operator.come_back(&worker)?;
        operator.witnessed()?;
        operator.remove()
    })
}
