//! A pod with rules on what it talks to, and the servers that it talks to.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::process::{Output, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use ctrlmesh_intercept::listener::Namespace;
use http::{Request, Response, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::operators::{Node, served};

/// The pod's address, and that of the machine with the servers.
pub(crate) const POD: &str = "10.244.1.5";
pub(crate) const SERVERS: &str = "10.244.1.1";

/// A pod with rules, and servers elsewhere.
pub(crate) struct Egress {
    pub(crate) node: Node,
    pub(crate) proxy: Proxy,
    servers: JoinSet<()>,
}

pub(crate) fn rule(name: &str, list: &str, urls: &Value, methods: &[&str]) -> Value {
    let ports = [8080, 8443, 2525];
    json!({"breaker": "ops/out", "rule": name, "ports": ports, "list": list, "urls": urls, "methods": methods})
}

/// HTTP at 8080, TLS at 8443, and 2525; only two hosts pass, and never what is below `/private`.
fn rules() -> Value {
    let allowed = json!([{"parts": {"host": "allowed.test"}}, {"parts": {"host": "localhost"}}, {"parts": {"host": SERVERS, "port": 2525}}]);
    let private = json!([{"parts": {"host": "allowed.test", "port": 8080, "path": "/private/*"}}]);
    json!([rule("hosts", "allow", &allowed, &["*"]), rule("private", "deny", &private, &["GET", "POST"])])
}

impl Egress {
    pub(crate) async fn new() -> Self {
        let node = Node::new().await;
        node.bed.wire("servers");
        let mut pod = node.pod("a");
        pod["network"] = json!(node.bed.path(""));
        write(&node, &rules());
        node.list(&[pod]);
        let proxy = node.proxy();
        served(&proxy, 1.0).await;
        let this = Self { node, proxy, servers: JoinSet::new() };
        this.redirected("*:8080").await;
        this
    }

    /// Waits until connections to a target are redirected.
    pub(crate) async fn redirected(&self, target: &str) {
        until("the target to be redirected", || {
            let status = ctrlmesh_intercept::Status::read(&self.node.bed.pins()).unwrap();
            let is_there = status.attachments.iter().any(|one| one.targets.iter().any(|its| its == target));
            async move { is_there }
        })
        .await;
    }

    fn listen(&self, port: u16) -> tokio::net::TcpListener {
        let network = Namespace::open(&self.node.bed.path("servers")).unwrap();
        let address: SocketAddr = format!("{SERVERS}:{port}").parse().unwrap();
        let listener = network.run(|| TcpListener::bind(address)).unwrap().unwrap();
        listener.set_nonblocking(true).unwrap();
        tokio::net::TcpListener::from_std(listener).unwrap()
    }

    /// HTTP/1.1 and HTTP/2, over TLS or in the clear: says what was asked, and by whom.
    pub(crate) fn http(&mut self, port: u16, tls: Option<Arc<ServerConfig>>) {
        let (listener, tls) = (self.listen(port), tls.map(TlsAcceptor::from));
        self.servers.spawn(async move {
            while let Ok((stream, peer)) = listener.accept().await {
                let tls = tls.clone();
                tokio::spawn(async move {
                    match tls {
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => answer(stream, peer).await,
                            Err(_refused) => {}
                        },
                        None => answer(stream, peer).await,
                    }
                });
            }
        });
    }

    /// Speaks first, and then repeats each line.
    pub(crate) fn speaks_first(&mut self, port: u16) {
        let listener = self.listen(port);
        self.servers.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    stream.write_all(b"220 ready\n").await.unwrap();
                    let mut line = String::new();
                    while stream.read_line(&mut line).await.is_ok_and(|bytes| bytes > 0) {
                        stream.write_all(line.as_bytes()).await.unwrap();
                        line.clear();
                    }
                });
            }
        });
    }

    pub(crate) async fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = self.node.bed.inside(&self.node.bed.cgroup("a"), "", program);
        command.args(arguments).stdin(Stdio::null());
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    }

    /// What curl printed, and its exit status.
    pub(crate) async fn curl(&self, arguments: &[&str]) -> (String, i32) {
        let resolve = ["allowed.test", "other.test", "localhost"];
        let resolve: Vec<String> =
            resolve.iter().flat_map(|name| [8080, 8081, 8443].map(|port| format!("{name}:{port}:{SERVERS}"))).collect();
        let mut all = vec!["--silent", "--max-time", "20", "--noproxy", "*", "--write-out", "\n%{http_code}"];
        all.extend(resolve.iter().flat_map(|one| ["--resolve", one.as_str()]));
        all.extend(arguments);
        let output = self.run("curl", &all).await;
        (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
    }

    /// What the server at an URL saw.
    pub(crate) async fn asked(&self, arguments: &[&str]) -> Value {
        let (text, code) = self.curl(arguments).await;
        let (body, status) = text.rsplit_once('\n').unwrap();
        assert_eq!((status, code), ("200", 0), "{arguments:?}: {text}");
        serde_json::from_str(body).unwrap()
    }

    /// Waits until the proxy has the policy of this epoch.
    pub(crate) async fn in_force(&self, epoch: u64) {
        let metric = r#"policy_epoch{pod="ops/a"}"#;
        until("the policy", || async { self.metric(metric).await.to_string() == epoch.to_string() }).await;
    }

    pub(crate) async fn metric(&self, line: &str) -> f64 {
        self.proxy.metric(&format!("ctrlmesh_proxy_{line}")).await
    }
}

pub(crate) fn write(node: &Node, access: &Value) {
    write_with(node, 1, access, &json!([]));
}

pub(crate) fn write_with(node: &Node, epoch: u64, access: &Value, guards: &Value) {
    let policy = json!({"epoch": epoch, "egress": {"ports": [8080, 8443, 2525], "access": access}, "guards": guards});
    node.write("a.policy", &policy.to_string());
}

/// Rules that refuse nothing, and these faults.
pub(crate) fn write_faults(node: &Node, epoch: u64, faults: &Value) {
    let policy = json!({"epoch": epoch, "egress": {"ports": [8080, 8443, 2525]}, "faults": faults});
    node.write("a.policy", &policy.to_string());
}

async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, peer: SocketAddr) {
    let service = service_fn(move |request: Request<Incoming>| async move {
        if request.headers().contains_key(header::UPGRADE) {
            return Ok::<_, Infallible>(upgraded(request));
        }
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let host = head.uri.authority().map(ToString::to_string);
        let host = host.or_else(|| Some(head.headers.get(header::HOST)?.to_str().unwrap().to_owned()));
        let seen = json!({
            "host": host, "path": head.uri.path_and_query().map(ToString::to_string), "method": head.method.as_str(),
            "version": format!("{:?}", head.version), "peer": peer.ip().to_string(), "bytes": body.len(),
        });
        Ok(Response::new(Full::new(Bytes::from(seen.to_string()))))
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let _broken = server.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
}

/// Repeats what comes over the upgraded connection.
fn upgraded(request: Request<Incoming>) -> Response<Full<Bytes>> {
    tokio::spawn(async move {
        let stream = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
        let (mut from, mut to) = tokio::io::split(stream);
        let _broken = tokio::io::copy(&mut from, &mut to).await;
    });
    let response =
        Response::builder().status(101).header(header::UPGRADE, "echo").header(header::CONNECTION, "upgrade");
    response.body(Full::default()).unwrap()
}
