//! The example operator in two shards, as its users deploy it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::write;
use ctrlmesh_testbed::Cluster;
use ctrlmesh_testbed::audit_log::AuditEvent;

use crate::mesh::operator::EVERYBODYS;
use crate::mesh::{self, checkout, json, kubectl, until};

/// Where the operator is deployed to, and its account.
const OPERATOR: &str = "example-operator";

/// Namespaces with one website each, of both halves.
const SHOPS: [&str; 6] = ["shop-a", "shop-b", "shop-c", "shop-d", "shop-e", "shop-f"];

fn website(cluster: &Cluster, namespace: &str) -> Result<()> {
    let file = checkout("deploy/example-operator/config/samples/web_v1alpha1_website.yaml");
    let file = file.display().to_string();
    // For some seconds after the kind was made known, the API server's own admission does not know it.
    until("the kind to be known everywhere", || {
        Ok(kubectl(cluster, &["--namespace", namespace, "apply", "--filename", &file]).ok())
    })
    .map(drop)
}

/// Who wrote pages, and in which namespaces, as the audit log has it.
fn writers(requests: &[AuditEvent]) -> BTreeMap<String, BTreeSet<String>> {
    let mut writers: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for request in requests {
        let object = &request.object;
        let ours = SHOPS.contains(&object.namespace.as_str());
        let written = ours && request.verb == "create" && object.resource == "configmaps";
        if let (true, Some(pod)) = (written, mesh::pod_of(request)) {
            writers.entry(pod.to_owned()).or_default().insert(object.namespace.clone());
        }
    }
    writers
}

#[test]
fn enrolled_replicas_work_on_their_own_shares_only() -> Result<()> {
    let _alone = write(&EVERYBODYS);
    let cluster = mesh::shared();
    cluster.explained(&format!("shards-{}", std::process::id()), works_in_shards(cluster))
}

fn works_in_shards(cluster: &Cluster) -> Result<()> {
    for shop in SHOPS {
        cluster.make(shop)?;
    }
    let sharded = checkout("deploy/example-sharded").display().to_string();
    kubectl(cluster, &["apply", "--kustomize", &sharded])?;
    let rollout = ["rollout", "status", "deployment/example-operator", "--timeout=300s"];
    kubectl(cluster, &[&["--namespace", OPERATOR], &rollout[..]].concat())?;
    for shop in SHOPS {
        website(cluster, shop)?;
    }
    for shop in SHOPS {
        let wait = ["wait", "website", "--all", "--for=condition=Published", "--timeout=300s"];
        kubectl(cluster, &[&["--namespace", shop], &wait[..]].concat())?;
    }
    let pods = json(cluster, &["--namespace", OPERATOR, "get", "pods"])?;
    let pods = pods["items"].as_array().context("pods")?.clone();
    ensure!(pods.len() == 2, "{} pods", pods.len());
    for pod in &pods {
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*restarts == 0, "{restarts} restarts");
    }
    if cluster.node().is_some() {
        each_has_its_share(cluster)?;
    }
    until("the status to say that both are told", || {
        let root = json(cluster, &["--namespace", OPERATOR, "get", "shardingconfig", "websites"])?;
        let conditions = root["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let programmed = conditions.iter().find(|one| one["type"] == "Programmed");
        Ok(programmed.filter(|one| one["status"] == "True").map(drop))
    })?;
    // It would go on to work on what other tests make.
    kubectl(cluster, &["--namespace", OPERATOR, "scale", "deployment/example-operator", "--replicas=0"])?;
    let gone = ["wait", "pod", "--selector=app=example-operator", "--for=delete", "--timeout=300s"];
    kubectl(cluster, &[&["--namespace", OPERATOR], &gone[..]].concat()).map(drop)
}

/// What the API server has seen.
fn each_has_its_share(cluster: &Cluster) -> Result<()> {
    let requests = mesh::requests(cluster, OPERATOR, OPERATOR)?;
    let writers = writers(&requests);
    let [one, other] = &writers.values().collect::<Vec<_>>()[..] else {
        anyhow::bail!("both replicas should have written: {writers:?}")
    };
    ensure!(one.is_disjoint(other), "{writers:?}");
    ensure!(one.len() + other.len() == SHOPS.len(), "{writers:?}");
    let address = mesh::address(cluster)?;
    for request in &requests {
        ensure!(request.sources.first() == Some(&address), "past the proxy: {request:?}");
    }
    // What is asked for is only the share, from the first request on.
    let lists = requests
        .iter()
        .filter(|request| request.object.resource == "websites" && matches!(request.verb.as_str(), "list" | "watch"));
    let mut selected = 0;
    for list in lists {
        let uri = &list.uri;
        ensure!(uri.contains("labelSelector=ctrlmesh.kusionstack.io%2Fsharding-hash"), "{uri}");
        selected += 1;
    }
    ensure!(selected >= 2, "{selected} lists");
    Ok(())
}
