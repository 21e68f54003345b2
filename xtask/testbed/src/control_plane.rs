//! One etcd and one kube-apiserver, and a kube-controller-manager where asked for.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context as _, Result, ensure};

use crate::pki::Pki;
use crate::supervise::{Folder, Supervised};
use crate::tools::Tools;
use crate::{access, etcd, handshakes};

/// How long the API server may take until it is ready. It takes 3 to 4 s on an idle machine.
const READY_WITHIN: Duration = Duration::from_mins(2);

/// How often a start is tried: between our choice of a port and its use, another process may take it.
const TRIES: u32 = 4;

/// Every request, with who made it and what came of it; no bodies.
const AUDIT_POLICY: &str =
    "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n";

/// The ports of etcd, for clients and for peers, and of the API server, where nobody else can have them.
const WELL_KNOWN_PORTS: [u16; 3] = [2379, 2380, 6443];

/// What an API server is told that has no nodes, and that only this machine may reach.
const OF_A_LONE_SERVER: [&str; 3] =
    ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none", "--authorization-mode=RBAC"];

/// What a control plane is to have beside the usual.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whether every request is logged to [`ControlPlane::audit_log`], and who did not believe the server. Default no.
    pub audit: bool,
    /// Feature gates of the API server, as `Name=true`. Default none.
    pub feature_gates: Vec<String>,
    /// What of its API is served or not, as `group/version/resource=false`. Default what it serves by itself.
    pub runtime_config: Vec<String>,
    /// Whether a kube-controller-manager runs. Default no.
    pub controller_manager: bool,
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
    /// None while it is stopped.
    apiserver: Option<Supervised>,
    etcd: Supervised,
    etcd_address: SocketAddr,
    /// How the API server was started.
    program: (PathBuf, Vec<String>),
    folder: Folder,
    pki: Pki,
    url: String,
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
        let pki = Pki::make(&path.join("pki"), location.address).context("make certificates")?;
        let [client, peer, secure] = match location.network {
            Some(_) => WELL_KNOWN_PORTS,
            None => free_ports()?,
        };
        let etcd = location.command(&tools.etcd, &etcd_arguments(path, client, peer));
        let etcd = Supervised::start(&etcd, &path.join("etcd.log")).context("start etcd")?;
        let arguments = apiserver(path, &pki, options, location, (client, secure))?;
        let mut this = Self {
            controller_manager: None,
            apiserver: None,
            etcd,
            etcd_address: (Ipv4Addr::LOCALHOST, client).into(),
            program: (tools.apiserver.clone(), arguments),
            url: format!("https://{}:{secure}", location.address),
            folder,
            pki,
            location: location.clone(),
        };
        this.start_apiserver()?;
        let kubeconfig = access::kubeconfig(&this.url, &this.pki.ca, &this.pki.admin);
        fs::write(this.kubeconfig(), kubeconfig).context("write the kubeconfig")?;
        this.wait_until_ready()?;
        if options.controller_manager {
            this.start_controller_manager(tools)?;
        }
        Ok(this)
    }

    /// The URL of the API server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A kubeconfig with which one is a member of `system:masters`.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
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

    /// The audit log, one JSON event a line, where [`Options::audit`] asked for it.
    pub fn audit_log(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }

    /// Who dialled the API server since it was started and did not believe it, each as often as that happened, where
    /// [`Options::audit`] asked for it: of these no request came.
    ///
    /// # Errors
    /// Where its log cannot be read.
    pub fn unbelieving(&self) -> io::Result<Vec<IpAddr>> {
        let log = fs::read(self.folder.path().join("kube-apiserver.log"))?;
        Ok(handshakes::unbelieving(&String::from_utf8_lossy(&log)))
    }

    /// Kills the API server and starts it anew, as it was, and waits until it is ready. What was watched ends.
    ///
    /// # Errors
    /// Where it does not become ready.
    pub fn restart_apiserver(&mut self) -> Result<()> {
        self.restart_apiserver_after(|| Ok(()))
    }

    /// The same, with something done while there is none.
    pub(crate) fn restart_apiserver_after(&mut self, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        self.apiserver = None;
        let address = self.url.strip_prefix("https://").unwrap_or_default();
        let deadline = Instant::now() + READY_WITHIN;
        // The one that was killed may hold it for a moment.
        while TcpStream::connect(address).is_ok() {
            ensure!(Instant::now() < deadline, "{address} is not free");
            thread::sleep(Duration::from_millis(20));
        }
        meanwhile()?;
        self.start_apiserver()?;
        self.wait_until_ready()
    }

    /// Makes etcd forget all versions but the last.
    ///
    /// # Errors
    /// Where etcd does not do it.
    pub fn compact(&self) -> Result<()> {
        etcd::compact(self.etcd_address).context("compact etcd")
    }

    fn start_apiserver(&mut self) -> Result<()> {
        let (program, arguments) = &self.program;
        let command = self.location.command(program, arguments);
        let log = self.folder.path().join("kube-apiserver.log");
        let started = Supervised::start(&command, &log).context("start kube-apiserver")?;
        self.apiserver = Some(started);
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        access::until(&self.kubeconfig(), async |client| {
            if access::is_ready(client).await {
                return Ok(Some(()));
            }
            let apiserver = self.apiserver.as_mut().is_some_and(Supervised::runs);
            for (name, runs) in [("etcd", self.etcd.runs()), ("kube-apiserver", apiserver)] {
                ensure!(runs, "{name} ended before it was ready:\n{}", self.folder.log(name));
            }
            ensure!(
                Instant::now() <= deadline,
                "kube-apiserver is not ready after {READY_WITHIN:?}:\n{}",
                self.folder.log("kube-apiserver")
            );
            Ok(None)
        })
    }

    fn start_controller_manager(&mut self, tools: &Tools) -> Result<()> {
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

fn apiserver(
    folder: &Path,
    pki: &Pki,
    options: &Options,
    location: &Location,
    (etcd, secure): (u16, u16),
) -> Result<Vec<String>> {
    let mut arguments = vec![
        format!("--etcd-servers=http://127.0.0.1:{etcd}"),
        format!("--secure-port={secure}"),
        format!("--cert-dir={}", folder.join("apiserver").display()),
        format!("--tls-cert-file={}", pki.server.certificate.display()),
        format!("--tls-private-key-file={}", pki.server.key.display()),
        format!("--client-ca-file={}", pki.ca.display()),
        format!("--service-account-key-file={}", pki.service_account_public_key.display()),
        format!("--service-account-signing-key-file={}", pki.service_account_key.display()),
        format!("--advertise-address={}", location.address),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--allow-privileged".to_owned(),
    ];
    arguments.extend(match location.network {
        Some(_) => of_a_cluster(pki),
        None => OF_A_LONE_SERVER.map(str::to_owned).to_vec(),
    });
    if !options.feature_gates.is_empty() {
        arguments.push(format!("--feature-gates={}", options.feature_gates.join(",")));
    }
    if !options.runtime_config.is_empty() {
        arguments.push(format!("--runtime-config={}", options.runtime_config.join(",")));
    }
    if options.audit {
        let policy = folder.join("audit-policy.yaml");
        fs::write(&policy, AUDIT_POLICY).context("write the audit policy")?;
        arguments.push(format!("--audit-policy-file={}", policy.display()));
        arguments.push(format!("--audit-log-path={}", folder.join("audit.log").display()));
        // In MB: it stays one file, in which everything is.
        arguments.push("--audit-log-maxsize=4000".to_owned());
        arguments.push(handshakes::LOGGED.to_owned());
    }
    Ok(arguments)
}

/// What an API server needs that has nodes.
fn of_a_cluster(pki: &Pki) -> Vec<String> {
    vec![
        "--bind-address=0.0.0.0".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        format!("--kubelet-client-certificate={}", pki.admin.certificate.display()),
        format!("--kubelet-client-key={}", pki.admin.key.display()),
        format!("--kubelet-certificate-authority={}", pki.ca.display()),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
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
