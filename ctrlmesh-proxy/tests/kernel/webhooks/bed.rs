//! Two pods of one operator, each with a webhook server, and a node from which they are called.

use std::convert::Infallible;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
use ctrlmesh_intercept::listener::Namespace;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls_pki_types::ServerName;
use serde_json::{Value, json};
use tokio::task::{self, JoinSet};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::bed::{Process, must};
use crate::harness::pki::client_of;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::operators::Node;

pub(crate) const PORT: u16 = 9443;

/// How long the operators' own servers wait for the head of a call, as those of Go do.
pub(crate) const IDLE: Duration = Duration::from_secs(3);

/// The pods' addresses.
pub(crate) const A: &str = "10.244.1.5";
pub(crate) const B: &str = "10.244.2.5";
pub(crate) const A_V6: &str = "fd00:244:1::5";

/// Namespaces, each of another shard.
pub(crate) const OF_A: &str = "own";
pub(crate) const OF_B: &str = "shop";

pub(crate) struct Webhooks {
    pub(crate) node: Node,
    pub(crate) proxy: Proxy,
    _processes: Vec<Process>,
    servers: JoinSet<()>,
}

/// The policy of a shard's pod: both shards divide the slots, and the namespace `moving` is nobody's.
pub(crate) fn policy(epoch: u64, shard: &str, webhook: &Value) -> Value {
    let hash = NamespaceHash::default();
    let owner = |slot| if slot == hash.slot(OF_B) { "b" } else { "a" };
    let slots: Vec<_> = SlotSet::ALL.iter().map(|slot| (slot.to_string(), json!(owner(slot)))).collect();
    json!({
        "epoch": epoch,
        "fence": {
            "owner": shard, "slots": slots.into_iter().collect::<serde_json::Map<_, _>>(), "revoked": ["moving"],
            "resources": [{"apiGroups": ["example.com"], "resources": ["websites"]}],
        },
        "webhook": webhook,
    })
}

/// A review of a website, or of something else.
pub(crate) fn review(resource: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "operation": "CREATE", "namespace": namespace, "name": "w",
            "resource": {"group": "example.com", "version": "v1", "resource": resource},
            "object": {"metadata": {"namespace": OF_A, "name": "w"}},
        },
    })
}

impl Webhooks {
    /// The pods' proxy takes their calls.
    pub(crate) async fn new() -> Self {
        Self::with(&[]).await
    }

    /// The same, with more arguments for the proxy.
    pub(crate) async fn with(arguments: &[&str]) -> Self {
        let node = Node::new().await;
        node.bed.namespace("node");
        let mut pods = Vec::new();
        let mut processes = Vec::new();
        for (name, number) in [("a", 1), ("b", 2)] {
            pods.push(node.pod(name));
            wire(&node, name, number);
            processes.push(node.bed.nobody(&node.bed.cgroup(name), name));
        }
        let (proxy, servers) = (node_proxy(&node, &pods, arguments), JoinSet::new());
        let mut this = Self { node, proxy, _processes: processes, servers };
        for (name, address) in [("a", A), ("b", B), ("a", A_V6)] {
            this.serve(name, address);
        }
        this.taken("ops/a").await;
        this.taken("ops/b").await;
        this
    }

    /// Ends the operators' own servers, and their connections.
    pub(crate) async fn stop_servers(&mut self) {
        self.servers.shutdown().await;
    }

    /// A connection from the node to pod `a`.
    pub(crate) fn connect(&self) -> tokio::net::TcpStream {
        let network = Namespace::open(&self.node.bed.path("node")).unwrap();
        let stream = network.run(|| TcpStream::connect((A, PORT))).unwrap().unwrap();
        stream.set_nonblocking(true).unwrap();
        tokio::net::TcpStream::from_std(stream).unwrap()
    }

    /// The same, with TLS.
    pub(crate) async fn connect_tls(&self) -> TlsStream<tokio::net::TcpStream> {
        let tls = TlsConnector::from(client_of(&[self.node.pki.path("real.crt")], &["http/1.1"]));
        tls.connect(ServerName::try_from("localhost").unwrap(), self.connect()).await.unwrap()
    }

    /// Another proxy, which waits to follow the one that serves; that one is returned.
    pub(crate) async fn successor(&mut self) -> Proxy {
        let before = std::mem::replace(&mut self.proxy, in_namespace(&self.node, &[]));
        until("it to wait", || async { self.proxy.log().contains("waiting to follow it") }).await;
        before
    }

    /// The webhook as the operator's configuration has it.
    pub(crate) fn webhook(node: &Node, peers: &Value) -> Value {
        let [certificate, key] = ["hook.crt", "hook.key"].map(|name| node.pki.path(name));
        json!({"port": PORT, "certificate": certificate, "key": key, "peers": peers})
    }

    /// Waits until a pod's calls are taken.
    pub(crate) async fn taken(&self, pod: &str) {
        until("the calls to be taken", || async {
            self.proxy.log().lines().any(|line| line.contains("webhook are taken") && line.contains(pod))
        })
        .await;
    }

    /// Replaces the policy of a pod.
    pub(crate) async fn change(&self, pod: &str, policy: &Value) {
        self.node.write(&format!("{pod}.policy"), &policy.to_string());
        let metric = format!("policy_epoch{{pod=\"ops/{pod}\"}} {}", policy["epoch"]);
        until("the policy", || async { self.metrics().await.contains(&metric) }).await;
    }

    /// The operator's own server in a pod: says who it is, and what it was asked.
    pub(crate) fn serve(&mut self, pod: &str, ip: &str) {
        let network = Namespace::open(&self.node.bed.path(pod)).unwrap();
        let address = SocketAddr::new(ip.parse().unwrap(), PORT);
        let listener = network.run(|| TcpListener::bind(address)).unwrap().unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let (tls, who): (Arc<ServerConfig>, _) = (self.node.pki.server(&["http/1.1"]), pod.to_owned());
        self.servers.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, peer)) = listener.accept().await {
                let (tls, who) = (TlsAcceptor::from(tls.clone()), who.clone());
                open.spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let service = service_fn(move |request| answer(request, who.clone(), peer));
                    let mut builder = http1::Builder::new();
                    builder.timer(TokioTimer::new()).header_read_timeout(IDLE);
                    let _broken = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
    }

    /// What curl prints, called from the node, and its exit status.
    pub(crate) async fn curl(&self, arguments: &[&str]) -> (String, i32) {
        let mut command = self.inside("curl");
        command.args(["--silent", "--max-time", "20", "--noproxy", "*", "--globoff"]).args(arguments);
        let output = task::spawn_blocking(move || command.stdin(Stdio::null()).output().unwrap()).await.unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
    }

    /// Calls the webhook of a pod as an API server does: the status, and what was answered.
    pub(crate) async fn call(&self, ip: &str, path: &str, body: &Value) -> (u16, Value) {
        self.call_with(ip, path, body, &[]).await
    }

    pub(crate) async fn call_with(&self, ip: &str, path: &str, body: &Value, more: &[&str]) -> (u16, Value) {
        self.try_call(ip, path, body, more).await.unwrap_or_else(|code| panic!("curl ended with {code}"))
    }

    /// As [`Self::call_with`], or curl's exit status where there is no answer.
    pub(crate) async fn try_call(
        &self,
        ip: &str,
        path: &str,
        body: &Value,
        more: &[&str],
    ) -> Result<(u16, Value), i32> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), body.to_string()).unwrap();
        let (data, ca) = (format!("@{}", file.path().display()), self.node.pki.path("real.crt"));
        let ip = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
        let resolve = format!("localhost:{PORT}:{ip}");
        let url = format!("https://localhost:{PORT}{path}");
        let fixed = ["--cacert", ca.to_str().unwrap(), "--resolve", &resolve, "--data-binary", &data];
        let shown = ["--header", "content-type: application/json", "--write-out", "\n%{http_code}", &url];
        let (text, code) = self.curl(&[&fixed[..], &shown, more].concat()).await;
        if code != 0 {
            return Err(code);
        }
        let (text, status) = text.rsplit_once('\n').unwrap();
        Ok((status.parse().unwrap(), serde_json::from_str(text).unwrap_or_else(|_| json!(text))))
    }

    /// A page of the proxy, which is in the node's network namespace.
    pub(crate) async fn metrics(&self) -> String {
        self.curl(&[&format!("http://{}/metrics", self.proxy.admin)]).await.0
    }

    /// How many calls were answered so.
    pub(crate) async fn answered(&self, route: &str, result: &str) -> u64 {
        let metric = format!("ctrlmesh_proxy_webhook_requests_total{{route=\"{route}\",result=\"{result}\"}} ");
        let page = self.metrics().await;
        page.lines().find_map(|line| line.strip_prefix(&metric)).map_or(0, |count| count.parse().unwrap())
    }

    fn inside(&self, program: &str) -> Command {
        self.node.bed.inside(&self.node.bed.cgroup("node"), "node", program)
    }
}

/// Connects a pod's network namespace with the node's.
fn wire(node: &Node, pod: &str, number: u8) {
    let name = |suffix: &str| node.bed.path(suffix).file_name().unwrap().to_str().unwrap().to_owned();
    let (pod, host, device) = (name(pod), name("node"), format!("pod{number}"));
    let mut link = Command::new("ip");
    link.args(["link", "add", "eth0", "netns", &pod, "type", "veth", "peer", "name", &device, "netns", &host]);
    must(&mut link);
    for (namespace, device, last) in [(&pod, "eth0", 5), (&host, device.as_str(), 1)] {
        for command in [
            format!("addr add 10.244.{number}.{last}/24 dev {device}"),
            format!("addr add fd00:244:{number}::{last}/64 dev {device} nodad"),
            format!("link set {device} up"),
        ] {
            must(Command::new("ip").args(["-n", namespace]).args(command.split(' ')));
        }
    }
}

/// A node proxy that serves both pods, in the node's network namespace.
fn node_proxy(node: &Node, pods: &[Value], arguments: &[&str]) -> Proxy {
    for name in ["crt", "key"] {
        fs::copy(node.pki.path(&format!("leaf.{name}")), node.pki.path(&format!("hook.{name}"))).unwrap();
    }
    for (shard, other, address) in [("a", "b", B), ("b", "a", A)] {
        let webhook = Webhooks::webhook(node, &json!([{"shard": other, "addresses": [address]}]));
        node.write(&format!("{shard}.policy"), &policy(1, shard, &webhook).to_string());
    }
    node.list(pods);
    in_namespace(node, arguments)
}

fn in_namespace(node: &Node, arguments: &[&str]) -> Proxy {
    let mut command = node.bed.inside(&node.bed.cgroup("node"), "node", env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
    command
        .arg("node")
        .args(["--handover-timeout", "60s", "--handover-dir"])
        .arg(node.pki.path("handover"))
        .args(arguments);
    node.run_with(command)
}

async fn answer(
    request: Request<Incoming>,
    who: String,
    peer: SocketAddr,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let bytes = body.collect().await.map_or(0, |body| body.to_bytes().len());
    let path = head.uri.path_and_query().map(ToString::to_string);
    let seen = json!({
        "who": who, "path": path, "method": head.method.as_str(), "bytes": bytes, "peer": peer.ip().to_string(),
        "host": head.headers.get("host").and_then(|host| host.to_str().ok()),
    });
    Ok(Response::new(Full::from(seen.to_string())))
}
