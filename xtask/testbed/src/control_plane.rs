//! One etcd and one or more kube-apiservers, and a kube-controller-manager where asked for.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context as _, Result, ensure};

use crate::api_server::{ApiServer, Place, numbered};
use crate::pki::Pki;
use crate::supervise::{Folder, Supervised};
use crate::tools::Tools;
use crate::{access, etcd, handshakes};

/// How long the API server may take until it is ready. It takes 3 to 4 s on an idle machine.
const READY_WITHIN: Duration = Duration::from_mins(2);

/// How often a start is tried: between our choice of a port and its use, another process may take it.
const TRIES: u32 = 4;

/// The ports of etcd, for clients and for peers, and of the API server, where nobody else can have them.
const WELL_KNOWN_PORTS: [u16; 3] = [2379, 2380, 6443];

/// What a control plane is to have beside the usual.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whether every request is logged to [`ControlPlane::audit_log`], and who did not believe the server. Default no.
    pub audit: bool,
    /// Resources, as `plural.group`, of which the log has what each write made, too. Default none: no bodies.
    pub audit_bodies: Vec<String>,
    /// Addresses of this machine, not of loopback: an API server at each, behind one etcd, all of which the Service
    /// `default/kubernetes` names. Default: one on loopback, that nothing names. A [`crate::Network`] has such
    /// addresses.
    pub addresses: Vec<Ipv4Addr>,
    /// Feature gates of the API server, as `Name=true`. Default none.
    pub feature_gates: Vec<String>,
    /// What of its API is served or not, as `group/version/resource=false`. Default what it serves by itself.
    pub runtime_config: Vec<String>,
    /// Whether a kube-controller-manager runs. Default no.
    pub controller_manager: bool,
    /// Further arguments of the kube-controller-manager. Default none.
    pub controller_manager_arguments: Vec<String>,
    /// The API server, in another release than [`Tools`] finds.
    pub api_server: Option<PathBuf>,
}

/// Where a control plane runs.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    /// The address that the API server is reached at.
    pub(crate) address: Ipv4Addr,
    /// The network namespace, as a file; that of this process where there is none.
    pub(crate) network: Option<PathBuf>,
}

/// A running control plane. It ends when it is dropped, and at the latest with this process.
#[derive(Debug)]
pub struct ControlPlane {
    // Dropped in this order: the folder last.
    controller_manager: Option<Supervised>,
    /// At least one.
    servers: Vec<ApiServer>,
    etcd: Supervised,
    etcd_address: SocketAddr,
    folder: Folder,
    pki: Pki,
    location: Location,
}

impl Location {
    /// A command that runs here.
    pub(crate) fn command(&self, program: &Path, arguments: &[String]) -> Command {
        let mut command = match &self.network {
            Some(network) => {
                let mut enter = Command::new("nsenter");
                enter.arg(format!("--net={}", network.display())).arg("--").arg(program);
                enter
            }
            None => Command::new(program),
        };
        command.args(arguments);
        command
    }
}

impl ControlPlane {
    /// The control plane that all tests of a binary share; it is started by the first that asks.
    ///
    /// # Panics
    /// Where it does not start: no test of the binary can go on then.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<ControlPlane> =
            LazyLock::new(|| ControlPlane::start(&Options::default()).unwrap_or_else(|error| panic!("{error:?}")));
        &SHARED
    }

    /// Starts a control plane and waits until it is ready.
    ///
    /// # Errors
    /// Where a program is not there, or does not become ready; the error shows the end of its log.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_in(options, &Location { address: Ipv4Addr::LOCALHOST, network: None })
    }

    /// As [`Self::start`], at a location of its own; what runs in a network namespace there is a whole cluster.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub(crate) fn start_in(options: &Options, location: &Location) -> Result<Self> {
        let tools = Tools::find()?;
        let mut tries = 1;
        loop {
            match Self::start_once(&tools, options, location) {
                Err(error) if tries < TRIES && format!("{error:?}").contains("address already in use") => {
                    tries += 1;
                }
                result => return result,
            }
        }
    }

    fn start_once(tools: &Tools, options: &Options, location: &Location) -> Result<Self> {
        let folder = Folder::make().context("make a temporary folder")?;
        let path = folder.path();
        let addresses = match &options.addresses[..] {
            [] => vec![location.address],
            given => given.to_vec(),
        };
        let pki = Pki::make(&path.join("pki"), &addresses).context("make certificates")?;
        let [client, peer, secure] = match location.network {
            Some(_) => WELL_KNOWN_PORTS,
            None => free_ports()?,
        };
        let etcd = location.command(&tools.etcd, &etcd_arguments(path, client, peer));
        let etcd = Supervised::start(&etcd, &path.join("etcd.log")).context("start etcd")?;
        let etcd_address = SocketAddr::from((Ipv4Addr::LOCALHOST, client));
        let of = |(number, address): (usize, &Ipv4Addr)| {
            // All have one: the Service has one port for all.
            let port = if options.addresses.is_empty() { secure } else { WELL_KNOWN_PORTS[2] };
            let at = Place { number, address: *address, port, etcd: etcd_address };
            ApiServer::new(options.api_server.as_ref().unwrap_or(&tools.apiserver), path, &pki, options, location, at)
        };
        let servers = addresses.iter().enumerate().map(of).collect::<Result<_>>()?;
        let location = location.clone();
        let mut this = Self { controller_manager: None, servers, etcd, etcd_address, folder, pki, location };
        for number in 0..this.servers.len() {
            let kubeconfig = access::kubeconfig(this.servers[number].url(), &this.pki.ca, &this.pki.admin);
            fs::write(this.kubeconfig_of(number), kubeconfig).context("write the kubeconfig")?;
            this.start_apiserver_of(number)?;
        }
        for number in 0..this.servers.len() {
            this.wait_until_ready(number)?;
        }
        if options.controller_manager {
            this.start_controller_manager(tools, &options.controller_manager_arguments)?;
        }
        Ok(this)
    }

    /// The URL of the first API server.
    pub fn url(&self) -> &str {
        self.servers[0].url()
    }

    /// The URLs of all API servers, in the order of [`Options::addresses`].
    pub fn urls(&self) -> impl Iterator<Item = &str> {
        self.servers.iter().map(ApiServer::url)
    }

    /// A kubeconfig with which one is a member of `system:masters`, at the first API server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig_of(0)
    }

    /// The same, at the API server of this number, from 0.
    pub fn kubeconfig_of(&self, number: usize) -> PathBuf {
        self.folder.path().join(numbered("kubeconfig", number, ""))
    }

    /// The certificate, in PEM, that the API server's is signed with.
    pub fn ca(&self) -> &Path {
        &self.pki.ca
    }

    /// Where it runs.
    pub(crate) fn location(&self) -> &Location {
        &self.location
    }

    /// Its certificates.
    pub(crate) fn pki(&self) -> &Pki {
        &self.pki
    }

    /// A folder that is removed with the control plane.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The audit log of the first API server, one JSON event a line, where [`Options::audit`] asked for it.
    pub fn audit_log(&self) -> PathBuf {
        self.servers[0].audit_log().to_owned()
    }

    /// The audit logs of all API servers, where [`Options::audit`] asked for them.
    pub fn audit_logs(&self) -> impl Iterator<Item = &Path> {
        self.servers.iter().map(ApiServer::audit_log)
    }

    /// Who dialled the first API server since it was started and did not believe it, each as often as that happened,
    /// where [`Options::audit`] asked for it: of these no request came.
    ///
    /// # Errors
    /// Where its log cannot be read.
    pub fn unbelieving(&self) -> io::Result<Vec<IpAddr>> {
        let log = fs::read(self.servers[0].log())?;
        Ok(handshakes::unbelieving(&String::from_utf8_lossy(&log)))
    }

    /// Kills the first API server and starts it anew, as it was, and waits until it is ready. What was watched ends.
    ///
    /// # Errors
    /// Where it does not become ready.
    pub fn restart_apiserver(&mut self) -> Result<()> {
        self.restart_apiserver_of(0, || Ok(()))
    }

    /// The same of the API server of this number, from 0, with something done while there is none.
    ///
    /// # Errors
    /// As [`Self::restart_apiserver`], and those of `meanwhile`.
    pub fn restart_apiserver_of(&mut self, number: usize, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        self.stop_apiserver_of(number)?;
        meanwhile()?;
        self.start_apiserver_of(number)?;
        self.wait_until_ready(number)
    }

    /// Kills the API server of this number, from 0, and waits until its address is free.
    ///
    /// # Errors
    /// Where something holds its address.
    pub fn stop_apiserver_of(&mut self, number: usize) -> Result<()> {
        self.servers[number].kill();
        let address = self.servers[number].url().trim_start_matches("https://").to_owned();
        let deadline = Instant::now() + READY_WITHIN;
        // The one that was killed may hold it for a moment.
        while TcpStream::connect(&address).is_ok() {
            ensure!(Instant::now() < deadline, "{address} is not free");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Starts the API server of this number, from 0, that was stopped; it is not ready then.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn start_apiserver_of(&mut self, number: usize) -> Result<()> {
        self.servers[number].start(&self.location).context("start kube-apiserver")
    }

    /// Makes etcd forget all versions but the last.
    ///
    /// # Errors
    /// Where etcd does not do it.
    pub fn compact(&self) -> Result<()> {
        etcd::compact(self.etcd_address).context("compact etcd")
    }

    fn wait_until_ready(&mut self, number: usize) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let server = numbered("kube-apiserver", number, "");
        access::until(&self.kubeconfig_of(number), async |client| {
            if access::is_ready(client).await {
                return Ok(Some(()));
            }
            for (name, runs) in [("etcd", self.etcd.runs()), (&*server, self.servers[number].runs())] {
                ensure!(runs, "{name} ended before it was ready:\n{}", self.folder.log(name));
            }
            ensure!(
                Instant::now() <= deadline,
                "{server} is not ready after {READY_WITHIN:?}:\n{}",
                self.folder.log(&server)
            );
            Ok(None)
        })
    }

    fn start_controller_manager(&mut self, tools: &Tools, more: &[String]) -> Result<()> {
        let [secure] = free_ports()?;
        let key = self.pki.service_account_key.display();
        let mut arguments = vec![
            format!("--kubeconfig={}", self.kubeconfig().display()),
            format!("--secure-port={secure}"),
            format!("--cert-dir={}", self.folder.path().join("controller-manager").display()),
            format!("--service-account-private-key-file={key}"),
            format!("--root-ca-file={}", self.pki.ca.display()),
        ];
        arguments.extend(
            ["--bind-address=127.0.0.1", "--leader-elect=false", "--use-service-account-credentials"]
                .map(str::to_owned),
        );
        arguments.extend_from_slice(more);
        let command = self.location.command(&tools.controller_manager, &arguments);
        let log = self.folder.path().join("kube-controller-manager.log");
        self.controller_manager = Some(Supervised::start(&command, &log).context("start kube-controller-manager")?);
        self.wait_for_controllers()
    }

    fn wait_for_controllers(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        access::until(&self.kubeconfig(), async |client| {
            if access::has_controllers(client).await {
                return Ok(Some(()));
            }
            let runs = self.controller_manager.as_mut().is_some_and(Supervised::runs);
            let log = || self.folder.log("kube-controller-manager");
            ensure!(runs, "kube-controller-manager ended before it worked:\n{}", log());
            ensure!(
                Instant::now() < deadline,
                "kube-controller-manager does not work after {READY_WITHIN:?}:\n{}",
                log()
            );
            Ok(None)
        })
    }
}

fn etcd_arguments(folder: &Path, client: u16, peer: u16) -> Vec<String> {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        "--unsafe-no-fsync".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

/// Ports of loopback that nobody uses right now.
fn free_ports<const N: usize>() -> io::Result<[u16; N]> {
    let listeners: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<io::Result<_>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}
