//! What the first node of a cluster and a worker have in common: namespaces, a network, and the programs of a node.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::{Api, Client};
use xtask::images::Image;

use super::supervisor::{self, NodeSpec, Supervisor};
use super::{Program, config};
use crate::access;
use crate::control_plane::ControlPlane;
use crate::pki::Pair;
use crate::supervise;
use crate::tools::NodeTools;
use config::Network;

/// How long a node's namespaces, and later the whole node, may take. They take 50 ms, and 10 s on an idle machine.
const NAMESPACES_WITHIN: Duration = Duration::from_secs(30);
pub(super) const READY_WITHIN: Duration = Duration::from_mins(3);

/// How often we look.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A node's own part of the bed. It ends when this is dropped, and at the latest with this process.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) supervisor: Supervisor,
    name: String,
    network: Network,
}

impl Machine {
    /// Makes its namespaces, and starts containerd there.
    ///
    /// # Errors
    /// Where something cannot be made; the error shows the ends of the logs.
    pub(super) fn start(spec: NodeSpec<'_>, tools: &NodeTools) -> Result<Self> {
        let supervisor = Supervisor::start(spec, &tools.kubelet, &tools.kube_proxy).context("make a node")?;
        let folder = supervisor.folder().to_owned();
        Self::start_on(supervisor, spec.name).with_context(|| logs(&folder))
    }

    fn start_on(supervisor: Supervisor, name: &str) -> Result<Self> {
        let network = wait_for_network(&supervisor)?;
        let folder = supervisor.folder();
        write(&folder.join("cni/pods.conflist"), &config::cni(&network.pods))?;
        let containerd = config::containerd(folder, &Image::Pause.name());
        write(&folder.join("containerd.toml"), &containerd)?;
        Ok(Self { supervisor, name: name.to_owned(), network })
    }

    /// A folder that is removed with the node.
    pub(super) fn folder(&self) -> &Path {
        self.supervisor.folder()
    }

    /// What the cluster calls it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its addresses.
    pub(super) fn network(&self) -> &Network {
        &self.network
    }

    /// Its network namespace, as a file, which stays the same when the node is booted again.
    ///
    /// # Errors
    /// Where it is not known.
    pub(super) fn network_namespace(&self) -> Result<PathBuf> {
        let boots = fs::read_to_string(self.folder().join("boot")).context("who boots the node")?;
        Ok(PathBuf::from(format!("/proc/{}/ns/net", boots.trim_end())))
    }

    /// Writes what kubelet and kube-proxy wait for.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(super) fn configure(&self, plane: &ControlPlane, kube_proxy: &Pair) -> Result<()> {
        let (folder, pki, name) = (self.folder(), plane.pki(), &self.name);
        let kubelet = pki.client(&format!("system:node:{name}"), "system:nodes")?;
        for (program, user) in [("kubelet", &kubelet), ("kube-proxy", kube_proxy)] {
            let kubeconfig = access::kubeconfig(plane.url(), plane.ca(), user);
            write(&folder.join(format!("{program}.kubeconfig")), &kubeconfig)?;
        }
        let serving = pki.server(&format!("kubelet-{name}"), self.network.address)?;
        write(&folder.join("kubelet.yaml"), &config::kubelet(plane.ca(), &serving))?;
        write(&folder.join("kube-proxy.yaml"), &config::kube_proxy(folder, name, &self.network.pods))
    }

    /// A command that runs on the node, as root there.
    ///
    /// # Errors
    /// Where the node is gone.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let process = supervisor::first_process(self.folder()).context("the node's first process is gone")?;
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &process.to_string()])
            .args(["--cgroup", "--net", "--mount", "--uts", "--pid", "--"])
            .arg(program);
        Ok(command)
    }

    /// Gives the node an image, from an archive.
    ///
    /// # Errors
    /// Where containerd does not take it.
    pub(super) fn load(&self, archive: &Path) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let file = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
            let output =
                self.command("ctr")?.args(["--namespace", "k8s.io", "images", "import", "-"]).stdin(file).output()?;
            if output.status.success() {
                return Ok(());
            }
            // containerd may only just have been started.
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(
                Instant::now() < deadline && said.contains("containerd.sock"),
                "load {}: {said}",
                archive.display()
            );
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Kills a program of the node with SIGKILL; it is started again after half a second.
    ///
    /// # Errors
    /// Where it does not run.
    pub(super) fn kill(&self, program: Program) -> Result<()> {
        let process = fs::read_to_string(self.folder().join(format!("{}.pid", program.name())))?;
        // Only processes of the node can be named there.
        let output = self.command("kill")?.args(["-KILL", process.trim_end()]).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kill {}: {said}", program.name());
        Ok(())
    }

    /// Waits until kubelet says that the node is ready, while `runs` says that all that it needs runs.
    ///
    /// # Errors
    /// Where it does not become ready.
    pub(super) fn wait_until_ready(&self, plane: &ControlPlane, mut runs: impl FnMut() -> bool + Send) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        access::until(&plane.kubeconfig(), async |client| {
            let missing = match missing(client, &self.name).await {
                Ok(None) => return Ok(Some(())),
                Ok(Some(missing)) => missing.to_owned(),
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > deadline || !self.supervisor.runs() || !runs() {
                bail!("node {} does not become ready: {missing}", self.name);
            }
            Ok(None)
        })
    }

    /// The ends of its logs.
    pub(super) fn logs(&self) -> String {
        logs(self.folder())
    }
}

/// The ends of all logs of a node's folder.
pub(super) fn logs(folder: &Path) -> String {
    let logs = ["node", "containerd", "kubelet", "kube-proxy", "kube-scheduler"]
        .map(|name| format!("== {name}\n{}\n", supervise::log_tail(folder, name)));
    format!("start a node; it logged\n{}", logs.concat())
}

/// Waits until the node has its network, which says that its namespaces are there.
fn wait_for_network(supervisor: &Supervisor) -> Result<Network> {
    let deadline = Instant::now() + NAMESPACES_WITHIN;
    let folder = supervisor.folder();
    loop {
        if let Ok(text) = fs::read_to_string(folder.join("network")) {
            return Network::parse(&text).with_context(|| format!("what is {text:?}?"));
        }
        if Instant::now() > deadline || folder.join("ended").exists() {
            bail!("the node's namespaces cannot be made");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// What the node of this name lacks until pods can run on it.
async fn missing(client: &Client, name: &str) -> Result<Option<&'static str>> {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    let Some(node) = nodes.get_opt(name).await? else { return Ok(Some("kubelet has not come")) };
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    let ready = conditions.iter().any(|is| is.type_ == "Ready" && is.status == "True");
    Ok((!ready).then_some("kubelet does not say that it is ready"))
}

/// Writes a file so that whoever waits for it finds it whole.
pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    let staged = path.with_extension("new");
    let folder = path.parent().context("a file without folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&staged, text))
        .and_then(|()| fs::rename(&staged, path))
        .with_context(|| format!("write {}", path.display()))
}
