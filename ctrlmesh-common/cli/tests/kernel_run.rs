//! Tier "kernel": `ctrlmesh run` as root, its command in a cgroup of its own.
//!
//! Needs root, cgroup2, python3 as a client, and setpriv to be somebody else.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::disallowed_methods, clippy::large_futures, reason = "tests are not drained")]

mod harness;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use ctrlmesh_intercept::cgroup::Hierarchy;
use harness::run::{Bed, LIMIT, Running, output, stderr, stdout, unignored};
use harness::until;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::json;

const CLIENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run_command/client.py");

/// Somebody who is not root.
const NOBODY: &str = "65534";

/// Pins of this test only.
struct Pins(PathBuf);

impl Pins {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert!(nix::unistd::geteuid().is_root(), "the kernel tier needs root");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(format!("/sys/fs/bpf/ctrlmesh-test-run-{}-{number}", std::process::id()).into())
    }

    /// `run` with eBPF, of what a shell is told; `$CLIENT` is the client.
    fn run(&self, bed: &Bed, flags: &[&str], script: &str) -> Command {
        let pins = self.0.to_str().unwrap();
        let flags = [&["--interception", "ebpf", "--pin-dir", pins], flags].concat();
        let mut run = bed.run(&flags, &["sh", "-c", script]);
        run.env("CLIENT", format!("python3 {CLIENT}"));
        run
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

/// The folder of the cgroup that a command printed from `/proc/self/cgroup`.
fn cgroup(line: &str) -> PathBuf {
    let path = line.strip_prefix("0::/").unwrap();
    assert!(path.contains("ctrlmesh-run-"), "{path}");
    Hierarchy::find().unwrap().mount().join(path)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_and_its_children_are_redirected() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let script = "grep ^0:: /proc/self/cgroup
        grep -o '\"server\":\"[^\"]*' $KUBECONFIG
        $CLIENT /api/v1/pods & sh -c '$CLIENT /api/v1/pods?child=1; true' & wait";
    let output = output(pins.run(&bed, &LIMIT, script)).await;
    let text = stdout(&output);
    let mut lines = text.lines();
    let cgroup = cgroup(lines.next().unwrap());
    let server = format!("\"server\":\"https://{}", bed.upstream.address);
    assert_eq!(lines.next(), Some(server.as_str()), "the address is the API server's own");
    let answers: Vec<&str> = lines.collect();
    assert_eq!(answers.len(), 2, "{text} {}", stderr(&output));
    let injected = |line: &&str| line.starts_with("200 ") && line.contains("labelSelector=slot");
    assert!(answers.iter().all(injected), "{text} {}", stderr(&output));
    // One is `run`'s own, and none came past it.
    assert_eq!(bed.upstream.connections(), 3);
    assert_eq!(stderr(&output), "ctrlmesh: 2 requests, 2 injected, 0 refused");
    assert!(!cgroup.exists() && !pins.0.exists());
    bed.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_at_no_address_in_particular_is_redirected_too() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    // As k3d writes it.
    let server = format!("https://0.0.0.0:{}", bed.upstream.address.port());
    bed.kubeconfig(
        json!({"certificate-authority": "real.crt", "server": server, "tls-server-name": "127.0.0.1"}),
        json!({"token": "secret"}),
    );
    let output = output(pins.run(&bed, &LIMIT, "$CLIENT /api/v1/pods")).await;
    let (out, error) = (stdout(&output), stderr(&output));
    assert!(out.starts_with("200 ") && out.contains("labelSelector=slot"), "{out} {error}");
    assert_eq!(error, "ctrlmesh: 1 requests, 1 injected, 0 refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_is_redirected() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let mut run = Running::start(pins.run(&bed, &LIMIT, "echo ready; read line"));
    assert_eq!(run.line(), "ready");
    let before = bed.upstream.connections();
    drop(std::net::TcpStream::connect(bed.upstream.address).unwrap());
    until("the connection to come", || async { bed.upstream.connections() > before }).await;
    run.say();
    let (_, _, text) = run.ended().await;
    assert!(text.contains("the command never connected"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_kubeconfig_is_replaced_for_the_command_only() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let original = fs::read(bed.file()).unwrap();
    let script = format!("unset KUBECONFIG; $CLIENT --kubeconfig={} /api/v1/pods", bed.file().display());
    let output = output(pins.run(&bed, &LIMIT, &script)).await;
    assert!(stdout(&output).contains("labelSelector"), "{} {}", stdout(&output), stderr(&output));
    assert_eq!(fs::read(bed.file()).unwrap(), original);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_the_real_authority_refuses_the_proxy() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let real = bed.pki.path("real.crt");
    let script = format!(
        "python3 -c \"import socket, ssl; context = ssl.create_default_context(cafile='{}')
context.wrap_socket(socket.create_connection(('127.0.0.1', {})), server_hostname='127.0.0.1')\" 2>&1 | tail -1",
        real.display(),
        bed.upstream.address.port()
    );
    let output = output(pins.run(&bed, &LIMIT, &script)).await;
    assert!(stdout(&output).contains("certificate verify failed"), "{}", stdout(&output));
    assert!(stderr(&output).contains("1 connections failed in TLS"), "{}", stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_command_leaves_running_ends_with_it() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    for (script, ignoring) in [("", false), ("trap '' TERM;", true)] {
        let script = format!(
            "grep ^0:: /proc/self/cgroup; {script} setsid sh -c 'sleep 60; true' > /dev/null & echo $!; exit 4"
        );
        let output = output(pins.run(&bed, &[], &script)).await;
        let text = stdout(&output);
        let (folder, left) = text.split_once('\n').map(|(line, pid)| (cgroup(line), pid)).unwrap();
        assert_eq!(output.status.code(), Some(4), "ignoring: {ignoring}");
        assert!(stderr(&output).contains("processes, which end with it"), "{}", stderr(&output));
        // Perhaps nobody has buried it yet.
        let state = fs::read_to_string(Path::new("/proc").join(left).join("stat"));
        assert!(state.is_err() || state.is_ok_and(|state| state.contains(") Z ")));
        assert!(!folder.exists() && !pins.0.exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_leaves_nothing_and_the_next_run_sweeps_a_sigkill() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let script = "echo $$; grep ^0:: /proc/self/cgroup; sleep 60 & exec sleep 60";
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut run = Running::start(pins.run(&bed, &[], script));
        let command = Pid::from_raw(run.line().parse().unwrap());
        let cgroup = cgroup(&run.line());
        run.send(signal);
        if signal == Signal::SIGTERM {
            assert_eq!(run.ended().await.0, Some(143));
            assert!(!cgroup.exists() && !pins.0.exists());
            continue;
        }
        run.0.wait().unwrap();
        until("the command to end, too", || async { signal::kill(command, None).is_err() }).await;
        assert!(cgroup.exists() && pins.0.exists(), "nobody was there to remove them");
        assert!(output(pins.run(&bed, &[], "true")).await.status.success());
        assert!(!cgroup.exists() && !pins.0.exists());
    }
    bed.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_beside_each_other_have_each_their_own() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let run = |selector: &str| {
        let flags = ["--limit", "pods", "--selector", selector];
        Running::start(pins.run(&bed, &flags, "echo ready; read line; $CLIENT /api/v1/pods"))
    };
    let mut runs = [run("a"), run("b"), run("c")];
    for run in &mut runs {
        assert_eq!(run.line(), "ready");
    }
    for (mut run, selector) in runs.into_iter().zip(["a", "b", "c"]) {
        run.say();
        let (code, out, text) = run.ended().await;
        assert_eq!(out.trim(), format!("200 /api/v1/pods?labelSelector={selector}"), "{text}");
        assert_eq!(code, Some(0));
    }
    assert!(!pins.0.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn root_gets_ebpf_unasked_and_a_port_that_is_taken_is_named() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let mut run = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    run.arg("run").arg("--run-dir").arg(bed.runs()).arg("--pin-dir").arg(&pins.0);
    run.args(["--explain", "--", "true"]).env("KUBECONFIG", bed.file()).env_remove("RUST_LOG");
    let text = stderr(&output(run).await);
    assert!(text.contains("by eBPF"), "{text}");
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = output(pins.run(&bed, &["--port", &port], "true")).await;
    assert!(stderr(&output).contains("leave --port out"), "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(125));
    assert!(!pins.0.exists());
    bed.nothing_is_left();
}

/// What a program in a cluster does: token, CA and namespace from files, the address from the environment.
const IN_CLUSTER: &str = "
import os, ssl, http.client
folder = '/var/run/secrets/kubernetes.io/serviceaccount/'
read = lambda name: open(folder + name).read()
context = ssl.create_default_context(cafile=folder + 'ca.crt')
host, port = os.environ['KUBERNETES_SERVICE_HOST'], os.environ['KUBERNETES_SERVICE_PORT']
connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=20)
target = '/api/v1/namespaces/' + read('namespace') + '/pods'
connection.request('GET', target, headers={'authorization': 'Bearer ' + read('token')})
print(connection.getresponse().read().decode())
";

#[tokio::test(flavor = "multi_thread")]
async fn a_command_finds_a_service_account_with_or_without_root() {
    let bed = Bed::new().await;
    let there = Path::new("/var/run/secrets").exists();
    let flags = [&["--interception", "env"], &LIMIT[..]].concat();
    let run = bed.run(&flags, &["python3", "-c", IN_CLUSTER]);
    let others = somebody_else(&bed, &run);
    for run in [run, others] {
        let output = output(run).await;
        let expected = "/api/v1/namespaces/ops/pods?labelSelector=slot";
        assert!(stdout(&output).starts_with(expected), "{} {}", stdout(&output), stderr(&output));
        assert_eq!(bed.upstream.last().headers["authorization"], "Bearer secret");
    }
    assert_eq!(Path::new("/var/run/secrets").exists(), there, "nobody else sees it");
    bed.kubeconfig(json!({"certificate-authority": "real.crt"}), json!({"exec": {"command": "x"}}));
    let output = output(bed.run(&flags, &["true"])).await;
    assert!(stderr(&output).contains("this one has an exec plugin"), "{}", stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_root_ebpf_is_refused_and_a_kubeconfig_is_used() {
    let bed = Bed::new().await;
    let output_ = output(somebody_else(&bed, &bed.run(&["--interception", "ebpf"], &["true"]))).await;
    assert!(stderr(&output_).contains("needs root: use sudo, or --interception kubeconfig"));
    assert_eq!(output_.status.code(), Some(125));
    let mut run = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    run.arg("run").arg("--run-dir").arg(bed.runs()).args(LIMIT).args(["--", "sh", "-c"]);
    run.args(["id -u; exec python3 $0 /api/v1/pods", CLIENT]).env("KUBECONFIG", bed.file());
    let output_ = output(somebody_else(&bed, &run)).await;
    let text = stdout(&output_);
    assert!(text.starts_with(NOBODY) && text.contains("labelSelector"), "{text} {}", stderr(&output_));
}

/// The same run by somebody who is not root, of copies of everything that may be behind closed doors.
fn somebody_else(bed: &Bed, run: &Command) -> Command {
    let folder = bed.pki.path("");
    // Not by us: a process that another test starts meanwhile would have it open for writing.
    let copied = Command::new("cp").arg(run.get_program()).arg(folder.join("proxy")).status();
    assert!(copied.unwrap().success());
    let _there = fs::copy(CLIENT, folder.join("client.py")).unwrap();
    for file in ["proxy", "client.py", "kubeconfig", "real.crt"] {
        fs::set_permissions(folder.join(file), fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let mut other = Command::new("setpriv");
    other.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]).arg(folder.join("proxy"));
    let runs = folder.join("others");
    for argument in run.get_args() {
        match argument {
            path if path == bed.runs() => other.arg(&runs),
            path if path == CLIENT => other.arg(folder.join("client.py")),
            argument => other.arg(argument),
        };
    }
    other.current_dir(&folder).env("KUBECONFIG", bed.file()).env_remove("RUST_LOG");
    other.env("PATH", "/usr/bin:/bin");
    other
}

/// What comes after it runs where the only resolver, 192.0.2.9, never answers: what is sent there ends in a wire.
const SILENT: &str = r#"
    ip link set lo up
    ip link add here type veth peer name nowhere
    ip link set here up && ip link set nowhere up
    ip addr add 192.0.2.1/24 dev here
    ip neigh add 192.0.2.9 lladdr 02:00:00:00:00:01 dev here
    mount --bind "$0" /etc/resolv.conf
    exec "$@"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_does_not_wait_for_a_resolver() {
    let (bed, pins) = (Bed::new().await, Pins::new());
    let server = json!({"server": "https://api.example.com:6443", "certificate-authority": "real.crt"});
    bed.kubeconfig(server, json!({"token": "secret"}));
    let resolver = bed.pki.path("resolv.conf");
    fs::write(&resolver, "nameserver 192.0.2.9\noptions timeout:30 attempts:5\n").unwrap();
    let pins = pins.0.to_str().unwrap();
    for flags in [["--interception", "ebpf", "--pin-dir", pins], ["--interception", "kubeconfig", "--pin-dir", pins]] {
        let run = unignored(bed.run(&flags, &["true"]));
        let mut within = Command::new("unshare");
        within.args(["--mount", "--net", "sh", "-c", SILENT]).arg(&resolver);
        within.arg(run.get_program()).args(run.get_args());
        within.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
        // However long its own deadline is: it is the signal that ends it.
        let running = Running::start({
            within.env("CTRLMESH_PROXY_CONNECT_TIMEOUT", "300s");
            within
        });
        let sockets = format!("/proc/{}/net/udp", running.0.id());
        until("the question", async || {
            // 192.0.2.9:53, as the kernel writes it.
            fs::read_to_string(&sockets).is_ok_and(|sockets| sockets.contains(" 090200C0:0035 "))
        })
        .await;
        running.send(Signal::SIGINT);
        let (code, _, error) = running.ended().await;
        assert_eq!(code, Some(130), "{flags:?}: {error}");
        bed.nothing_is_left();
    }
}
