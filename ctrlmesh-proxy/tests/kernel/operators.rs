//! The bed of the node proxy's tests: an API server, the list of the node's pods, and operators in them.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use ctrlmesh_intercept::Status;
use http::StatusCode;
use serde_json::{Value, json};

use crate::bed::{Bed, Process, Server};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::harness::upstream::{Upstream, whole};

pub(crate) const POD: &str = "/api/v1/pods";

/// An API server on loopback of the node, whose address the pods' connections are redirected from.
pub(crate) struct Node {
    pub(crate) bed: Bed,
    pub(crate) pki: Pki,
    pub(crate) upstream: Upstream,
}

/// An operator's process.
pub(crate) struct Operator {
    process: Process,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Node {
    /// The API server answers with what it was asked.
    pub(crate) async fn new() -> Self {
        let (bed, pki) = (Bed::new(), Pki::new());
        let upstream =
            Upstream::http(pki.server(&["h2", "http/1.1"]), |seen| async move { whole(StatusCode::OK, seen.target) })
                .await;
        Self { bed, pki, upstream }
    }

    /// What the list says of a pod: its cgroup and network namespace are made, if need be.
    pub(crate) fn pod(&self, name: &str) -> Value {
        let network = self.bed.path(name);
        if !network.exists() {
            self.bed.namespace(name);
        }
        self.write_policy(name, &format!("team={name}"));
        json!({
            "pod": format!("ops/{name}"), "cgroup": self.bed.cgroup(name), "network": network,
            "policy": format!("{name}.policy"),
        })
    }

    pub(crate) fn write_policy(&self, name: &str, selector: &str) {
        let policy = json!({"limits": [{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": selector}]});
        self.write(&format!("{name}.policy"), &policy.to_string());
    }

    pub(crate) fn list(&self, pods: &[Value]) {
        self.write("pods", &json!({"pods": pods}).to_string());
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.pki.path("next"), text).unwrap();
        fs::rename(self.pki.path("next"), self.pki.path(name)).unwrap();
    }

    pub(crate) fn proxy(&self) -> Proxy {
        self.run(Command::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy")))
    }

    /// A proxy with no capability but these.
    pub(crate) fn proxy_with(&self, capabilities: &str) -> Proxy {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", capabilities, "--inh-caps", capabilities]);
        command.arg(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        self.run(command)
    }

    pub(crate) fn run(&self, mut command: Command) -> Proxy {
        command.arg("node");
        self.run_with(command)
    }

    /// A proxy that is told something already.
    pub(crate) fn run_with(&self, mut command: Command) -> Proxy {
        command
            .args(["--target", &self.upstream.address.to_string(), "--pods"])
            .arg(self.pki.path("pods"))
            .arg("--pin-dir")
            .arg(self.bed.pins());
        Proxy::run(&self.pki, command)
    }

    pub(crate) fn operator(&self, pod: &str) -> Operator {
        self.operator_at(pod, pod, self.upstream.address)
    }

    /// An operator in the cgroup of `pod` and the network namespace of another, that takes `address` for the API
    /// server.
    pub(crate) fn operator_at(&self, pod: &str, network: &str, address: SocketAddr) -> Operator {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernel/tls_peer.py");
        let mut command = self.bed.inside(&self.bed.cgroup(pod), network, "/usr/bin/python3");
        command
            .args([script, &address.ip().to_string(), &address.port().to_string()])
            .arg(self.pki.path("mesh.crt"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Operator { process: Process(child), stdin, stdout: BufReader::new(stdout) }
    }

    /// Who answers, without TLS, in a pod's own namespace: a connection that is not redirected ends there.
    pub(crate) fn stranger(&self, pod: &str) -> Server {
        self.bed.target_in(pod, &self.upstream.address.to_string())
    }

    fn status(&self) -> Status {
        Status::read(&self.bed.pins()).unwrap()
    }

    pub(crate) fn slot(&self, pod: &str) -> u16 {
        let cgroup = self.bed.cgroup(pod);
        let attachments = self.status().attachments;
        attachments.iter().find(|attached| attached.cgroup == cgroup).unwrap().slot.get()
    }

    pub(crate) fn attached(&self) -> Vec<PathBuf> {
        self.status().attachments.into_iter().map(|attached| attached.cgroup).collect()
    }
}

impl Operator {
    pub(crate) fn ask(&mut self, line: &str) -> Value {
        self.ask_unless_ended(line).unwrap()
    }

    /// `None` once the process has ended.
    pub(crate) fn ask_unless_ended(&mut self, line: &str) -> Option<Value> {
        writeln!(self.stdin, "{line}").ok()?;
        let mut answer = String::new();
        let read = self.stdout.read_line(&mut answer).unwrap();
        (read > 0).then(|| serde_json::from_str(&answer).unwrap())
    }

    /// Whether the process has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().unwrap().is_some()
    }

    pub(crate) fn anew_unless_ended(&mut self) -> Option<Value> {
        self.ask_unless_ended(&format!("+{POD}"))
    }

    /// What the API server was asked, on a new connection.
    pub(crate) fn anew(&mut self) -> Value {
        self.anew_unless_ended().unwrap()
    }
}

pub(crate) fn shows(team: &str) -> Value {
    json!({"status": 200, "body": format!("{POD}?labelSelector=team%3D{team}")})
}

pub(crate) fn refused() -> Value {
    json!({"error": "ECONNREFUSED"})
}

pub(crate) async fn served(proxy: &Proxy, count: f64) {
    until("the pods to be served", || async {
        (proxy.metric("ctrlmesh_proxy_pods_served").await - count).abs() < f64::EPSILON
    })
    .await;
}
