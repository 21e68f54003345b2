//! `ctrlmesh run` before a scripted API server, and commands for it.

use std::ffi::OsStr;
use std::fs;
use std::future::Future;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;

use http::{Response, StatusCode};
use nix::sys::signal;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use rustls::ServerConfig;
use serde_json::{Value, json};
use tokio::task;

use super::pki::Pki;
use super::soon;
use super::upstream::{Body, ReceivedRequest, Upstream, whole};

/// What most runs are limited to.
pub(crate) const LIMIT: [&str; 4] = ["--limit", "pods", "--selector", "slot in (0,1)"];

/// An API server, a kubeconfig that names it, and a folder for runs.
pub(crate) struct Bed {
    pub(crate) pki: Pki,
    pub(crate) upstream: Upstream,
}

impl Bed {
    pub(crate) async fn new() -> Self {
        let pki = Pki::new();
        let server = pki.server(&["h2", "http/1.1"]);
        Self::with(pki, server).await
    }

    /// An API server that answers with the target that it was asked for.
    pub(crate) async fn with(pki: Pki, server: Arc<ServerConfig>) -> Self {
        let upstream = Upstream::http(server, |seen| async move { whole(StatusCode::OK, seen.target) }).await;
        Self::before(pki, upstream)
    }

    /// An API server that answers as `answer` says: with JSON, or with a text.
    pub(crate) async fn answering(
        answer: impl Fn(&ReceivedRequest) -> (StatusCode, Value) + Clone + Send + Sync + 'static,
    ) -> Self {
        let pki = Pki::new();
        let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), move |seen| {
            let (status, body) = answer(&seen);
            let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
            async move { whole(status, body) }
        });
        Self::before(pki, upstream.await)
    }

    /// An API server that answers each request by `answer`, which may send the body bit by bit.
    pub(crate) async fn speaking<A, F>(answer: A) -> Self
    where
        A: Fn(ReceivedRequest) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        let pki = Pki::new();
        let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), answer).await;
        Self::before(pki, upstream)
    }

    fn before(pki: Pki, upstream: Upstream) -> Self {
        let bed = Self { pki, upstream };
        bed.kubeconfig(json!({"certificate-authority": "real.crt"}), json!({"token": "secret"}));
        bed
    }

    /// What the program says, with the kubeconfig in the environment.
    pub(crate) async fn ctrlmesh(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
        command.args(arguments).env("KUBECONFIG", self.file()).env_remove("RUST_BACKTRACE");
        output(command).await
    }

    /// Writes the kubeconfig, with these fields beside the server.
    pub(crate) fn kubeconfig(&self, mut cluster: Value, user: Value) {
        let server = json!(format!("https://{}", self.upstream.address));
        cluster.as_object_mut().unwrap().entry("server").or_insert(server);
        let config = json!({
            "current-context": "dev",
            "contexts": [
                {"name": "dev", "context": {"cluster": "c", "user": "u", "namespace": "ops"}},
                {"name": "nobody", "context": {"cluster": "c"}},
            ],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
        });
        fs::write(self.file(), config.to_string()).unwrap();
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.pki.path("kubeconfig")
    }

    pub(crate) fn runs(&self) -> PathBuf {
        self.pki.path("runs")
    }

    /// `run` with the kubeconfig in the environment, by a generated one unless a flag says otherwise.
    pub(crate) fn run<S: AsRef<OsStr>>(&self, flags: &[&str], command: &[S]) -> Command {
        let mut run = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
        run.arg("run").arg("--run-dir").arg(self.runs());
        if !flags.contains(&"--interception") {
            run.args(["--interception", "kubeconfig"]);
        }
        run.args(flags).arg("--").args(command);
        run.env("KUBECONFIG", self.file()).env_remove("RUST_LOG");
        // The system's own python, if there is one: version managers put slow scripts in front.
        run.env("PATH", format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default()));
        run
    }

    /// The same with the client for a command.
    pub(crate) fn client(&self, flags: &[&str], arguments: &[&str]) -> Command {
        let client = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run_command/client.py");
        self.run(flags, &[&["python3", client], arguments].concat())
    }

    pub(crate) fn nothing_is_left(&self) {
        let left: Vec<_> = fs::read_dir(self.runs()).into_iter().flatten().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

pub(crate) async fn output(mut command: Command) -> Output {
    soon("the run to end", task::spawn_blocking(move || command.output().unwrap())).await.unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

/// A run whose command says something when it is ready.
pub(crate) struct Running(pub(crate) Child, BufReader<ChildStdout>);

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self(child, lines)
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub(crate) fn say(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    pub(crate) fn send(&self, signal: Signal) {
        signal::kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    /// Ends it at once.
    pub(crate) fn kill(&self) {
        self.send(Signal::SIGKILL);
    }

    /// Exit code, and what else it said.
    pub(crate) async fn ended(mut self) -> (Option<i32>, String, String) {
        let wait = task::spawn_blocking(move || {
            let (mut out, mut error) = (String::new(), String::new());
            self.1.read_to_string(&mut out).unwrap();
            self.0.stderr.take().unwrap().read_to_string(&mut error).unwrap();
            (self.0.wait().unwrap().code(), out, error)
        });
        soon("the run to end", wait).await.unwrap()
    }
}

/// The same with every signal as it usually is: whoever runs tests in the background ignores some.
pub(crate) fn unignored(run: Command) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(run.get_program()).args(run.get_args());
    for (name, value) in run.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        command.env(name, value);
    }
    command
}
