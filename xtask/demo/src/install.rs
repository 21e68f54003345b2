//! Puts ctrlmesh and an operator into a cluster, as a user does, and takes them out again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::resource_list;
use ctrlmesh_testbed::Cluster;
use serde_json::{Value, json};
use xtask::images::Image;
use xtask::tools;
use xtask::user_cluster::{LABELS_ROLE, SYSTEM};

use crate::api::Api;
use crate::work::Work;

/// How long a rollout, or the end of pods, may take.
pub const ROLLED_OUT_WITHIN: Duration = Duration::from_mins(4);

/// The oldest Kubernetes that does what we need: it says in a pod's token on which node the pod is.
const LEAST: (u32, u32) = (1, 30);

/// Where a file of the checkout is.
pub fn checkout(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Installs ctrlmesh, as its users do, and waits until it is ready.
///
/// # Errors
/// Where something does not become ready.
pub fn ctrlmesh(cluster: &Cluster) -> Result<()> {
    let folder = checkout("deploy");
    cluster.ask(&["apply", "--kustomize", &folder.display().to_string()], "")?;
    for one in ["deployment/ctrlmesh-manager", "daemonset/ctrlmesh-node"] {
        rolled_out(cluster, SYSTEM, one).with_context(|| {
            format!("{one} does not become ready; do the cluster's nodes have the images (`cargo xtask images`)?")
        })?;
    }
    Ok(())
}

/// Installs the operator of `work`, as its own manifests say, and waits until it is ready.
///
/// # Errors
/// Where it does not become ready.
pub fn operator(cluster: &Cluster, work: Work) -> Result<()> {
    match work {
        Work::Websites => {
            let folder = checkout("deploy/example-operator/config/default");
            cluster.ask(&["apply", "--kustomize", &folder.display().to_string()], "")?;
        }
        Work::Prometheuses => {
            let program = tools::prometheus_operator();
            let text = prometheus_bundle(&program, tools::PROMETHEUS_OPERATOR, Image::PrometheusOperator)?;
            // By the server: the definitions are too long for what kubectl would write into an annotation.
            cluster.ask(&["apply", "--server-side", "--filename", "-"], &text)?;
        }
    }
    let operator = work.operator();
    rolled_out(cluster, operator.namespace, &format!("deployment/{}", operator.name))
}

/// Applies the manifests of the newer prometheus-operator, as its users do, with so many replicas. Does not wait.
///
/// # Errors
/// Where the API server refuses something.
pub fn newer_prometheus_operator(cluster: &Cluster, replicas: usize) -> Result<()> {
    let (program, image) = (tools::prometheus_operator_next(), Image::PrometheusOperatorNext);
    let text = prometheus_bundle(&program, tools::PROMETHEUS_OPERATOR_NEXT, image)?;
    let one = "\nspec:\n  replicas: 1\n";
    ensure!(text.matches(one).count() == 1, "the manifests do not have one workload of one replica");
    let text = text.replace(one, &format!("\nspec:\n  replicas: {replicas}\n"));
    // Somebody else has given it its replicas.
    cluster.ask(&["apply", "--server-side", "--force-conflicts", "--filename", "-"], &text).map(drop)
}

/// The manifests beside a program that we have built, with our image.
fn prometheus_bundle(program: &Path, version: &str, image: Image) -> Result<String> {
    let bundle = program.with_file_name("bundle.yaml");
    let text = fs::read_to_string(&bundle);
    let text = text.with_context(|| format!("read {}: run `cargo xtask setup`", bundle.display()))?;
    let theirs = format!("quay.io/prometheus-operator/prometheus-operator:{version}");
    ensure!(text.contains(&theirs), "the manifests do not name {theirs}");
    Ok(text.replace(&theirs, &image.name()))
}

/// Refuses a cluster that is too old, from what `kubectl version --output=json` says.
///
/// # Errors
/// Which version it has, and which it needs.
pub fn new_enough(said: &str) -> Result<()> {
    let said: Value = serde_json::from_str(said).context("read what kubectl says of versions")?;
    let server = &said["serverVersion"];
    // Some providers write 30+.
    let number = |field: &str| {
        let text = server[field].as_str()?.trim_end_matches(|one: char| !one.is_ascii_digit());
        text.parse::<u32>().ok()
    };
    let found = number("major").zip(number("minor")).context("the cluster does not say its version")?;
    let ((major, minor), name) = (LEAST, server["gitVersion"].as_str().unwrap_or("older"));
    ensure!(
        found >= LEAST,
        "the cluster is too old: it is Kubernetes {name}, and ctrlmesh needs {major}.{minor} or newer; nothing was changed there"
    );
    Ok(())
}

/// Waits until a workload is as its template says.
///
/// # Errors
/// Where it does not become so.
pub fn rolled_out(cluster: &Cluster, namespace: &str, workload: &str) -> Result<()> {
    let timeout = format!("--timeout={}s", ROLLED_OUT_WITHIN.as_secs());
    let arguments = ["--namespace", namespace, "--request-timeout=0", "rollout", "status", workload, &timeout];
    cluster.ask(&arguments, "").map(drop)
}

/// Says which kinds are labelled, and that the manager may.
///
/// # Errors
/// Where the API server refuses it.
pub fn label_kinds(api: &Api, work: Work) -> Result<()> {
    let mut listed = serde_json::Map::new();
    for kind in work.kinds() {
        let kinds = listed.entry(kind.api_version()).or_insert_with(|| json!([]));
        kinds.as_array_mut().context("a list")?.push(json!(kind.kind));
    }
    let text = json!({"groupVersionKinds": listed}).to_string();
    let list = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": resource_list::NAME},
        "data": {resource_list::KEY: text}});
    let path = format!("/api/v1/namespaces/{SYSTEM}/configmaps/{}", resource_list::NAME);
    api.apply(&path, &list)?;
    let rules = work.kinds().iter().map(|kind| {
        json!({"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["get", "list", "watch", "patch"]})
    });
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": LABELS_ROLE, "labels": {"ctrlmesh.kusionstack.io/aggregate-to-labels": "true"}},
        "rules": rules.collect::<Vec<_>>()});
    api.apply(&format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{LABELS_ROLE}"), &role)?;
    Ok(())
}

/// The name of the namespace of this number.
pub fn namespace(number: usize) -> String {
    format!("shop-{number:02}")
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::names::label;
    use xtask::user_cluster;

    use super::*;

    #[test]
    fn what_is_taken_away_is_what_is_written() {
        assert_eq!(user_cluster::KEYS, [label::SHARDING_HASH, label::NAMESPACE, label::CONTROL]);
        let operator = Work::Websites.operator();
        assert_eq!((operator.namespace, operator.name), (user_cluster::OPERATOR, user_cluster::OPERATOR));
    }

    #[test]
    fn a_cluster_too_old_is_refused_with_both_versions() {
        let said = |major: &str, minor: &str| {
            let version = json!({"major": major, "minor": minor, "gitVersion": format!("v{major}.{minor}.4")});
            new_enough(&json!({"clientVersion": {}, "serverVersion": version}).to_string())
        };
        let error = said("1", "29+").unwrap_err().to_string();
        assert!(error.contains("v1.29+.4") && error.contains("1.30 or newer"), "{error}");
        assert!(said("1", "30").is_ok() && said("1", "36+").is_ok() && said("2", "0").is_ok());
        assert!(new_enough("{}").is_err());
    }

    #[test]
    fn what_is_needed_is_what_the_manifests_say() {
        let text = fs::read_to_string(checkout("docs/getting-started.md")).unwrap();
        let (major, minor) = LEAST;
        assert!(text.contains(&format!("needs Kubernetes {major}.{minor} or newer")), "{text}");
    }
}
