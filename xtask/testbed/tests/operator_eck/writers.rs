//! Who wrote what the operator makes, as the audit log has it, and who owns it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::Cluster;
use serde_json::Value;

use crate::install::{NAMESPACE, OPERATOR};
use crate::mesh;

/// The ownership table of the root.
pub(crate) struct Ownership(Value);

impl Ownership {
    pub(crate) fn of(cluster: &Cluster) -> Result<Self> {
        let get = ["--namespace", NAMESPACE, "get", "shardingconfig", OPERATOR];
        Ok(Self(mesh::json(cluster, &get)?["status"]["ownership"].take()))
    }

    /// The pod that owns a namespace.
    fn owner(&self, namespace: &str) -> Result<&str> {
        let slot = NamespaceHash::Fnv1a.slot(namespace).to_string();
        let shard = self.0["slots"][&slot].as_str().with_context(|| format!("slot {slot} belongs to nobody"))?;
        let mut pods = self.0["pods"].as_object().context("pods")?.iter();
        let (pod, _) = pods.find(|(_, of)| *of == shard).with_context(|| format!("{shard} has no pod"))?;
        Ok(pod)
    }
}

/// Refuses a write in these namespaces by a pod that does not own them, one that was refused, too, and a namespace in
/// which the owner wrote none of the kinds that it makes for an Elasticsearch.
pub(crate) fn ensure_owners_only(cluster: &Cluster, ownership: &Ownership, namespaces: &[&str]) -> Result<()> {
    let mut owners = BTreeSet::new();
    let mut written: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let requests = mesh::requests(cluster, NAMESPACE, OPERATOR)?;
    for namespace in namespaces {
        let owner = ownership.owner(namespace)?;
        owners.insert(owner);
        for request in requests.iter().filter(|one| one.is_write() && one.object.namespace == *namespace) {
            let pod = mesh::pod_of(request);
            ensure!(pod == Some(owner), "{namespace} belongs to {owner}: {request:?}");
            written.entry(namespace).or_default().insert(request.object.with_subresource());
        }
    }
    ensure!(owners.len() == 3, "some shard owns none of {namespaces:?}: {owners:?}");
    for namespace in namespaces {
        let written = written.get(namespace).with_context(|| format!("nobody wrote in {namespace}"))?;
        for resource in ["elasticsearches/status", "poddisruptionbudgets", "secrets", "services", "statefulsets"] {
            ensure!(written.contains(resource), "no {resource} in {namespace}: {written:?}");
        }
    }
    Ok(())
}
