//! A cluster that tests run pods in: a node of our own, or one that the user has.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, ensure};
use xtask::tools;

use crate::access;
use crate::control_plane::Options;
use crate::node::Node;

/// Variable that names the kubeconfig of a cluster to use instead of a node of our own. The images must be there.
pub const KUBECONFIG: &str = "CTRLMESH_TEST_KUBECONFIG";

/// How long kubectl may wait for one answer.
const ANSWER_WITHIN: &str = "--request-timeout=60s";

/// What is asked when a test failed, and the file that the answer goes to.
const QUESTIONS: [(&str, &[&str]); 4] = [
    ("events", &["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"]),
    ("objects", &["get", "all", "--all-namespaces", "--output=wide"]),
    ("nodes", &["describe", "nodes"]),
    ("pods", &["describe", "pods", "--all-namespaces"]),
];

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

/// Collects what the cluster says, unless the test passed.
struct Watched<'a> {
    cluster: &'a Cluster,
    report: PathBuf,
    passed: bool,
}

// === impl Cluster ===

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
                None => {
                    Node::start(&Options { audit: true, ..Options::default() }).map(Cluster::of)
                }
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
        let program = tools::control_plane("kubectl");
        let ours = if program.is_file() { program } else { PathBuf::from("kubectl") };
        let mut command = Command::new(ours);
        command.arg("--kubeconfig").arg(&self.kubeconfig).arg(ANSWER_WITHIN);
        command
    }

    /// What kubectl answers, as administrator, given something to read.
    ///
    /// # Errors
    /// Where it fails; the error shows what it said.
    pub fn ask(&self, arguments: &[&str], input: &str) -> Result<String> {
        answer(self.kubectl().args(arguments), input)
    }

    /// The same, which an interruption from the terminal does not reach.
    ///
    /// # Errors
    /// Where it fails; the error shows what it said.
    pub fn ask_undisturbed(&self, arguments: &[&str]) -> Result<String> {
        answer(self.kubectl().args(arguments).process_group(0), "")
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
        let mut watched =
            Watched { cluster: self, report: report_folder(&namespace), passed: false };
        let space = Space { cluster: self, name: &namespace };
        answer(self.kubectl().args(["create", "namespace", &namespace]), "")?;
        let result = space.wait_for_account().and_then(|()| test(space));
        let report = format!("what the cluster said is in {}", watched.report.display());
        result.context(report)?;
        watched.passed = true;
        answer(self.kubectl().args(["delete", "namespace", "--wait=false", &namespace]), "")?;
        Ok(())
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

// === impl Space ===

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

    /// Pods are refused before this is there.
    fn wait_for_account(&self) -> Result<()> {
        self.wait("serviceaccount/default", "create")
    }
}

// === impl Watched ===

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if !self.passed
            && let Err(error) = self.cluster.report(&self.report)
        {
            // A test fails here already, with an error of its own.
            drop(writeln!(std::io::stderr(), "no whole report of the cluster: {error:#}"));
        }
    }
}

/// Where the report of a failed test goes: it outlives the cluster.
fn report_folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    root.join("target/reports").join(name)
}

/// What a command says, given something to read.
fn answer(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", command.get_program().display()))?;
    let mut stdin = child.stdin.take().context("standard input")?;
    let output = thread::scope(|scope| {
        // Where it does not read, its exit status says why.
        scope.spawn(move || drop(stdin.write_all(input.as_bytes())));
        child.wait_with_output()
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    let arguments: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    ensure!(output.status.success(), "{}: {}: {said}", arguments.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
