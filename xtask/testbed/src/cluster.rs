//! A cluster that tests run pods in: a node of our own, or one that the user has.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, thread};

use anyhow::Result;
use serde_json::json;
use xtask::kubectl::{self, answer};
use xtask::user_cluster::MADE;

use crate::access;
use crate::control_plane::Options;
use crate::node::Node;

/// Variable that names the kubeconfig of a cluster to use instead of a node of our own. The images must be there.
pub const KUBECONFIG: &str = "CTRLMESH_TEST_KUBECONFIG";

/// What is asked when a test failed, and the file that the answer goes to.
const QUESTIONS: [(&str, &[&str]); 4] = [
    ("events", &["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"]),
    ("objects", &["get", "all", "--all-namespaces", "--output=wide"]),
    ("nodes", &["describe", "nodes"]),
    ("pods", &["describe", "pods", "--all-namespaces"]),
];

/// A DNS server, as every cluster of a user has one.
const DNS: &str = include_str!("dns.yaml");

/// A cluster with at least one node.
#[derive(Debug)]
pub struct Cluster {
    kubeconfig: PathBuf,
    node: Option<Node>,
}

/// A namespace of one test.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    cluster: &'a Cluster,
    name: &'a str,
}

/// Collects what the cluster says where a test panics.
struct Watched<'a> {
    cluster: &'a Cluster,
    name: &'a str,
}

impl Cluster {
    /// The cluster that all tests of a binary share: the one of [`KUBECONFIG`], else a node that the first one starts.
    ///
    /// # Panics
    /// Where the node does not start: no test of the binary can go on then.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<Cluster> = LazyLock::new(|| {
            let given = env::var_os(KUBECONFIG).filter(|value| !value.is_empty());
            let cluster = match given {
                Some(kubeconfig) => Ok(Cluster::existing(kubeconfig.into())),
                None => Node::start(&Options { audit: true, ..Options::default() }).map(Cluster::of),
            };
            cluster.unwrap_or_else(|error| panic!("{error:?}"))
        });
        &SHARED
    }

    /// A cluster that is there already.
    pub fn existing(kubeconfig: PathBuf) -> Self {
        Self { kubeconfig, node: None }
    }

    /// The cluster of a node.
    pub fn of(node: Node) -> Self {
        Self { kubeconfig: node.control_plane().kubeconfig(), node: Some(node) }
    }

    /// The node, where it is one of ours.
    pub fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    /// The same, to do to it what a test does.
    pub fn node_mut(&mut self) -> Option<&mut Node> {
        self.node.as_mut()
    }

    /// A namespace that is there, and that stays.
    pub fn space<'a>(&'a self, name: &'a str) -> Space<'a> {
        Space { cluster: self, name }
    }

    /// The kubeconfig of its administrator.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// kubectl, as administrator.
    pub fn kubectl(&self) -> Command {
        kubectl::command(&self.kubeconfig)
    }

    /// What kubectl answers, as administrator, given something to read.
    ///
    /// # Errors
    /// Where it fails; the error shows what it said.
    pub fn ask(&self, arguments: &[&str], input: &str) -> Result<String> {
        answer(self.kubectl().args(arguments), input)
    }

    /// Gives a node of ours the DNS server that other clusters have, and waits until pods can ask it.
    ///
    /// # Errors
    /// Where it does not become ready.
    pub fn serve_names(&self) -> Result<()> {
        self.ask(&["apply", "--filename", "-"], DNS)?;
        let status = ["rollout", "status", "deployment/dns", "--timeout=120s"];
        self.ask(&[&["--namespace", "kube-system"], &status[..]].concat(), "").map(drop)
    }

    /// A client of its administrator. It belongs to the runtime that it is made in.
    ///
    /// # Errors
    /// Where the kubeconfig cannot be read.
    pub async fn client(&self) -> Result<kube::Client> {
        access::client(&self.kubeconfig).await
    }

    /// Runs a test in a namespace of its own, and removes the namespace. Where the test fails or panics, the namespace
    /// stays, and what the cluster says goes to a folder that the error names.
    ///
    /// # Errors
    /// Those of the test, and of making and removing the namespace.
    pub fn case(&self, name: &str, test: impl FnOnce(Space<'_>) -> Result<()>) -> Result<()> {
        static CASES: AtomicU32 = AtomicU32::new(0);
        let number = CASES.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("{name}-{}-{number}", std::process::id());
        let _watched = Watched { cluster: self, name: &namespace };
        let result = self.make(&namespace).and_then(test);
        self.explained(&namespace, result)?;
        answer(self.kubectl().args(["delete", "namespace", "--wait=false", &namespace]), "")?;
        Ok(())
    }

    /// Makes a namespace that is taken away at the end where the cluster is the user's, and waits until pods can be in
    /// it.
    ///
    /// # Errors
    /// Where there is one of this name already.
    pub fn make<'a>(&'a self, name: &'a str) -> Result<Space<'a>> {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": {MADE: "true"}}});
        // Not applied: one that is somebody's would become ours.
        self.ask(&["create", "--filename", "-"], &namespace.to_string())?;
        let space = self.space(name);
        // Pods are refused before this is there.
        space.wait("serviceaccount/default", "create")?;
        Ok(space)
    }

    /// Gives `result`; where it is an error, what the cluster says goes to a folder of this name in `target/reports`,
    /// which the error names.
    ///
    /// # Errors
    /// That of `result`.
    pub fn explained<T>(&self, name: &str, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let folder = self.reported(name);
            error.context(format!("what the cluster said is in {}", folder.display()))
        })
    }

    /// Writes a report for whoever looks at what failed; where that fails, it is said.
    fn reported(&self, name: &str) -> PathBuf {
        let folder = report_folder(name);
        if let Err(error) = self.report(&folder) {
            // Something fails here already, with an error of its own.
            drop(writeln!(std::io::stderr(), "no whole report of the cluster: {error:#}"));
        }
        folder
    }

    /// Writes everything into `folder` that can help to see why something failed.
    ///
    /// # Errors
    /// Where a file cannot be written. What the cluster does not answer is not an error.
    pub fn report(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        for (name, question) in QUESTIONS {
            let output = self.kubectl().args(question).output()?;
            fs::write(folder.join(name), [output.stdout, output.stderr].concat())?;
        }
        let Some(node) = &self.node else { return Ok(()) };
        // Logs of programs, and of all containers that there still are.
        for from in [node.folder(), node.control_plane().folder()] {
            let mut copy = Command::new("find");
            copy.arg(".").args(["-maxdepth", "6", "-name", "*.log", "-type", "f"]);
            copy.args(["-exec", "cp", "--parents", "--target-directory"]).arg(folder);
            answer(copy.args(["{}", "+"]).current_dir(from), "")?;
        }
        Ok(())
    }
}

impl<'a> Space<'a> {
    /// The name of the namespace.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The cluster that it is in.
    pub fn cluster(&self) -> &'a Cluster {
        self.cluster
    }

    /// kubectl in this namespace, as administrator.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.cluster.kubectl();
        command.args(["--namespace", self.name]).args(arguments);
        command
    }

    /// What kubectl answers in this namespace.
    ///
    /// # Errors
    /// Where it fails; the error shows what it said.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        answer(&mut self.command(arguments), "")
    }

    /// Applies a manifest.
    ///
    /// # Errors
    /// Where the API server refuses it.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        answer(&mut self.command(&["apply", "--filename", "-"]), manifest).map(drop)
    }

    /// Waits for a condition of `object`, such as `condition=Ready` or `jsonpath={.status.phase}=Succeeded`; at most a
    /// minute.
    ///
    /// # Errors
    /// Where the condition does not come.
    pub fn wait(&self, object: &str, condition: &str) -> Result<()> {
        self.kubectl(&["wait", object, &format!("--for={condition}"), "--timeout=60s"]).map(drop)
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.cluster.reported(self.name);
        }
    }
}

/// Where the report of a failed test goes: it outlives the cluster.
fn report_folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    root.join("target/reports").join(name)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn only_failures_are_reported_also_outside_a_case() {
        let cluster = Cluster::existing(PathBuf::from("/no/such/kubeconfig"));
        let name = format!("explained-{}", std::process::id());
        assert_eq!(cluster.explained(&name, Ok(1)).unwrap(), 1);
        assert!(!report_folder(&name).exists());
        let error = cluster.explained::<()>(&name, Err(anyhow!("as asked"))).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(&name) && error.ends_with(": as asked"), "{error}");
        assert!(report_folder(&name).is_dir());
        fs::remove_dir_all(report_folder(&name)).unwrap();
    }
}
