//! The whole life of a release, as docs/install-with-helm.md has it.

use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{Cluster, Node, Options, Space};
use serde_json::{Value, json};
use xtask::images::{self, Image};
use xtask::tools;

use crate::helm::Helm;
use crate::mesh::knocks::{count, knocked, knocks};
use crate::mesh::operator::{self, OperatorSpec, PLAIN, goes_on};
use crate::mesh::past::Past;
use crate::mesh::{self, NAMESPACE, kubectl};
use crate::removal::nothing_is_left;

/// Values of all kinds, which change pods of managers and node proxies, rights, webhooks and who reaches the managers.
const CHANGED: &str = "\
manager:
  replicas: 3
  logFormat: text
  logLevel: info,ctrlmesh_manager=debug
  extraArgs: [--label-rate=50]
  podAnnotations: {example.com/version: next}
  resources: {requests: {cpu: 10m, memory: 48Mi}, limits: {memory: 1Gi}}
  podDisruptionBudget: {minAvailable: 2}
  rollouts: false
node:
  logLevel: info
  extraEnv: [{name: EXAMPLE, value: next}]
  podLabels: {example.com/version: next}
  resources: {requests: {cpu: 10m, memory: 48Mi}, limits: {memory: 768Mi}}
webhooks: {timeoutSeconds: 5, ephemeralContainers: {failurePolicy: Ignore}}
networkPolicy: {apiServers: [0.0.0.0/0], proxies: [0.0.0.0/0], kubelets: [0.0.0.0/0]}
extraKinds:
- {apiGroup: \"\", resources: [configmaps], version: v1, kinds: [ConfigMap]}
metrics: {dashboards: {enabled: true}}
quota: {enabled: false}
";

/// A node with our images, and nothing of ours in the cluster.
fn bare() -> Result<Cluster> {
    let cluster = Cluster::of(Node::start(&Options { audit: true, ..Options::default() })?);
    mesh::prepare(&cluster)?;
    for archive in images::build(&[Image::Cli], true)? {
        cluster.node().context("a node")?.load(&archive)?;
    }
    Ok(cluster)
}

/// An enrolled operator under load, and what came of its connections so far.
struct Load<'a> {
    space: Space<'a>,
    past: Past<'a>,
    knocked: Value,
}

impl<'a> Load<'a> {
    fn begin(space: Space<'a>) -> Result<Self> {
        operator::deploy(space, PLAIN)?;
        knocks(space, Some(PLAIN))?;
        goes_on(space, "first")?;
        // Only from here on: on a busy node a container may begin before its pod is attached.
        Ok(Self { space, past: Past::from_now(space)?, knocked: knocked(space)? })
    }

    /// Requires that the operator works, was not restarted, and that no connection of it failed or passed the proxy.
    fn goes_on(&mut self, name: &str) -> Result<()> {
        goes_on(self.space, name)?;
        let pods = operator::pods(self.space)?;
        operator::none_restarted(&pods)?;
        self.past.nobody(&pods)?;
        let now = knocked(self.space)?;
        writeln!(stderr(), "{name}: {now}")?;
        ensure!(count(&now, "made") > count(&self.knocked, "made"), "{name}: nobody knocked: {now}");
        ensure!(count(&now, "failed") == count(&self.knocked, "failed"), "{name}: {}, {now}", self.knocked);
        self.knocked = now;
        Ok(())
    }
}

/// Waits until everything is ready, and only one proxy is on the node.
fn settled(cluster: &Cluster) -> Result<()> {
    mesh::ready(cluster)?;
    mesh::until("one proxy to be alone", || Ok((mesh::proxies(cluster)?.len() == 1).then_some(())))
}

fn manager_spec(cluster: &Cluster) -> Result<Value> {
    Ok(mesh::json(cluster, &["--namespace", NAMESPACE, "get", "deployment", "ctrlmesh-manager"])?["spec"].clone())
}

/// `helm test` succeeds, and its command may read all that it checks.
fn checks(helm: &Helm<'_>, cluster: &Cluster) -> Result<()> {
    let said = helm.run("test", &["--logs"])?;
    ensure!(said.contains("Succeeded") && said.contains("validation answers"), "{said}");
    ensure!(!said.contains("you may not") && !said.contains("lacks the right"), "{said}");
    let left = kubectl(cluster, &["get", "clusterroles,clusterrolebindings", "--output=name"])?;
    ensure!(!left.contains("/ctrlmesh-check"), "the account goes with the test: {left}");
    Ok(())
}

fn installed_changed_and_removed(release: &'static str) -> Result<()> {
    let cluster = bare()?;
    let helm = Helm::of(release, &cluster)?;
    let outcome = cluster.case("by-helm", |space| whole_life(&helm, space));
    cluster.explained(&format!("helm-{release}-{}", std::process::id()), outcome)
}

fn whole_life(helm: &Helm<'_>, space: Space<'_>) -> Result<()> {
    let cluster = space.cluster();
    helm.apply("install", &["--create-namespace"])?;
    checks(helm, cluster)?;
    mesh::with_example(cluster)?;
    let mut load = Load::begin(space)?;

    let values = cluster.node().context("a node")?.folder().join("values.yaml");
    std::fs::write(&values, CHANGED)?;
    helm.apply("upgrade", &["--values", &values.display().to_string()])?;
    settled(cluster)?;
    ensure!(manager_spec(cluster)?["replicas"] == 3, "{}", manager_spec(cluster)?);
    load.goes_on("after-the-upgrade")?;
    may_not_roll_back(cluster)?;

    helm.run("rollback", &["1", "--wait"])?;
    settled(cluster)?;
    ensure!(manager_spec(cluster)?["replicas"] == 2, "{}", manager_spec(cluster)?);
    load.goes_on("after-the-rollback")?;
    operator::all_came_from(space, &[mesh::address(cluster)?])?;
    leave_and_remove(helm, space)
}

/// The rights went that were switched off.
fn may_not_roll_back(cluster: &Cluster) -> Result<()> {
    let account = "--as=system:serviceaccount:ctrlmesh-system:ctrlmesh-manager";
    let output = cluster.kubectl().args(["auth", "can-i", "delete", "pods", "--all-namespaces", account]).output()?;
    ensure!(String::from_utf8_lossy(&output.stdout).trim() == "no", "{output:?}");
    Ok(())
}

/// An enrolled pod that nobody takes out: the node's proxy has programs in the kernel for it until the end.
fn forgotten(space: Space<'_>) -> Result<()> {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "forgotten",
        "labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}}, "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "probe", "image": Image::Probe.name(), "args": ["serve"]}]}});
    space.apply(&pod.to_string())?;
    space.kubectl(&["wait", "pod/forgotten", "--for=condition=Ready", "--timeout=300s"]).map(drop)
}

/// Takes the operator out, and then ctrlmesh, while the operator works.
fn leave_and_remove(helm: &Helm<'_>, space: Space<'_>) -> Result<()> {
    let cluster = space.cluster();
    forgotten(space)?;
    let outside = OperatorSpec { enrolled: false, ..PLAIN };
    operator::change(space, outside)?;
    space.kubectl(&["delete", "pod", "knocks"])?;
    kubectl(cluster, &["delete", "shardingconfigs", "--all", "--all-namespaces"])?;
    knocks(space, Some(outside))?;
    let before = knocked(space)?;
    ensure!(!mesh::pins(cluster)?.is_empty(), "nothing is pinned while a pod is served");
    helm.run("uninstall", &["--wait"])?;
    // While the namespace is there, only the DaemonSet says it.
    mesh::until("the pins to go", || Ok(mesh::pins(cluster)?.is_empty().then_some(())))?;
    kubectl(cluster, &["delete", "namespace", NAMESPACE, "--timeout=300s"])?;
    nothing_is_left(cluster)?;
    goes_on(space, "after-the-removal")?;
    let after = knocked(space)?;
    ensure!(count(&after, "failed") == count(&before, "failed"), "{before}, {after}");
    ensure!(count(&after, "made") > count(&before, "made"), "{before}, {after}");
    operator::none_restarted(&operator::pods(space)?)
}

#[test]
fn with_helm_3_nothing_is_refused_and_nothing_is_left() -> Result<()> {
    installed_changed_and_removed(tools::HELM_3)
}

#[test]
fn with_helm_4_nothing_is_refused_and_nothing_is_left() -> Result<()> {
    installed_changed_and_removed(tools::HELM_4)
}
