//! Starts the programs as processes of their own.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ctrlmesh_testbed::ControlPlane;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::{task, time};

use crate::bed::{eventually, soon};
use crate::harness;
use crate::token::TestPod;

/// A program that runs until this is dropped.
pub(crate) struct Program {
    child: Child,
    log: Arc<Mutex<String>>,
}

/// A proxy inside a pod.
pub(crate) struct Sidecar {
    program: Program,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
}

/// What a proxy needs to start: the API server, the manager, and the folder of its files.
#[derive(Clone, Debug)]
pub(crate) struct ProxySettings {
    pub(crate) url: String,
    pub(crate) ca: PathBuf,
    pub(crate) manager: SocketAddr,
    pub(crate) folder: PathBuf,
}

/// A replica of the manager.
pub(crate) struct Replica {
    program: Program,
    pub(crate) grpc: SocketAddr,
    pub(crate) webhooks: SocketAddr,
    pub(crate) probes: SocketAddr,
    pub(crate) metrics: SocketAddr,
}

impl Program {
    fn start(command: &mut Command) -> Self {
        let mut child = command.env("RUST_LOG", "info").stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let log = Arc::<Mutex<String>>::default();
        let written = log.clone();
        thread::spawn(move || {
            let mut line = String::new();
            while matches!(lines.read_line(&mut line), Ok(1..)) {
                written.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        Self { child, log }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until it says so.
    pub(crate) async fn until_logged(&mut self, text: &str) {
        while !self.log().contains(text) {
            assert!(self.child.try_wait().unwrap().is_none(), "it ended:\n{}", self.log());
            time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until it ended, and looks for what it said last.
    pub(crate) async fn until_ended(&mut self, text: &str) {
        while self.child.try_wait().unwrap().is_none() || !self.log().contains(text) {
            time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Where it listens for `purpose`.
    async fn address(&mut self, purpose: &str) -> SocketAddr {
        self.until_logged(&format!("\"purpose\":\"{purpose}\"")).await;
        let log = self.log();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut lines = lines.filter(|line| line["purpose"] == purpose);
        lines.next().unwrap()["address"].as_str().unwrap().parse().unwrap()
    }

    pub(crate) fn send(&self, signal: Signal) {
        signal::kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// How it ended.
    pub(crate) async fn ended(mut self) -> ExitStatus {
        let mut child = std::mem::replace(&mut self.child, Command::new("true").spawn().unwrap());
        soon("it to end", task::spawn_blocking(move || child.wait().unwrap())).await.unwrap()
    }

    /// A sidecar that begins, as soon as it serves.
    pub(crate) async fn ready(mut self) -> Sidecar {
        let address = self.address("operators").await;
        let admin = self.address("admin").await;
        Sidecar { program: self, address, admin }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

impl ProxySettings {
    fn token(&self, pod: &TestPod) -> PathBuf {
        self.folder.join(format!("token-{}", pod.name))
    }

    /// Where a proxy keeps what it was told.
    pub(crate) fn state(&self, pod: &TestPod) -> PathBuf {
        self.folder.join(format!("state-{}", pod.name))
    }
}

impl Sidecar {
    /// Starts one, with a token, and waits until it serves.
    pub(crate) async fn start(settings: &ProxySettings, pod: &TestPod, token: &str) -> Self {
        fs::write(settings.token(pod), token).unwrap();
        Self::start_again(settings, pod).await
    }

    /// The same again.
    pub(crate) async fn start_again(settings: &ProxySettings, pod: &TestPod) -> Self {
        soon("a proxy to serve", Self::begin(settings, pod).ready()).await
    }

    /// Starts one that may not serve yet.
    pub(crate) fn begin(settings: &ProxySettings, pod: &TestPod) -> Program {
        Program::start(&mut Self::command(settings, pod))
    }

    /// The same with a token, and with these flags, as the environment names them.
    pub(crate) fn begin_with(settings: &ProxySettings, pod: &TestPod, token: &str, flags: &[(&str, &str)]) -> Program {
        fs::write(settings.token(pod), token).unwrap();
        let mut command = Self::command(settings, pod);
        for (name, value) in flags {
            command.env(format!("CTRLMESH_PROXY_{name}"), value);
        }
        Program::start(&mut command)
    }

    fn command(settings: &ProxySettings, pod: &TestPod) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_e2e-proxy"));
        command.arg("sidecar");
        for (name, value) in [
            ("LISTEN", "127.0.0.1:0".to_owned()),
            ("ADMIN_LISTEN", "127.0.0.1:0".to_owned()),
            ("LOG_FORMAT", "json".to_owned()),
            ("THREADS", "1".to_owned()),
            ("UPSTREAM", settings.url.clone()),
            ("UPSTREAM_CA", settings.ca.display().to_string()),
            ("POD", format!("{}/{}", pod.namespace, pod.name)),
            ("MANAGER", settings.manager.to_string()),
            ("MANAGER_CA", settings.folder.join("manager.crt").display().to_string()),
            ("TOKEN", settings.token(pod).display().to_string()),
            ("STATE_DIR", settings.state(pod).display().to_string()),
        ] {
            command.env(format!("CTRLMESH_PROXY_{name}"), value);
        }
        command
    }

    pub(crate) fn kill(&mut self) {
        self.program.kill();
    }

    pub(crate) fn send(&self, signal: Signal) {
        self.program.send(signal);
    }

    pub(crate) async fn metric(&self, line: &str) -> f64 {
        self.find_metric(line).await.unwrap_or_else(|| panic!("no `{line}`"))
    }

    pub(crate) async fn find_metric(&self, line: &str) -> Option<f64> {
        metric(self.admin, line).await
    }
}

impl Replica {
    /// Starts one in `namespace`, and waits until it listens.
    pub(crate) async fn start(plane: &ControlPlane, namespace: &str, more: &[&str]) -> Self {
        harness::install(&plane.client().await.unwrap()).await.unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_e2e-manager"));
        command.args(["run", "--log-format", "json", "--namespace", namespace]).args(["--serving-name", "127.0.0.1"]);
        if !more.contains(&"--kubeconfig") {
            command.arg("--kubeconfig").arg(plane.kubeconfig());
        }
        for listen in ["grpc", "webhook", "probes", "metrics"] {
            if !more.contains(&format!("--listen-{listen}").as_str()) {
                command.args([&format!("--listen-{listen}"), "127.0.0.1:0"]);
            }
        }
        let mut program = Program::start(command.args(more));
        let grpc = soon("gRPC", program.address("proxies")).await;
        let webhooks = soon("webhooks", program.address("webhooks")).await;
        let probes = soon("probes", program.address("probes")).await;
        let metrics = soon("metrics", program.address("metrics")).await;
        Self { program, grpc, webhooks, probes, metrics }
    }

    /// What it counts under that name.
    pub(crate) async fn metric(&self, line: &str) -> Option<f64> {
        metric(self.metrics, line).await
    }

    /// Whether it writes.
    pub(crate) async fn leads(&self) -> bool {
        metric(self.metrics, "ctrlmesh_manager_leader").await.is_some_and(|value| value > 0.0)
    }

    pub(crate) async fn until_ready(&self) {
        eventually("it to be ready", async || {
            get(self.probes, "/readyz").await.filter(|page| page.starts_with("HTTP/1.1 200"))
        })
        .await;
    }

    pub(crate) fn program(&mut self) -> &mut Program {
        &mut self.program
    }

    /// Asks it to stop; how it ended.
    pub(crate) async fn terminated(self) -> ExitStatus {
        self.program.send(Signal::SIGTERM);
        self.program.ended().await
    }
}

async fn metric(address: SocketAddr, line: &str) -> Option<f64> {
    let page = get(address, "/metrics").await?;
    page.lines().find_map(|seen| seen.strip_prefix(line)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Head and body of a page.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}
