//! Starts the manager as a process of its own, which ends when the test drops it.
//!
//! A shell starts it, and kills it when the pipe that only this process holds is closed, however this process ends.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_testbed::{ControlPlane, retry};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// `$@` is the command.
const RUN: &str = r#""$@" & read -r _; kill -KILL $!; wait"#;

/// A command that runs `program`, and ends it when this process ends.
fn supervised(program: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", RUN, "sh"]).arg(program);
    command
}

/// A running program, mostly a manager.
pub(crate) struct Manager {
    child: Mutex<Child>,
    log: Arc<Mutex<String>>,
}

impl Manager {
    /// Starts one, with these further arguments.
    pub(crate) fn start(plane: &ControlPlane, namespace: &str, more: &[&str]) -> Result<Self> {
        let mut command = supervised(Path::new(env!("CARGO_BIN_EXE_e2e-manager")));
        command
            .args(["run", "--log-format", "json", "--namespace", namespace])
            .args(["--serving-name", "127.0.0.1", "--kubeconfig"])
            .arg(plane.kubeconfig())
            .args(more);
        for listen in ["grpc", "webhook", "probes", "metrics"] {
            let listen = format!("--listen-{listen}=");
            if !more.iter().any(|argument| argument.starts_with(&listen)) {
                command.arg(listen + "127.0.0.1:0");
            }
        }
        Self::spawn(command)
    }

    /// Starts another program.
    pub(crate) fn start_program(program: &Path, arguments: &[String]) -> Result<Self> {
        let mut command = supervised(program);
        command.args(arguments);
        Self::spawn(command)
    }

    /// Starts what [`supervised`] began.
    fn spawn(mut command: Command) -> Result<Self> {
        command.env("RUST_LOG", "info").stdin(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().context("start a program")?;
        let mut lines = BufReader::new(child.stderr.take().context("no stderr")?);
        let log = Arc::<Mutex<String>>::default();
        let written = Arc::clone(&log);
        thread::spawn(move || {
            let mut line = String::new();
            while matches!(lines.read_line(&mut line), Ok(1..)) {
                lock(&written).push_str(&line);
                line.clear();
            }
        });
        Ok(Self { child: Mutex::new(child), log })
    }

    /// What it has said.
    pub(crate) fn log(&self) -> String {
        lock(&self.log).clone()
    }

    /// Kills it; what it had is free then.
    pub(crate) fn kill(&self) -> Result<()> {
        let mut child = lock(&self.child);
        drop(child.stdin.take());
        let ended = child.wait();
        drop(child);
        Ok(ended.map(drop)?)
    }

    /// How much memory it has, in kB.
    pub(crate) fn resident_kilobytes(&self) -> Result<u64> {
        self.memory("VmRSS:")
    }

    /// How much memory it ever had at most, in kB.
    pub(crate) fn most_kilobytes(&self) -> Result<u64> {
        self.memory("VmHWM:")
    }

    fn memory(&self, name: &str) -> Result<u64> {
        let shell = lock(&self.child).id();
        let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"))?;
        let manager = children.split_whitespace().next().context("no child")?;
        let status = fs::read_to_string(format!("/proc/{manager}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let line = line.with_context(|| format!("no {name}"))?;
        Ok(line.trim().trim_end_matches("kB").trim().parse()?)
    }

    /// What it counts under names that begin so, in all.
    pub(crate) async fn counted(&self, begin: &str) -> Result<u64> {
        let mut stream = TcpStream::connect(self.address("metrics").await?).await?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: m\r\nconnection: close\r\n\r\n").await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        let lines = page.lines().filter(|line| line.starts_with(begin));
        Ok(lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum())
    }

    /// Where it listens for `purpose`, once it does.
    pub(crate) async fn address(&self, purpose: &str) -> Result<SocketAddr> {
        let line = self.said("purpose", purpose).await?;
        Ok(line["address"].as_str().context("no address")?.parse()?)
    }

    /// The first line of its log with this field, once there is one.
    pub(crate) async fn said(&self, field: &str, value: &str) -> Result<Value> {
        retry(|| async {
            let log = self.log();
            let ended = lock(&self.child).try_wait()?;
            ensure!(ended.is_none(), "it ended:\n{log}");
            let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let line = lines.find(|line| line[field] == value);
            line.with_context(|| format!("not yet:\n{log}"))
        })
        .await
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let mut child = lock(&self.child);
        drop(child.stdin.take());
        drop(child.wait());
    }
}
