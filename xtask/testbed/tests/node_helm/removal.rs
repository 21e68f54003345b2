//! Looks for what is left of ctrlmesh in a cluster and on its node.

use anyhow::{Result, ensure};
use ctrlmesh_testbed::Cluster;

use crate::mesh::{NAMESPACE, json, kubectl, until};

/// Waits until nothing is left but the definitions.
pub(crate) fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    let asked = "mutatingadmissionpolicies,mutatingadmissionpolicybindings,mutatingwebhookconfigurations,\
        validatingwebhookconfigurations,clusterroles,clusterrolebindings,flowschemas,prioritylevelconfigurations";
    until("nobody to be asked or to label any more", || {
        let left = kubectl(cluster, &["get", asked, "--output=name"])?;
        Ok((!left.contains("/ctrlmesh")).then_some(()))
    })?;
    let kinds = kubectl(cluster, &["api-resources", "--verbs=list", "--output=name"])?;
    let kinds: Vec<&str> = kinds.lines().collect();
    let labelled = "--selector=app.kubernetes.io/part-of=ctrlmesh";
    let left = kubectl(cluster, &["get", &kinds.join(","), "--all-namespaces", labelled, "--output=name"])?;
    ensure!(left.lines().all(|one| one == "configmap/ctrlmesh-root-ca"), "{left}");
    let spaces = json(cluster, &["get", "namespaces", "--field-selector", &format!("metadata.name={NAMESPACE}")])?;
    ensure!(spaces["items"].as_array().is_some_and(Vec::is_empty), "{spaces}");
    let definitions = kubectl(cluster, &["get", "crds", "--output=name"])?;
    let ours = definitions.lines().filter(|name| name.ends_with(".ctrlmesh.kusionstack.io")).count();
    ensure!(ours == 4, "{definitions}");
    Ok(())
}
