//! The proxy as users run it: its own process.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use nix::sys::signal;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use tokio::task;

use super::pki::Pki;
use super::{PROGRAM, soon};

/// Counts the proxies, to give each a state folder of its own.
static STARTED: AtomicUsize = AtomicUsize::new(0);

/// Runs until dropped.
pub(crate) struct Proxy {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    log: Arc<Mutex<String>>,
}

impl Proxy {
    /// `ctrlmesh-proxy sidecar` before `upstream`, with more arguments. No process served its pod before, unless they
    /// name a state folder.
    pub(crate) fn start(pki: &Pki, upstream: SocketAddr, more: &[&str]) -> Self {
        let mut command = sidecar(upstream, more);
        if !more.contains(&"--state-dir") {
            let number = STARTED.fetch_add(1, Ordering::Relaxed);
            command.arg("--state-dir").arg(pki.path(&format!("state-{number}")));
        }
        Self::run(pki, command)
    }

    /// Does the same without a state folder.
    pub(crate) fn forgetful(pki: &Pki, upstream: SocketAddr, more: &[&str]) -> Self {
        Self::run(pki, sidecar(upstream, more))
    }

    /// The same, presenting a certificate of its own.
    pub(crate) fn with_files(pki: &Pki, upstream: SocketAddr, certificate: &Path, key: &Path) -> Self {
        let mut command = Command::new(PROGRAM);
        command
            .args(["sidecar", "--listen", "127.0.0.1:0"])
            .args(["--upstream", &format!("https://{upstream}")])
            .arg("--tls-cert")
            .arg(certificate)
            .arg("--tls-key")
            .arg(key);
        Self::spawn(pki, command)
    }

    /// A mode of the proxy, with the arguments that all modes have.
    pub(crate) fn run(pki: &Pki, mut command: Command) -> Self {
        let ca = format!("{},{}", pki.path("mesh.crt").display(), pki.path("mesh.key").display());
        command.arg("--mesh-ca").arg(ca);
        Self::spawn(pki, command)
    }

    /// A proxy that has not begun to serve, and perhaps never will.
    pub(crate) fn waiting(pki: &Pki, command: Command) -> Self {
        Self::until(pki, command, |line| line["purpose"] == "admin")
    }

    fn spawn(pki: &Pki, command: Command) -> Self {
        Self::until(pki, command, |line| line["message"] == "begun")
    }

    /// Starts it, and reads its log up to a line.
    fn until(pki: &Pki, mut command: Command, wanted: impl Fn(&Value) -> bool) -> Self {
        let mut child = command
            .args(["--admin-listen", "127.0.0.1:0", "--log-format", "json", "--threads", "2"])
            .arg("--upstream-ca")
            .arg(pki.path("real.crt"))
            .env("RUST_LOG", "info,ctrlmesh_proxy=debug")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let (mut operators, mut admin, mut log) = (None, None, String::new());
        let mut begun = false;
        while !begun {
            let at = log.len();
            assert!(lines.read_line(&mut log).unwrap() > 0, "the proxy ended:\n{log}");
            let Ok(line) = serde_json::from_str::<Value>(&log[at..]) else {
                continue;
            };
            begun = wanted(&line);
            let address = || line["address"].as_str().and_then(|address| address.parse().ok());
            match line["purpose"].as_str() {
                Some("operators") => operators = address(),
                Some("admin") => admin = address(),
                _ => {}
            }
        }
        let log = Arc::new(Mutex::new(log));
        let rest = log.clone();
        thread::spawn(move || {
            let mut line = [0; 4096];
            while let Ok(read @ 1..) = lines.read(&mut line) {
                rest.lock().unwrap().push_str(&String::from_utf8_lossy(&line[..read]));
            }
        });
        // A node's proxy listens in its pods, not here.
        let address = operators.unwrap_or_else(|| SocketAddr::from(([0; 4], 0)));
        Self { child, address, admin: admin.unwrap(), log }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn terminate(&self) {
        signal::kill(self.pid(), Signal::SIGTERM).unwrap();
    }

    /// How the process ended.
    pub(crate) async fn ended(mut self) -> ExitStatus {
        soon("the proxy to end", task::spawn_blocking(move || self.child.wait().unwrap())).await.unwrap()
    }

    /// The metrics page.
    pub(crate) async fn page(&self) -> String {
        super::client::plain_get(self.admin, "/metrics").await.1
    }

    /// The value of one line of the metrics page.
    pub(crate) async fn metric(&self, line: &str) -> f64 {
        let page = self.page().await;
        let value = page.lines().find_map(|seen| seen.strip_prefix(line)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no `{line}` in\n{page}")).parse().unwrap()
    }

    /// How much memory the process holds.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.memory_bytes("VmRSS:")
    }

    /// How much memory the process has held at most.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.memory_bytes("VmHWM:")
    }

    fn memory_bytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }
}

fn sidecar(upstream: SocketAddr, more: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(["sidecar", "--listen", "127.0.0.1:0"])
        .args(["--upstream", &format!("https://{upstream}")])
        .args(more);
    command
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}
