//! ctrlmesh on a cluster, deployed as its users deploy it, with enrolled operators.
#![allow(dead_code, reason = "each test binary uses its own part of it")]

pub(crate) mod client;
pub(crate) mod delays;
pub(crate) mod knocks;
pub(crate) mod operator;
pub(crate) mod past;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::{Cluster, Node, Options, until_within};
use serde_json::{Value, json};
use xtask::images::{self, Image};

/// Where it is deployed to.
pub(crate) const NAMESPACE: &str = "ctrlmesh-system";

/// How long something may take that takes seconds on an idle machine.
const PATIENCE: Duration = Duration::from_mins(5);

/// A file or folder of the checkout.
pub(crate) fn checkout(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The cluster that all tests of a binary share, with everything deployed.
pub(crate) fn shared() -> &'static Cluster {
    static DEPLOYED: LazyLock<Result<()>> = LazyLock::new(|| deploy(Cluster::shared()));
    DEPLOYED.as_ref().unwrap_or_else(|error| panic!("{error:?}"));
    Cluster::shared()
}

/// A cluster of a test's own, with everything deployed: pods of other tests would notice what is done to it.
pub(crate) fn alone() -> Result<Cluster> {
    alone_with_bodies(&[])
}

/// The same, where the audit log has the bodies of writes to these resources, as `plural.group`.
pub(crate) fn alone_with_bodies(resources: &[&str]) -> Result<Cluster> {
    let audit_bodies = resources.iter().map(ToString::to_string).collect();
    let cluster = Cluster::of(Node::start(&Options { audit: true, audit_bodies, ..Options::default() })?);
    deploy(&cluster)?;
    Ok(cluster)
}

/// One command, as docs/getting-started.md says, and everything is ready; where it is not, there is a report of why.
fn deploy(cluster: &Cluster) -> Result<()> {
    cluster.explained(&format!("deploy-{}", std::process::id()), install(cluster))
}

fn install(cluster: &Cluster) -> Result<()> {
    prepare(cluster)?;
    kubectl(cluster, &["apply", "--kustomize", &checkout("deploy").display().to_string()])?;
    ready(cluster)?;
    with_example(cluster)
}

/// Gives a node of ours what every cluster has, and our images.
pub(crate) fn prepare(cluster: &Cluster) -> Result<()> {
    // A cluster of the user's has its own.
    let Some(node) = cluster.node() else { return Ok(()) };
    cluster.serve_names()?;
    let archives = images::build(&[Image::Proxy, Image::Manager, Image::ExampleOperator], true)?;
    archives.iter().try_for_each(|archive| node.load(archive))
}

/// Installs the kind and the role of the example operator.
pub(crate) fn with_example(cluster: &Cluster) -> Result<()> {
    for file in ["crd/web.example.com_websites.yaml", "rbac/role.yaml"] {
        let file = checkout("deploy/example-operator/config").join(file).display().to_string();
        kubectl(cluster, &["apply", "--filename", &file])?;
    }
    Ok(())
}

/// The address of the node, from which its proxy reaches the API server.
pub(crate) fn address(cluster: &Cluster) -> Result<String> {
    let path = "jsonpath={.items[0].status.addresses[?(@.type=='InternalIP')].address}";
    kubectl(cluster, &["get", "nodes", "--output", path])
}

/// The pins of our programs on the node.
pub(crate) fn pins(cluster: &Cluster) -> Result<String> {
    let node = cluster.node().context("a node")?;
    let output = node.command("find")?.args(["/sys/fs/bpf/ctrlmesh", "-type", "f"]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Waits until manager and node proxies are ready.
pub(crate) fn ready(cluster: &Cluster) -> Result<()> {
    for what in ["deployment/ctrlmesh-manager", "daemonset/ctrlmesh-node"] {
        in_ours(cluster, &["rollout", "status", what, "--timeout=300s"])?;
    }
    Ok(())
}

/// The pods of the nodes' proxies, the one that came last at the end.
pub(crate) fn proxies(cluster: &Cluster) -> Result<Vec<Value>> {
    let selector = "--selector=app.kubernetes.io/name=ctrlmesh-node";
    let sorted = "--sort-by=.metadata.creationTimestamp";
    let found = json(cluster, &["--namespace", NAMESPACE, "get", "pods", selector, sorted])?;
    Ok(found["items"].as_array().context("pods")?.clone())
}

/// Whether a pod is told to end.
pub(crate) fn is_ending(pod: &Value) -> bool {
    !pod["metadata"]["deletionTimestamp"].is_null()
}

/// Changes the template of the nodes' proxies.
pub(crate) fn change_proxies(cluster: &Cluster, template: &Value) -> Result<()> {
    let patch = json!({"spec": {"template": template}}).to_string();
    in_ours(cluster, &["patch", "daemonset/ctrlmesh-node", "--patch", &patch]).map(drop)
}

/// What kubectl answers.
pub(crate) fn kubectl(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let output = cluster.kubectl().args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", arguments.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

/// The same, asked where ctrlmesh is deployed to.
pub(crate) fn in_ours(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    kubectl(cluster, &[&["--namespace", NAMESPACE], arguments].concat())
}

/// What kubectl answers, in JSON.
pub(crate) fn json(cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
    let arguments = [arguments, &["--output=json"]].concat();
    Ok(serde_json::from_str(&kubectl(cluster, &arguments)?)?)
}

/// Every request of the service account that the API server has answered, as its audit log has it. The cluster must be
/// a node of ours.
pub(crate) fn requests(cluster: &Cluster, namespace: &str, account: &str) -> Result<Vec<AuditEvent>> {
    let user = format!("system:serviceaccount:{namespace}:{account}");
    let events = events(cluster, &format!("\"{user}\""))?.into_iter();
    Ok(events.filter(|event| event.user.username == user).collect())
}

/// Every request that the API server has answered and whose line in the log contains `mark`.
pub(crate) fn events(cluster: &Cluster, mark: &str) -> Result<Vec<AuditEvent>> {
    let node = cluster.node().context("a node of our own")?;
    Ok(AuditEvent::read(&node.control_plane().audit_log(), mark)?)
}

/// The pod that a request came from, by its token.
pub(crate) fn pod_of(request: &AuditEvent) -> Option<&str> {
    request.user.pod_name()
}

/// Waits for something to be there.
pub(crate) fn until<T>(what: &str, look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(PATIENCE, what, look)
}

/// A pattern for a pod's UID, as its cgroup is called under either driver.
pub(crate) fn within(uid: &str) -> String {
    uid.replace('-', "[-_]")
}

/// Kills every process of a program of ours in one pod, by its UID, with SIGKILL. An empty UID stands for every pod.
pub(crate) fn kill_in(node: &Node, uid: &str, program: &str) -> Result<()> {
    // Only processes of the node are to be seen there.
    let each = r#"for one in /proc/[0-9]*; do
        [ "$(readlink "$one/exe")" = "/$0" ] && grep -q "$1" "$one/cgroup" \
            && kill -KILL "${one#/proc/}" && echo "$one"; done"#;
    let output = node.command("sh")?.args(["-c", each, program, &within(uid)]).output()?;
    ensure!(!output.stdout.is_empty(), "no {program} runs");
    Ok(())
}
