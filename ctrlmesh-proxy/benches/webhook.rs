//! Measures what a node proxy adds to an admission review, beside the operator alone.
//!
//! `cargo bench -p ctrlmesh-proxy --bench webhook [-- --quick]`. Three pods have a webhook server each, in network
//! namespaces of their own; two of them are served by a node proxy. The caller, in the node's namespace, keeps one
//! connection to each, as an API server does, and sends one review after the other. Needs root, `ip` and `nsenter`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and panics where it cannot go on")]
#![allow(clippy::disallowed_methods, reason = "tasks of a benchmark end with it")]

use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

use bytes::Bytes;
use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::listener::{self, Namespace};
use figures::{middle, must, spread};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use pki::Pki;
use rustls::ServerConfig;
use rustls_pki_types::ServerName;
use serde_json::json;
use tokio::net::TcpSocket;
use tokio::runtime::Builder;
use tokio_rustls::{TlsAcceptor, TlsConnector};

#[path = "bed/figures.rs"]
mod figures;
#[path = "../tests/harness/pki.rs"]
#[allow(dead_code, reason = "the harness of the tests has more")]
mod pki;

const PORT: u16 = 9443;

/// The pods, in the order of their addresses: two shards, and one that is not enrolled.
const PODS: [&str; 3] = ["a", "b", "alone"];

/// Namespaces of either shard.
const OF_A: &str = "own";
const OF_B: &str = "shop";

/// Reviews of one measurement.
const REVIEWS: usize = 200;

/// About as long as a review of a small Deployment.
const REVIEW_BYTES: usize = 4 << 10;

/// How long the proxy may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// Network namespaces, cgroups, and what runs in them; removed when dropped.
struct Bed {
    name: String,
    cgroup: PathBuf,
    /// The proxy, and a process of each pod.
    processes: Vec<Child>,
    /// Last: the proxy reads its files as long as it runs.
    pki: Pki,
}

/// What is measured: who is called, and whose the object is.
struct Case {
    name: &'static str,
    pod: usize,
    namespace: &'static str,
    /// Microseconds, the median of each round.
    medians: Vec<f64>,
}

type Caller = SendRequest<Full<Bytes>>;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    // `cargo test --benches` only builds.
    if arguments.iter().all(|argument| argument != "--test") {
        assert!(nix::unistd::geteuid().is_root(), "the benchmark needs root");
        let rounds = if arguments.iter().any(|argument| argument == "--quick") { 5 } else { 31 };
        Builder::new_current_thread().enable_all().build().unwrap().block_on(measure(rounds));
    }
}

async fn measure(rounds: usize) {
    let mut bed = Bed::new();
    for pod in 0..PODS.len() {
        bed.serve(pod);
    }
    bed.start_proxy();
    let case = |name, pod, namespace| Case { name, pod, namespace, medians: Vec::new() };
    let mut cases = [
        case("the operator alone", 2, OF_A),
        case("its own object, through its proxy", 0, OF_A),
        case("another replica's object, one hop", 0, OF_B),
    ];
    bed.until_routed().await;
    let mut callers = Vec::new();
    for case in &cases {
        callers.push(bed.connect(case.pod).await);
    }
    // One round more than counts: connections and caches are cold.
    for round in 0..=rounds {
        let order: Vec<usize> = if round % 2 == 0 { vec![0, 1, 2] } else { vec![2, 1, 0] };
        for at in order {
            let median = reviews(&mut callers[at], cases[at].namespace).await;
            if round > 0 {
                cases[at].medians.push(median);
            }
        }
    }
    println!("µs a review of {REVIEW_BYTES} bytes: median of {rounds} medians of {REVIEWS} (least to most)\n");
    println!("| | a review | added |\n| --- | --- | --- |");
    let alone = cases[0].medians.clone();
    for case in &cases {
        let added = case.medians.iter().zip(&alone).map(|(ours, alone)| ours - alone);
        println!("| {} | {} | {} |", case.name, spread(case.medians.iter().copied(), 0), spread(added, 0));
    }
}

/// Sends reviews one after the other: the median of their times.
async fn reviews(caller: &mut Caller, namespace: &str) -> f64 {
    let mut times = Vec::new();
    for _ in 0..REVIEWS {
        let begun = Instant::now();
        ask(caller, namespace).await;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    middle(times)
}

/// The name of the pod that has answered.
async fn ask(caller: &mut Caller, namespace: &str) -> Bytes {
    let mut review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "operation": "CREATE", "namespace": namespace, "name": "w",
            "resource": {"group": "example.com", "version": "v1", "resource": "websites"},
            "object": {"metadata": {"namespace": namespace, "name": "w"}},
        },
    });
    let rest = REVIEW_BYTES.saturating_sub(review.to_string().len());
    review["request"]["object"]["data"] = json!("x".repeat(rest));
    let request = Request::post("/validate?timeout=10s").header("host", format!("localhost:{PORT}"));
    let request = request.header("content-type", "application/json").body(Full::from(review.to_string())).unwrap();
    caller.ready().await.unwrap();
    let answer = caller.send_request(request).await.unwrap();
    assert!(answer.status().is_success());
    answer.into_body().collect().await.unwrap().to_bytes()
}

impl Bed {
    fn new() -> Self {
        let name = format!("ctrlmesh-bench-{}", process::id());
        let cgroup = Hierarchy::find().unwrap().mount().join(&name);
        let bed = Self { name, cgroup, processes: Vec::new(), pki: Pki::new() };
        must(Command::new("ip").args(["netns", "add", &bed.of("node")]));
        must(Command::new("ip").args(["-n", &bed.of("node"), "link", "set", "lo", "up"]));
        for (number, pod) in PODS.iter().enumerate() {
            fs::create_dir_all(bed.cgroup.join(pod)).unwrap();
            let (pod, node, device) = (bed.of(pod), bed.of("node"), format!("pod{number}"));
            must(Command::new("ip").args(["netns", "add", &pod]));
            must(Command::new("ip").args(["-n", &pod, "link", "set", "lo", "up"]));
            let mut link = Command::new("ip");
            link.args(["link", "add", "eth0", "netns", &pod, "type", "veth", "peer", "name", &device, "netns", &node]);
            must(&mut link);
            for (namespace, device, last) in [(&pod, "eth0", 5), (&node, device.as_str(), 1)] {
                for command in
                    [format!("addr add 10.244.{number}.{last}/24 dev {device}"), format!("link set {device} up")]
                {
                    must(Command::new("ip").args(["-n", namespace]).args(command.split(' ')));
                }
            }
        }
        bed
    }

    fn of(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.name)
    }

    fn network(&self, suffix: &str) -> PathBuf {
        Path::new("/run/netns").join(self.of(suffix))
    }

    fn pins(&self) -> PathBuf {
        Path::new("/sys/fs/bpf").join(&self.name)
    }

    /// The operator's own server in a pod, on a thread of its own.
    fn serve(&self, pod: usize) {
        let network = Namespace::open(&self.network(PODS[pod])).unwrap();
        let listener = network.run(|| TcpListener::bind(address(pod))).unwrap().unwrap();
        listener.set_nonblocking(true).unwrap();
        let tls = self.pki.server(&["http/1.1"]);
        thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(serve(listener, tls, PODS[pod]));
        });
    }

    /// A node proxy for the first two pods, of which each has half of the slots.
    fn start_proxy(&mut self) {
        let hash = NamespaceHash::default();
        let owner = |slot| if slot == hash.slot(OF_B) { "b" } else { "a" };
        let slots: serde_json::Map<_, _> =
            SlotSet::ALL.iter().map(|slot| (slot.to_string(), json!(owner(slot)))).collect();
        let resources = json!([{"apiGroups": ["example.com"], "resources": ["websites"]}]);
        let [certificate, key] = ["leaf.crt", "leaf.key"].map(|name| self.pki.path(name));
        let mut pods = Vec::new();
        for (shard, peer, at) in [("a", "b", 1), ("b", "a", 0)] {
            let peers = json!([{"shard": peer, "addresses": [address(at).ip()]}]);
            let policy = json!({"epoch": 1,
                "fence": {"owner": shard, "slots": slots, "resources": resources},
                "webhook": {"port": PORT, "certificate": certificate, "key": key, "peers": peers}});
            let file = format!("{shard}.policy");
            fs::write(self.pki.path(&file), policy.to_string()).unwrap();
            // A process of the pod, by which its files are found.
            let script = r#"echo $$ > "$0/cgroup.procs" && exec sleep 86400"#;
            let cgroup = self.cgroup.join(shard);
            let process = Command::new("sh").args(["-c", script]).arg(&cgroup).stdin(Stdio::null()).spawn();
            self.processes.push(process.unwrap());
            pods.push(json!({"pod": format!("bench/{shard}"), "cgroup": cgroup, "network": self.network(shard),
                "policy": file}));
        }
        fs::write(self.pki.path("pods"), json!({"pods": pods}).to_string()).unwrap();
        let mesh = format!("{},{}", self.pki.path("mesh.crt").display(), self.pki.path("mesh.key").display());
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network("node").display())).arg(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        command.args(["node", "--admin-listen", "127.0.0.1:0", "--target", "10.96.0.1:443", "--mesh-ca", &mesh]);
        command.arg("--pods").arg(self.pki.path("pods")).arg("--pin-dir").arg(self.pins());
        command.arg("--upstream-ca").arg(self.pki.path("real.crt")).env("RUST_LOG", "warn");
        self.processes.push(command.stdin(Stdio::null()).spawn().unwrap());
    }

    /// A connection from the node to a pod's webhook.
    async fn connect(&self, pod: usize) -> Caller {
        let node = Namespace::open(&self.network("node")).unwrap();
        let socket = listener::outgoing(&node, address(pod).ip()).unwrap();
        let stream = TcpSocket::from_std_stream(socket).connect(address(pod)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let tls = TlsConnector::from(self.pki.client_of_both(&["http/1.1"]));
        let stream = tls.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
        let (caller, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        caller
    }

    /// Waits until the proxy has the owner answer.
    async fn until_routed(&self) {
        let begun = Instant::now();
        while ask(&mut self.connect(0).await, OF_B).await != "b" {
            assert!(begun.elapsed() < PATIENCE, "the proxy does not start");
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for process in &mut self.processes {
            drop(process.kill());
            drop(process.wait());
        }
        drop(fs::remove_dir_all(self.pins()));
        for suffix in PODS.iter().copied().chain(["node"]) {
            drop(Command::new("ip").args(["netns", "del", &self.of(suffix)]).output());
        }
        for folder in PODS.map(|pod| self.cgroup.join(pod)).iter().chain([&self.cgroup]) {
            while fs::remove_dir(folder).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
                thread::yield_now();
            }
        }
    }
}

fn address(pod: usize) -> SocketAddr {
    format!("10.244.{pod}.5:{PORT}").parse().unwrap()
}

async fn serve(listener: TcpListener, tls: Arc<ServerConfig>, name: &'static str) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    while let Ok((stream, _)) = listener.accept().await {
        let tls = TlsAcceptor::from(tls.clone());
        tokio::spawn(async move {
            stream.set_nodelay(true).unwrap();
            let Ok(stream) = tls.accept(stream).await else { return };
            let service = service_fn(move |request: Request<Incoming>| async move {
                drop(request.into_body().collect().await);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(name)))
            });
            drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        });
    }
}
