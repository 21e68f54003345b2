//! A further node of a cluster: kubelet, kube-proxy and containerd, whose wire leads to the first node.
//!
//! Its packets to the API server, to the other pods and to this machine all go through the first node's network
//! namespace. There they can be lost.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::Node;
use super::machine::{Machine, write};
use super::supervisor::NodeSpec;
use crate::control_plane::Location;
use crate::tools::NodeTools;

/// What the addresses of a worker's wire begin with, and those of its pods. They mean nothing outside the first node.
const WIRES: &str = "10.215";
const PODS: &str = "10.216";

/// A running node that joined another's cluster. It ends when this is dropped, and at the latest with this process.
#[derive(Debug)]
pub struct Worker {
    machine: Machine,
    /// The first node's network namespace.
    first: Location,
    /// The end of its wire there.
    device: String,
}

impl Worker {
    /// Starts a node of this name with images from these archives, and waits until pods can run on it.
    ///
    /// # Errors
    /// Where something cannot be started, or does not become ready; the error shows the ends of the logs.
    pub(super) fn start(first: &Node, name: &str, archives: &[PathBuf]) -> Result<Self> {
        let tools = NodeTools::find()?;
        let network = first.machine.network_namespace()?;
        let spec = NodeSpec { name, wires: WIRES, pods: PODS, network: &network };
        let machine = Machine::start(spec, &tools).context("start a worker")?;
        let device = fs::read_to_string(machine.folder().join("device")).context("the worker's wire")?;
        let device = device.split(' ').next().unwrap_or_default().to_owned();
        let this = Self { machine, first: first.control_plane.location().clone(), device };
        this.join(first, archives).with_context(|| this.machine.logs())?;
        Ok(this)
    }

    fn join(&self, first: &Node, archives: &[PathBuf]) -> Result<()> {
        let network = self.machine.network();
        let mut route = self.in_first("ip");
        route.args(["route", "add", &network.pods, "via", &network.address.to_string(), "dev", &self.device]);
        let output = route.output().context("start ip")?;
        ensure!(output.status.success(), "ip route: {}", String::from_utf8_lossy(&output.stderr));
        // Before kubelet is there: some pods come to a new node at once.
        for archive in super::testing_images()?.iter().chain(archives) {
            self.machine.load(archive)?;
        }
        self.machine.configure(&first.control_plane, &first.kube_proxy)?;
        self.machine.wait_until_ready(&first.control_plane, || true)?;
        let kubeconfig = fs::read_to_string(first.control_plane.kubeconfig())?;
        write(&self.folder().join("kubeconfig"), &kubeconfig)
    }

    /// What the cluster calls it.
    pub fn name(&self) -> &str {
        self.machine.name()
    }

    /// A folder that is removed with the node.
    pub fn folder(&self) -> &Path {
        self.machine.folder()
    }

    /// Has every packet from it and to it be lost, those of its pods too. Nobody is told.
    ///
    /// # Errors
    /// Where nftables does not take that, as where it is cut already.
    pub fn cut(&self) -> Result<()> {
        let (table, device) = (self.table(), &self.device);
        self.nft(&format!(
            "create table ip {table}\n\
             table ip {table} {{\n\
             chain arriving {{ type filter hook prerouting priority -300; iifname \"{device}\" drop; }}\n\
             chain leaving {{ type filter hook postrouting priority 300; oifname \"{device}\" drop; }}\n\
             }}\n"
        ))
    }

    /// Ends [`Self::cut`].
    ///
    /// # Errors
    /// Where nftables does not take that, as where it is not cut.
    pub fn mend(&self) -> Result<()> {
        self.nft(&format!("delete table ip {}\n", self.table()))
    }

    /// The table that loses its packets.
    fn table(&self) -> String {
        format!("cut_{}", self.device)
    }

    fn nft(&self, rules: &str) -> Result<()> {
        let mut nft = self.in_first("nft");
        nft.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = nft.spawn().context("start nft")?;
        child.stdin.take().context("no input")?.write_all(rules.as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "nft {rules}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// A command in the first node's network.
    fn in_first(&self, program: &str) -> Command {
        self.first.command(Path::new(program), &[])
    }
}
