//! The steps with prometheus-operator, which has no lock, and its upgrade to a newer version, which shadows the old one
//! at first.

use std::io::{Write as _, stderr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_demo::environment::Environment;
use ctrlmesh_demo::steps::{ADDED, CANARY, END, LEAVE, NEWER, PROXY, REFERENCE, ROLLOUT, SHARDS, Step};
use ctrlmesh_demo::work::Work;
use ctrlmesh_testbed::is_full;
use ctrlmesh_testbed::witness::{OperatorUnderTest, Witness};
use xtask::images::Image;

mod stage;

/// The kind of roots, as the audit log is asked for it.
const ROOTS: &str = "shardingconfigs.ctrlmesh.kusionstack.io";

/// Limit for a slot without an owner: a pod that ends holds its slots until the node says that it is gone.
const UNOWNED_WITHIN: Duration = Duration::from_mins(2);

#[test]
fn three_shards_of_prometheus_operator_do_what_one_replica_does() -> Result<()> {
    if !is_full() {
        return upgraded(&[REFERENCE, SHARDS, CANARY, ADDED, END, NEWER]);
    }
    // The example operator takes these, too, in every run.
    let steps = [REFERENCE, SHARDS, CANARY, PROXY, ROLLOUT, ADDED, END, LEAVE];
    stage::play(Work::Prometheuses, 60, &steps)?;
    upgraded(&[REFERENCE, SHARDS, NEWER])
}

/// Takes steps to a newer version, and requires that nobody wrote what was not its own.
fn upgraded(steps: &[Step]) -> Result<()> {
    let divided = divided();
    let bodies = [&divided[..], &[ROOTS.to_owned()]].concat();
    let images = [Image::PrometheusOperator, Image::PrometheusOperatorNext];
    let environment = stage::stage(Work::Prometheuses, 40, &images, &bodies)?;
    stage::play_on(&environment, steps)?;
    witnessed(&environment, divided)
}

/// What is divided, as `plural.group`.
fn divided() -> Vec<String> {
    let name = |kind: &ctrlmesh_demo::work::Kind| {
        let dot = if kind.group.is_empty() { "" } else { "." };
        format!("{}{dot}{}", kind.plural, kind.group)
    };
    Work::Prometheuses.kinds().iter().map(name).collect()
}

/// Requires by the audit log that nobody wrote what was not its own.
fn witnessed(environment: &Environment, divided: Vec<String>) -> Result<()> {
    let operator = Work::Prometheuses.operator();
    let mut witness = Witness::of(OperatorUnderTest {
        namespace: operator.namespace.to_owned(),
        account: operator.name.to_owned(),
        root: operator.name.to_owned(),
        resources: divided.into_iter().collect(),
        hash: NamespaceHash::default(),
    });
    let node = environment.cluster.node().context("a node of our own")?;
    node.control_plane().audit_logs().try_for_each(|log| witness.read(log))?;
    let verdict = witness.verdict();
    writeln!(stderr(), "{verdict}")?;
    verdict.ensure_clean(UNOWNED_WITHIN)
}
