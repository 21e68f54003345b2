//! A real node: kubelet, kube-proxy, containerd and runc in namespaces of their own, with a control plane for it alone.
//!
//! The control plane runs in the node's network namespace, as it does on the first node of most clusters; one wire
//! joins that to this machine. Nothing else of the machine is touched: the node has its own mounts, processes, cgroups,
//! and its own view of the kernel's settings.

mod config;
mod supervisor;

mod existing;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{Api, Client};
use xtask::images::{self, Image};

use crate::access;
use crate::control_plane::{ControlPlane, Location, Options};
use crate::supervise::{self, Supervised};
use crate::tools::NodeTools;
use config::Network;
use supervisor::Supervisor;

pub use existing::{ExistingNode, State};

/// How long the node's namespaces, and later the whole node, may take. They take 50 ms, and 10 s on an idle machine.
const NAMESPACES_WITHIN: Duration = Duration::from_secs(30);
const READY_WITHIN: Duration = Duration::from_mins(3);

/// How often we look.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The node's name, in a cluster that has no other.
const NAME: &str = "node";

/// A program of the node that runs again when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// containerd; its pods go on without it.
    Containerd,
    /// kubelet.
    Kubelet,
    /// kube-proxy.
    KubeProxy,
}

/// A running node and its control plane. They end when this is dropped, and at the latest with this process.
#[derive(Debug)]
pub struct Node {
    // Dropped in this order.
    scheduler: Supervised,
    control_plane: ControlPlane,
    supervisor: Supervisor,
}

impl Program {
    /// The name of its log and of the file with its process.
    fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
        }
    }
}

impl Node {
    /// Starts a node and waits until pods can run on it. What nodes of processes that were killed left is removed
    /// first.
    ///
    /// # Errors
    /// Where a program is not there, this is not root, or something does not become ready; the error shows the ends of
    /// the logs.
    pub fn start(options: &Options) -> Result<Self> {
        let tools = NodeTools::find()?;
        supervisor::sweep().context("remove what an earlier node left")?;
        let supervisor = Supervisor::start(&tools.kubelet, &tools.kube_proxy).context("make a node")?;
        let folder = supervisor.folder().to_owned();
        Self::start_on(supervisor, options, &tools).with_context(|| logs(&folder))
    }

    fn start_on(supervisor: Supervisor, options: &Options, tools: &NodeTools) -> Result<Self> {
        let network = wait_for_network(&supervisor)?;
        let folder = supervisor.folder();
        write(&folder.join("cni/pods.conflist"), &config::cni(&network.pods))?;
        let containerd = config::containerd(folder, &Image::Pause.name());
        write(&folder.join("containerd.toml"), &containerd)?;
        let boots = fs::read_to_string(folder.join("boot")).context("who boots the node")?;
        let location = Location {
            address: network.address,
            network: Some(PathBuf::from(format!("/proc/{}/ns/net", boots.trim_end()))),
        };
        let options = Options { controller_manager: true, ..options.clone() };
        let control_plane = ControlPlane::start_in(&options, &location)?;
        let scheduler = start_scheduler(&control_plane, folder, tools)?;
        let mut this = Self { scheduler, control_plane, supervisor };
        this.configure(&network)?;
        for archive in testing_images()? {
            this.load(archive)?;
        }
        this.wait_until_ready()?;
        // Who finds this knows that the node is ready.
        let kubeconfig = fs::read_to_string(this.control_plane.kubeconfig())?;
        write(&this.folder().join("kubeconfig"), &kubeconfig)?;
        Ok(this)
    }

    /// The control plane.
    pub fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }

    /// A folder that is removed with the node.
    pub fn folder(&self) -> &Path {
        self.supervisor.folder()
    }

    /// A command that runs on the node, as root there.
    ///
    /// # Errors
    /// Where the node is gone.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
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
    pub fn load(&self, archive: &Path) -> Result<()> {
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
    pub fn kill(&self, program: Program) -> Result<()> {
        let process = fs::read_to_string(self.folder().join(format!("{}.pid", program.name())))?;
        // Only processes of the node can be named there.
        let output = self.command("kill")?.args(["-KILL", process.trim_end()]).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kill {}: {said}", program.name());
        Ok(())
    }

    /// Kills everything that runs on the node and its API server at once, and starts the node again on the same folder,
    /// and the API server after it, as after a power cut. Disks are as they were, and what was in memory is gone,
    /// pinned kernel programs too.
    ///
    /// # Errors
    /// Where it does not come back.
    pub fn reboot(&mut self) -> Result<()> {
        let supervisor = &mut self.supervisor;
        self.control_plane.restart_apiserver_of(0, || Ok(supervisor.reboot()?))?;
        let kubeconfig = self.control_plane.kubeconfig();
        let last = access::until(&kubeconfig, async |client| Ok(Some(heartbeat(client).await?)))?;
        let deadline = Instant::now() + READY_WITHIN;
        access::until(&kubeconfig, async |client| {
            if heartbeat(client).await? != last {
                return Ok(Some(()));
            }
            ensure!(Instant::now() < deadline, "kubelet does not come back\n{}", logs(self.folder()));
            Ok(None)
        })?;
        self.wait_until_ready()
    }

    /// Waits until somebody ends the node from outside.
    ///
    /// # Errors
    /// Where that cannot be seen.
    pub fn wait_for_end(&mut self) -> Result<()> {
        Ok(self.supervisor.wait_for_end()?)
    }

    /// Writes what kubelet and kube-proxy wait for.
    fn configure(&self, network: &Network) -> Result<()> {
        let (folder, pki, plane) = (self.folder(), self.control_plane.pki(), &self.control_plane);
        let kubelet = pki.client(&format!("system:node:{NAME}"), "system:nodes")?;
        let kube_proxy = pki.client("system:kube-proxy", "system:node-proxier")?;
        for (program, user) in [("kubelet", kubelet), ("kube-proxy", kube_proxy)] {
            let kubeconfig = access::kubeconfig(plane.url(), plane.ca(), &user);
            write(&folder.join(format!("{program}.kubeconfig")), &kubeconfig)?;
        }
        let serving = pki.server("kubelet-serving", network.address)?;
        write(&folder.join("kubelet.yaml"), &config::kubelet(plane.ca(), &serving))?;
        write(&folder.join("kube-proxy.yaml"), &config::kube_proxy(folder, &network.pods))
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        access::until(&self.control_plane.kubeconfig(), async |client| {
            let missing = match missing(client).await {
                Ok(None) => return Ok(Some(())),
                Ok(Some(missing)) => missing.to_owned(),
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > deadline || !self.supervisor.runs() || !self.scheduler.runs() {
                bail!("the node does not become ready: {missing}");
            }
            Ok(None)
        })
    }
}

/// The ends of all logs.
fn logs(folder: &Path) -> String {
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

fn start_scheduler(plane: &ControlPlane, folder: &Path, tools: &NodeTools) -> Result<Supervised> {
    let user = plane.pki().client("system:kube-scheduler", "system:kube-scheduler")?;
    let kubeconfig = folder.join("kube-scheduler.kubeconfig");
    write(&kubeconfig, &access::kubeconfig(plane.url(), plane.ca(), &user))?;
    let arguments = [
        format!("--kubeconfig={}", kubeconfig.display()),
        "--bind-address=127.0.0.1".to_owned(),
        "--leader-elect=false".to_owned(),
    ];
    let command = plane.location().command(&tools.scheduler, &arguments);
    Supervised::start(&command, &folder.join("kube-scheduler.log")).context("start kube-scheduler")
}

/// The images that every node has, built once per process.
fn testing_images() -> Result<&'static [PathBuf]> {
    static BUILT: LazyLock<Result<Vec<PathBuf>>> = LazyLock::new(|| images::build(&[Image::Pause, Image::Probe], true));
    BUILT.as_deref().map_err(|error| anyhow::anyhow!("{error:#}"))
}

/// What the cluster lacks until pods can run in it.
async fn missing(client: &Client) -> Result<Option<&'static str>> {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    let Some(node) = nodes.get_opt(NAME).await? else { return Ok(Some("kubelet has not come")) };
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    let ready = conditions.iter().any(|is| is.type_ == "Ready" && is.status == "True");
    Ok((!ready).then_some("kubelet does not say that it is ready"))
}

/// When kubelet last said that it lives.
async fn heartbeat(client: &Client) -> Result<Option<MicroTime>> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    let lease = leases.get_opt(NAME).await?;
    Ok(lease.and_then(|lease| lease.spec?.renew_time))
}

/// Writes a file so that whoever waits for it finds it whole.
fn write(path: &Path, text: &str) -> Result<()> {
    let staged = path.with_extension("new");
    let folder = path.parent().context("a file without folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&staged, text))
        .and_then(|()| fs::rename(&staged, path))
        .with_context(|| format!("write {}", path.display()))
}
