//! Elastic Cloud on Kubernetes (ECK), an operator with admission webhooks that we did not write, in three shards.
//!
//! One replica alone answers first. Three replicas must admit and refuse the same, with the same words, and each object
//! must be reconciled by its owner alone. No Elasticsearch starts: there is no image of it.

mod install;
mod samples;
mod verdicts;
mod writers;
#[path = "../mesh/mod.rs"]
mod mesh;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::port;
use ctrlmesh_testbed::{Cluster, Space};
use serde_json::Value;

use crate::install::{NAMESPACE, OPERATOR};
use crate::mesh::{json, kubectl, until};
use crate::samples::{ELASTICSEARCH, KIBANA, Samples};
use crate::verdicts::Verdicts;
use crate::writers::Ownership;

/// Namespaces with one Elasticsearch and one Kibana each, made when the operator has three shards.
const TEAMS: [&str; 12] = [
    "team-a", "team-b", "team-c", "team-d", "team-e", "team-f", "team-g", "team-h", "team-i", "team-j", "team-k",
    "team-l",
];

/// A namespace from before that.
const OLD: &str = "team-old";

#[test]
fn three_shards_of_eck_do_what_one_replica_does() -> Result<()> {
    let cluster = mesh::alone()?;
    cluster.explained(&format!("eck-{}", std::process::id()), play(&cluster))
}

fn play(cluster: &Cluster) -> Result<()> {
    let certificate = install::operator(cluster)?;
    let samples = Samples::read(cluster)?;
    let old = cluster.make(OLD)?;
    Verdicts::of(old, &samples.creations())?.ensure_all_admitted()?;
    install::webhooks(cluster, &certificate, &samples.elasticsearch)?;
    let alone = Verdicts::of(old, &samples.creations())?;
    alone.ensure_admitted(|name| name.starts_with("sample ") || name == "reserved setting")?;
    reconciled(old, &samples)?;
    let alone_later = Verdicts::of(old, &samples.updates()?)?;
    alone_later.ensure_admitted(|name| name == "another count")?;
    let before = own_objects(cluster)?;
    install::enrol(cluster)?;
    let teams = TEAMS.iter().map(|name| cluster.make(name)).collect::<Result<Vec<_>>>()?;
    for team in &teams {
        Verdicts::of(*team, &samples.creations())?.ensure_as(&alone, team.name())?;
    }
    for team in &teams {
        reconciled(*team, &samples)?;
    }
    for team in teams.iter().chain([&old]) {
        Verdicts::of(*team, &samples.updates()?)?.ensure_as(&alone_later, team.name())?;
    }
    writers::ensure_owners_only(cluster, &Ownership::of(cluster)?, &TEAMS)?;
    ensure!(own_objects(cluster)? == before, "the operator's identity changed: {before}");
    for route in ["local", "owner"] {
        ensure!(reviews(cluster, route)? > 0.0, "no review went by route {route}");
    }
    none_restarted(cluster)
}

/// Applies the samples, and waits until the operator has made everything that it makes without a running pod.
fn reconciled(space: Space<'_>, samples: &Samples) -> Result<()> {
    for sample in [&samples.elasticsearch, &samples.kibana] {
        space.apply(&sample.to_string()).with_context(|| format!("in {}", space.name()))?;
    }
    let wanted = BTreeSet::from([
        format!("poddisruptionbudget.policy/{ELASTICSEARCH}-es-default"),
        format!("secret/{ELASTICSEARCH}-es-default-es-config"),
        format!("secret/{ELASTICSEARCH}-es-elastic-user"),
        format!("secret/{ELASTICSEARCH}-es-http-certs-public"),
        format!("secret/{ELASTICSEARCH}-es-internal-users"),
        format!("service/{ELASTICSEARCH}-es-http"),
        format!("service/{ELASTICSEARCH}-es-transport"),
        format!("service/{KIBANA}-kb-http"),
        format!("statefulset.apps/{ELASTICSEARCH}-es-default"),
    ]);
    until(&format!("what the operator makes in {}", space.name()), || {
        let found = space.kubectl(&["get", "secrets,services,statefulsets,poddisruptionbudgets", "--output=name"])?;
        let found = found.lines().map(str::to_owned).collect();
        Ok(wanted.is_subset(&found).then_some(()))
    })?;
    // It has seen the StatefulSet, and what Kubernetes makes for it.
    until(&format!("the claims in {} to belong to the Elasticsearch", space.name()), || {
        let owners = "jsonpath={.items[*].metadata.ownerReferences[*].kind}";
        let owners = space.kubectl(&["get", "persistentvolumeclaims", "--output", owners])?;
        Ok((owners == "Elasticsearch Elasticsearch Elasticsearch").then_some(()))
    })
}

/// What the operator keeps for itself in its namespace.
fn own_objects(cluster: &Cluster) -> Result<Value> {
    let get = ["--namespace", NAMESPACE, "get", "configmap", "elastic-operator-uuid"];
    Ok(json(cluster, &get)?["data"].take())
}

/// How many reviews the node's proxy has had answered so.
fn reviews(cluster: &Cluster, route: &str) -> Result<f64> {
    let proxies = mesh::proxies(cluster)?;
    let name = proxies[0]["metadata"]["name"].as_str().context("a proxy")?;
    let path = format!("/api/v1/namespaces/{}/pods/{name}:{}/proxy/metrics", mesh::NAMESPACE, port::PROXY_ADMIN);
    let page = kubectl(cluster, &["get", "--raw", &path])?;
    let start = format!("ctrlmesh_proxy_webhook_requests_total{{route=\"{route}\"");
    let counts = page.lines().filter(|line| line.starts_with(&start)).filter_map(|line| line.rsplit(' ').next());
    Ok(counts.filter_map(|count| count.parse::<f64>().ok()).sum())
}

fn none_restarted(cluster: &Cluster) -> Result<()> {
    let pods = json(cluster, &["--namespace", NAMESPACE, "get", "pods", "--selector", &format!("app={OPERATOR}")])?;
    let pods = pods["items"].as_array().context("pods")?;
    ensure!(pods.len() == 3, "{} pods", pods.len());
    mesh::operator::none_restarted(pods)
}
