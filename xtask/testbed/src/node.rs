//! A real node: kubelet, kube-proxy, containerd and runc in namespaces of their own, with a control plane for it alone.
//!
//! The control plane runs in the node's network namespace, as it does on the first node of most clusters; one wire
//! joins that to this machine. Nothing else of the machine is touched: the node has its own mounts, processes, cgroups,
//! and its own view of the kernel's settings.

mod config;
mod supervisor;
mod machine;
mod worker;

mod existing;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{Api, Client};
use xtask::images::{self, Image};

use crate::access;
use crate::control_plane::{ControlPlane, Location, Options};
use crate::pki::Pair;
use crate::supervise::Supervised;
use crate::tools::NodeTools;
use machine::{Machine, READY_WITHIN, write};
use supervisor::{NodeSpec, OWN_NETWORK};

pub use existing::{ExistingNode, State};
pub use worker::Worker;

/// The name of a cluster's first node.
const NAME: &str = "node";

/// What the addresses of its wire begin with, and those of its pods.
const WIRES: &str = "10.213";
const PODS: &str = "10.214";

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
    machine: Machine,
    /// As whom every kube-proxy of the cluster asks.
    kube_proxy: Pair,
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
        let spec = NodeSpec { name: NAME, wires: WIRES, pods: PODS, network: Path::new(OWN_NETWORK) };
        let machine = Machine::start(spec, &tools)?;
        let folder = machine.folder().to_owned();
        Self::start_on(machine, options, &tools).with_context(|| machine::logs(&folder))
    }

    fn start_on(machine: Machine, options: &Options, tools: &NodeTools) -> Result<Self> {
        let location = Location { address: machine.network().address, network: Some(machine.network_namespace()?) };
        let options = Options { controller_manager: true, ..options.clone() };
        let control_plane = ControlPlane::start_in(&options, &location)?;
        let scheduler = start_scheduler(&control_plane, machine.folder(), tools)?;
        let kube_proxy = control_plane.pki().client("system:kube-proxy", "system:node-proxier")?;
        let mut this = Self { scheduler, control_plane, machine, kube_proxy };
        this.machine.configure(&this.control_plane, &this.kube_proxy)?;
        for archive in testing_images()? {
            this.load(archive)?;
        }
        this.wait_until_ready()?;
        // Who finds this knows that the node is ready.
        let kubeconfig = fs::read_to_string(this.control_plane.kubeconfig())?;
        write(&this.folder().join("kubeconfig"), &kubeconfig)?;
        Ok(this)
    }

    /// Starts a further node of this name in the cluster, with images from these archives, and waits until pods can run
    /// on it. It has to end before this one does.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn join(&self, name: &str, archives: &[PathBuf]) -> Result<Worker> {
        Worker::start(self, name, archives)
    }

    /// The control plane.
    pub fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }

    /// A folder that is removed with the node.
    pub fn folder(&self) -> &Path {
        self.machine.folder()
    }

    /// A command that runs on the node, as root there.
    ///
    /// # Errors
    /// Where the node is gone.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        self.machine.command(program)
    }

    /// Gives the node an image, from an archive.
    ///
    /// # Errors
    /// Where containerd does not take it.
    pub fn load(&self, archive: &Path) -> Result<()> {
        self.machine.load(archive)
    }

    /// Kills a program of the node with SIGKILL; it is started again after half a second.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn kill(&self, program: Program) -> Result<()> {
        self.machine.kill(program)
    }

    /// Kills everything that runs on the node and its API server at once, and starts the node again on the same folder,
    /// and the API server after it, as after a power cut. Disks are as they were, and what was in memory is gone,
    /// pinned kernel programs too.
    ///
    /// # Errors
    /// Where it does not come back.
    pub fn reboot(&mut self) -> Result<()> {
        let supervisor = &self.machine.supervisor;
        self.control_plane.restart_apiserver_of(0, || Ok(supervisor.reboot()?))?;
        let kubeconfig = self.control_plane.kubeconfig();
        let last = access::until(&kubeconfig, async |client| Ok(Some(heartbeat(client).await?)))?;
        let deadline = Instant::now() + READY_WITHIN;
        access::until(&kubeconfig, async |client| {
            if heartbeat(client).await? != last {
                return Ok(Some(()));
            }
            ensure!(Instant::now() < deadline, "kubelet does not come back\n{}", self.machine.logs());
            Ok(None)
        })?;
        self.wait_until_ready()
    }

    /// Waits until somebody ends the node from outside.
    ///
    /// # Errors
    /// Where that cannot be seen.
    pub fn wait_for_end(&mut self) -> Result<()> {
        Ok(self.machine.supervisor.wait_for_end()?)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let Self { scheduler, control_plane, machine, .. } = self;
        machine.wait_until_ready(control_plane, || scheduler.runs())
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

/// When kubelet last said that it lives.
async fn heartbeat(client: &Client) -> Result<Option<MicroTime>> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    let lease = leases.get_opt(NAME).await?;
    Ok(lease.and_then(|lease| lease.spec?.renew_time))
}
