//! One etcd and one kube-apiserver, and a kube-controller-manager where asked for.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context as _, Result, bail, ensure};

use crate::access;
use crate::pki::Pki;
use crate::supervise::{Folder, Supervised};
use crate::tools::Tools;

/// How long the API server may take until it is ready. It takes 3 to 4 s on an idle machine.
const READY_WITHIN: Duration = Duration::from_mins(2);

/// How often a start is tried: between our choice of a port and its use, another process may take it.
const TRIES: u32 = 4;

/// How many bytes of a program's log an error shows.
const LOG_TAIL_BYTES: usize = 3000;

/// Every request, with who made it and what came of it; no bodies.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n";

/// What a control plane is to have beside the usual.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whether every request is logged to [`ControlPlane::audit_log`]. Default no.
    pub audit: bool,
    /// Feature gates of the API server, as `Name=true`. Default none.
    pub feature_gates: Vec<String>,
    /// Whether a kube-controller-manager runs. Default no.
    pub controller_manager: bool,
}

/// A running control plane. It ends when it is dropped, and at the latest with this process.
#[derive(Debug)]
pub struct ControlPlane {
    // Dropped in this order: the folder last.
    controller_manager: Option<Supervised>,
    apiserver: Supervised,
    etcd: Supervised,
    folder: Folder,
    pki: Pki,
    url: String,
}

// === impl ControlPlane ===

impl ControlPlane {
    /// The control plane that all tests of a binary share; it is started by the first that asks.
    ///
    /// # Panics
    /// Where it does not start: no test of the binary can go on then.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<ControlPlane> = LazyLock::new(|| {
            ControlPlane::start(&Options::default()).unwrap_or_else(|error| panic!("{error:?}"))
        });
        &SHARED
    }

    /// Starts a control plane and waits until it is ready.
    ///
    /// # Errors
    /// Where a program is not there, or does not become ready; the error shows the end of its log.
    pub fn start(options: &Options) -> Result<Self> {
        let tools = Tools::find()?;
        let mut tries = 1;
        loop {
            match Self::start_once(&tools, options) {
                Err(error)
                    if tries < TRIES && format!("{error:?}").contains("address already in use") =>
                {
                    tries += 1;
                }
                result => return result,
            }
        }
    }

    fn start_once(tools: &Tools, options: &Options) -> Result<Self> {
        let folder = Folder::make().context("make a temporary folder")?;
        let path = folder.path();
        let pki = Pki::make(&path.join("pki")).context("make certificates")?;
        let [client, peer, secure] = free_ports()?;
        let etcd = Supervised::start(&etcd(tools, path, client, peer), &path.join("etcd.log"))
            .context("start etcd")?;
        let command = apiserver(tools, path, &pki, options, (client, secure))?;
        let apiserver = Supervised::start(&command, &path.join("kube-apiserver.log"))
            .context("start kube-apiserver")?;
        let url = format!("https://127.0.0.1:{secure}");
        let mut this = Self { controller_manager: None, apiserver, etcd, folder, pki, url };
        fs::write(this.kubeconfig(), access::kubeconfig(&this.url, &this.pki))
            .context("write the kubeconfig")?;
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

    /// A folder that is removed with the control plane.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The audit log, one JSON event a line, where [`Options::audit`] asked for it.
    pub fn audit_log(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let kubeconfig = self.kubeconfig();
        while !answer(access::is_ready(&kubeconfig)) {
            for (name, program) in
                [("etcd", &mut self.etcd), ("kube-apiserver", &mut self.apiserver)]
            {
                ensure!(
                    program.runs(),
                    "{name} ended before it was ready:\n{}",
                    tail(self.folder.path(), name)
                );
            }
            if Instant::now() > deadline {
                bail!(
                    "kube-apiserver is not ready after {READY_WITHIN:?}:\n{}",
                    tail(self.folder.path(), "kube-apiserver")
                );
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn start_controller_manager(&mut self, tools: &Tools) -> Result<()> {
        let [secure] = free_ports()?;
        let mut command = Command::new(&tools.controller_manager);
        command
            .arg(format!("--kubeconfig={}", self.kubeconfig().display()))
            .arg(format!("--secure-port={secure}"))
            .arg(format!("--cert-dir={}", self.folder.path().join("controller-manager").display()))
            .arg(format!(
                "--service-account-private-key-file={}",
                self.pki.service_account_key.display()
            ))
            .arg(format!("--root-ca-file={}", self.pki.ca.display()))
            .args([
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                "--use-service-account-credentials",
            ]);
        let log = self.folder.path().join("kube-controller-manager.log");
        self.controller_manager =
            Some(Supervised::start(&command, &log).context("start kube-controller-manager")?);
        self.wait_for_controllers()
    }

    fn wait_for_controllers(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let kubeconfig = self.kubeconfig();
        while !answer(access::has_controllers(&kubeconfig)) {
            let runs = self.controller_manager.as_mut().is_some_and(Supervised::runs);
            let log = || tail(self.folder.path(), "kube-controller-manager");
            ensure!(runs, "kube-controller-manager ended before it worked:\n{}", log());
            ensure!(
                Instant::now() < deadline,
                "kube-controller-manager does not work after {READY_WITHIN:?}:\n{}",
                log()
            );
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

fn etcd(tools: &Tools, folder: &Path, client: u16, peer: u16) -> Command {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let mut command = Command::new(&tools.etcd);
    command
        .arg(format!("--data-dir={}", folder.join("etcd").display()))
        .arg(format!("--listen-client-urls={client}"))
        .arg(format!("--advertise-client-urls={client}"))
        .arg(format!("--listen-peer-urls={peer}"))
        .arg(format!("--initial-advertise-peer-urls={peer}"))
        .arg(format!("--initial-cluster=default={peer}"))
        .args(["--unsafe-no-fsync", "--log-level=warn"]);
    command
}

fn apiserver(
    tools: &Tools,
    folder: &Path,
    pki: &Pki,
    options: &Options,
    (etcd, secure): (u16, u16),
) -> Result<Command> {
    let mut command = Command::new(&tools.apiserver);
    command
        .arg(format!("--etcd-servers=http://127.0.0.1:{etcd}"))
        .arg(format!("--secure-port={secure}"))
        .arg(format!("--cert-dir={}", folder.join("apiserver").display()))
        .arg(format!("--tls-cert-file={}", pki.server.certificate.display()))
        .arg(format!("--tls-private-key-file={}", pki.server.key.display()))
        .arg(format!("--client-ca-file={}", pki.ca.display()))
        .arg(format!("--service-account-key-file={}", pki.service_account_public_key.display()))
        .arg(format!("--service-account-signing-key-file={}", pki.service_account_key.display()))
        .args([
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--authorization-mode=RBAC",
            "--allow-privileged",
        ]);
    if !options.feature_gates.is_empty() {
        command.arg(format!("--feature-gates={}", options.feature_gates.join(",")));
    }
    if options.audit {
        let policy = folder.join("audit-policy.yaml");
        fs::write(&policy, AUDIT_POLICY).context("write the audit policy")?;
        command
            .arg(format!("--audit-policy-file={}", policy.display()))
            .arg(format!("--audit-log-path={}", folder.join("audit.log").display()));
    }
    Ok(command)
}

/// Waits for `question` on a thread of its own: the caller may itself run inside an async runtime, where no other may
/// start.
fn answer(question: impl Future<Output = bool> + Send) -> bool {
    let ask = || -> io::Result<bool> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(question))
    };
    thread::scope(|scope| matches!(scope.spawn(ask).join(), Ok(Ok(true))))
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

/// The end of a program's log.
fn tail(folder: &Path, name: &str) -> String {
    let log = fs::read(folder.join(format!("{name}.log"))).unwrap_or_default();
    String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_TAIL_BYTES)..]).into_owned()
}
