//! Programs of others, through the proxy to a real API server: kubectl, curl and h2spec.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use ctrlmesh_testbed::ControlPlane;
use serde_json::{Value, json};
use xtask::tools;

/// A namespace, and a proxy that shows of its `ConfigMap`s only those with `slot=0`.
struct Bed {
    // Dropped before the folder, in which it writes.
    proxy: Proxy,
    pki: Pki,
    namespace: String,
    token: String,
}

impl Bed {
    async fn new() -> Self {
        let plane = ControlPlane::shared();
        let namespace = plane.namespace("clients").await.unwrap();
        let audience = "https://kubernetes.default.svc";
        let token = plane.pod_token(&namespace, "operator-0", &[audience]).await.unwrap().token;
        let binding = json!({
            "metadata": {"name": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator-0", "namespace": namespace}],
        });
        let request = http::Request::post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings")
            .header("content-type", "application/json")
            .body(binding.to_string().into_bytes())
            .unwrap();
        plane.client().await.unwrap().request::<Value>(request).await.unwrap();
        let pki = Pki::new();
        fs::copy(plane.ca(), pki.path("real.crt")).unwrap();
        let policy = json!({"limits": [{
            "relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}],
            "selector": "slot=0",
        }]});
        fs::write(pki.path("policy"), policy.to_string()).unwrap();
        let upstream = plane.url().strip_prefix("https://").unwrap().parse().unwrap();
        let policy = pki.path("policy").to_str().unwrap().to_owned();
        let proxy = Proxy::start(&pki, upstream, &["--policy", &policy]);
        write_kubeconfig(&pki, &format!("https://{}", proxy.address), &namespace, &token);
        Self { proxy, pki, namespace, token }
    }

    fn kubectl(&self, arguments: &[&str]) -> Command {
        kubectl(&self.pki, arguments)
    }

    /// What kubectl prints, once it has succeeded.
    fn printed(&self, arguments: &[&str]) -> String {
        succeeded(self.kubectl(arguments).output().unwrap())
    }

    fn apply(&self, manifest: &Value) -> String {
        succeeded(with_input(self.kubectl(&["apply", "-f", "-"]), manifest))
    }

    fn config_map(&self, name: &str, slot: usize, value: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": self.namespace, "labels": {"slot": slot.to_string()}},
            "data": {"key": value},
        })
    }
}

/// Has [`kubectl`] ask this server.
pub(crate) fn write_kubeconfig(pki: &Pki, server: &str, namespace: &str, token: &str) {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "operator", "namespace": namespace}}],
        "clusters": [{"name": "proxy", "cluster": {
            "server": server, "certificate-authority": pki.path("mesh.crt"),
        }}],
        "users": [{"name": "operator", "user": {"token": token}}],
    });
    fs::write(pki.path("kubeconfig"), config.to_string()).unwrap();
}

pub(crate) fn kubectl(pki: &Pki, arguments: &[&str]) -> Command {
    let mut command = Command::new(built(tools::control_plane("kubectl")));
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", pki.dir.path())
        .env("KUBECONFIG", pki.path("kubeconfig"))
        .args(arguments)
        .stdin(Stdio::null());
    command
}

/// `kubectl get -w`, until it is dropped.
struct Watching {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Watching {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.lines.read_line(&mut line).unwrap() > 0, "the watch ended");
        line.trim_end().to_owned()
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A program that `cargo xtask setup` built.
fn built(program: PathBuf) -> PathBuf {
    assert!(program.is_file(), "{} is not there: run `cargo xtask setup`", program.display());
    program
}

fn with_input(mut command: Command, input: &Value) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

pub(crate) fn succeeded(output: Output) -> String {
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_works_and_sees_its_share_only() {
    let bed = Bed::new().await;
    assert_eq!(bed.apply(&bed.config_map("mine", 0, "a")), "configmap/mine created\n");
    assert_eq!(bed.apply(&bed.config_map("other", 1, "a")), "configmap/other created\n");
    assert_eq!(bed.printed(&["get", "configmaps", "-o", "name"]), "configmap/mine\n");
    let table = bed.printed(&["get", "configmaps"]);
    assert!(table.contains("mine") && !table.contains("other"), "{table}");

    let diff = with_input(bed.kubectl(&["diff", "-f", "-"]), &bed.config_map("mine", 0, "b"));
    let shown = String::from_utf8_lossy(&diff.stdout).into_owned();
    assert_eq!(diff.status.code(), Some(1), "{}", String::from_utf8_lossy(&diff.stderr));
    assert!(shown.contains("-  key: a") && shown.contains("+  key: b"), "{shown}");
    assert_eq!(bed.apply(&bed.config_map("mine", 0, "b")), "configmap/mine configured\n");

    let explained = bed.printed(&["explain", "configmap.data"]);
    assert!(explained.contains("FIELD: data <map[string]string>"), "{explained}");
    let version: Value = serde_json::from_str(&bed.printed(&["get", "--raw", "/version"])).unwrap();
    assert_eq!(version["gitVersion"], tools::KUBERNETES);
    let raw = format!("/api/v1/namespaces/{}/configmaps", bed.namespace);
    let list: Value = serde_json::from_str(&bed.printed(&["get", "--raw", &raw])).unwrap();
    assert_eq!(list["items"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(
        bed.printed(&["delete", "configmap", "mine"]).lines().next().unwrap_or_default(),
        format!("configmap \"mine\" deleted from {} namespace", bed.namespace)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_watches_its_share_only() {
    let bed = Bed::new().await;
    bed.apply(&bed.config_map("first", 0, "a"));
    let mut watching = Watching::start(bed.kubectl(&["get", "configmaps", "--watch", "-o", "name"]));
    assert_eq!(watching.line(), "configmap/first");
    for (name, slot) in [("other", 1), ("second", 0)] {
        bed.apply(&bed.config_map(name, slot, "a"));
    }
    assert_eq!(watching.line(), "configmap/second");
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_works_over_both_protocols() {
    let bed = Bed::new().await;
    for (name, slot) in [("mine", 0), ("other", 1)] {
        bed.apply(&bed.config_map(name, slot, "a"));
    }
    for (protocol, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--fail", protocol, "--write-out", "\n%{http_version}"])
            .arg("--cacert")
            .arg(bed.pki.path("mesh.crt"))
            .args(["--header", &format!("Authorization: Bearer {}", bed.token)])
            .arg(format!("https://{}/api/v1/namespaces/{}/configmaps?limit=5", bed.proxy.address, bed.namespace))
            .output()
            .unwrap();
        let printed = succeeded(output);
        let (list, spoken) = printed.rsplit_once('\n').unwrap();
        assert_eq!(spoken, version);
        let list: Value = serde_json::from_str(list).unwrap();
        let names: Vec<&str> =
            list["items"].as_array().unwrap().iter().filter_map(|item| item["metadata"]["name"].as_str()).collect();
        assert_eq!(names, ["mine"]);
    }
}

/// Runs h2spec against a proxy; gives its report.
fn h2spec(bed: &Bed) -> String {
    let output = Command::new(built(tools::h2spec()))
        .args(["--host", "127.0.0.1", "--port", &bed.proxy.address.port().to_string()])
        .args(["--tls", "--insecure", "--path", "/version", "--timeout", "10"])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The proxy may send a PING of its own at any time, for example when the API server ends its connection. h2spec takes
/// that for the answer that it waits for. So a case fails here if it fails in each of three runs.
#[tokio::test(flavor = "multi_thread")]
async fn h2spec_finds_no_fault() {
    let bed = Bed::new().await;
    let mut failed: Option<BTreeSet<String>> = None;
    for _ in 0..3 {
        let report = h2spec(&bed);
        let total = report.lines().find_map(|line| line.split_once(" tests, ")).unwrap();
        assert!(total.0.trim().parse::<usize>().unwrap() > 100, "{report}");
        let cases = report.lines().filter_map(|line| line.split_once('×'));
        let cases: BTreeSet<String> = cases.map(|(_, case)| case.trim().to_owned()).collect();
        let again = failed.map_or(cases.clone(), |failed| &failed & &cases);
        if again.is_empty() {
            return;
        }
        failed = Some(again);
    }
    panic!("these cases failed three times: {failed:#?}");
}
