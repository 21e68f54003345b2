//! Clients that are not ours, as processes of a pod: net/http and gRPC of Go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::json;

use super::bed::{Egress, SERVERS};
use crate::bed::Process;
use crate::harness::until;

/// The other address of the machine with the servers.
const SERVERS_V6: &str = "fd00:244::1";

/// How many connections a pod has at once: fewer than the limit, which is 1,024.
const MANY: u32 = 1_000;

/// Outcomes by client, or how often each was seen.
type Seen = BTreeMap<String, String>;

/// The Go program. Go builds it again only where its source has changed.
fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../xtask/control-plane");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel-egress");
        let mut go = Command::new("go");
        go.args(["build", "-o"]).arg(&program).arg("./egress").current_dir(module);
        assert!(go.status().expect("Go is needed").success());
        program
    })
}

/// A pod with a Whitelist of one host, for the ports of the servers.
async fn bed() -> Egress {
    let egress = Egress::new().await;
    let ports = [8080, 8443, 9090, 9443];
    let rule = json!({"breaker": "ops/out", "rule": "hosts", "ports": ports, "list": "allow",
        "urls": [{"parts": {"host": "localhost"}}], "methods": ["*"]});
    let policy = json!({"epoch": 2, "egress": {"ports": ports, "access": [rule]}});
    egress.node.write("a.policy", &policy.to_string());
    egress.redirected("*:9443").await;
    until("the policy", || async { egress.metric(r#"policy_epoch{pod="ops/a"}"#).await > 1.5 }).await;
    egress
}

/// Starts the servers in a cgroup and a network namespace.
fn serve(egress: &Egress, cgroup: &str, network: &str, address: &str) -> Process {
    let bed = &egress.node.bed;
    let mut command = bed.inside(&bed.cgroup(cgroup), network, program().to_str().unwrap());
    let [certificate, key] = ["leaf.crt", "leaf.key"].map(|file| egress.node.pki.path(file));
    command.args(["serve", "-address", address, "-certificate"]).arg(certificate).arg("-key").arg(key);
    let mut process = Process(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(process.line(), "listening");
    process
}

/// Runs clients in the pod.
async fn clients(egress: &Egress, address: &str, arguments: &[&str]) -> Seen {
    let ca = egress.node.pki.path("real.crt").display().to_string();
    let common = ["-address", address, "-ca", &ca];
    let output = egress.run(program().to_str().unwrap(), &[&arguments[..1], &common, &arguments[1..]].concat()).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn expected() -> Seen {
    let mut expected = Seen::new();
    let mut add = |client: &str, allowed: &str, refused: &str| {
        expected.insert(format!("{client} to localhost"), allowed.to_owned());
        expected.insert(format!("{client} to other.test"), refused.to_owned());
    };
    for (client, protocol) in [("HTTP/1.1", "HTTP/1.1"), ("h2c", "HTTP/2.0")] {
        let allowed = format!("200 {protocol} {protocol}, connections: 1");
        add(client, &allowed, &format!("403 {protocol} ops/out/hosts, connections: 1"));
    }
    for version in ["TLS 1.2", "TLS 1.3"] {
        for (client, protocol) in [("HTTP/1.1", "HTTP/1.1"), ("h2", "HTTP/2.0")] {
            let allowed = format!("200 {protocol} {version} {protocol}, connections: 1");
            add(&format!("{version}, {client}"), &allowed, "EOF");
        }
    }
    for call in ["unary", "stream"] {
        add(&format!("gRPC, {call}"), "OK", "PermissionDenied");
        add(&format!("gRPC, TLS, {call}"), "OK", "Unavailable: EOF in the handshake");
    }
    expected
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_go_pass_or_are_refused() {
    let egress = bed().await;
    let _servers = [
        serve(&egress, "servers", "servers", SERVERS),
        serve(&egress, "servers", "servers", SERVERS_V6),
        serve(&egress, "a", "", "127.0.0.1"),
    ];
    for address in [SERVERS, SERVERS_V6, "127.0.0.1"] {
        assert_eq!(clients(&egress, address, &["ask"]).await, expected(), "{address}");
    }
    assert_eq!(egress.metric("egress_failed_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_has_a_thousand_connections_at_once() {
    let egress = bed().await;
    let _servers = serve(&egress, "servers", "servers", SERVERS);
    let seen = clients(&egress, SERVERS, &["together", "-count", &MANY.to_string()]).await;
    assert_eq!(seen, Seen::from([("200 OK".to_owned(), MANY.to_string())]));
    for protocol in ["http1", "tls"] {
        let connections = format!(r#"egress_connections_total{{protocol="{protocol}"}}"#);
        assert_eq!(egress.metric(&connections).await, f64::from(MANY / 2), "{protocol}");
    }
}
