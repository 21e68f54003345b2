//! A stand-in for metrics-server: it says how much CPU an operator's pods use, as a test decides.
//!
//! The API server asks it for `metrics.k8s.io`, as for every aggregated API: over TLS, at an address that a Service
//! names. It runs on this machine, at the end of the node's wire.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use ctrlmesh_testbed::{Cluster, Space};
use jiff::Timestamp;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use xtask::user_cluster::MADE;

use crate::mesh::{self, kubectl, operator, until};

/// The API, as its object is named, and its path.
const API: &str = "v1beta1.metrics.k8s.io";
const PATH: &str = "/apis/metrics.k8s.io/v1beta1";

/// The namespace of the Service, and its name.
const SYSTEM: &str = "kube-system";
const SERVICE: &str = "metrics-server";

/// How long a caller may take to ask.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

/// The metrics of one operator. They are served until this is dropped.
pub(crate) struct MetricsServer {
    state: Arc<State>,
    address: SocketAddr,
}

struct State {
    cluster: &'static Cluster,
    namespace: String,
    /// What all pods use together.
    millicores: AtomicU32,
    is_over: AtomicBool,
    tls: Arc<ServerConfig>,
}

impl MetricsServer {
    /// Serves the metrics of the operator in this namespace, and waits until the API server passes them on.
    pub(crate) fn start(cluster: &'static Cluster, namespace: &str, millicores: u32) -> Result<Self> {
        let listener = TcpListener::bind((machine(cluster)?, 0)).context("listen where the node can reach it")?;
        let state = Arc::new(State {
            cluster,
            namespace: namespace.to_owned(),
            millicores: millicores.into(),
            is_over: false.into(),
            tls: tls()?,
        });
        let this = Self { address: listener.local_addr()?, state: Arc::clone(&state) };
        thread::spawn(move || serve(&state, &listener));
        cluster.ask(&["apply", "--filename", "-"], &this.registration().to_string())?;
        until("the metrics to be served", || {
            let path = format!("{PATH}/namespaces/{namespace}/pods");
            Ok(kubectl(cluster, &["get", "--raw", &path]).ok())
        })?;
        Ok(this)
    }

    /// Has all pods use so much together, each as much as the others.
    pub(crate) fn use_cpu(&self, millicores: u32) {
        self.state.millicores.store(millicores, Ordering::Relaxed);
    }

    /// The Service that names our address, and the API.
    fn registration(&self) -> Value {
        let service = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": SYSTEM, "name": SERVICE, "labels": {MADE: "true"}},
            "spec": {"type": "ExternalName", "externalName": self.address.ip().to_string()}});
        let api = json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": API, "labels": {MADE: "true"}}, "spec": {
                "group": "metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
                "insecureSkipTLSVerify": true,
                "service": {"namespace": SYSTEM, "name": SERVICE, "port": self.address.port()}}});
        json!({"apiVersion": "v1", "kind": "List", "items": [service, api]})
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // An API that nobody serves holds up the end of every namespace.
        drop(kubectl(self.state.cluster, &["delete", "apiservice", API, "--ignore-not-found"]));
        let service = ["--namespace", SYSTEM, "delete", "service", SERVICE, "--ignore-not-found"];
        drop(kubectl(self.state.cluster, &service));
        self.state.is_over.store(true, Ordering::Relaxed);
        // It waits for a connection.
        drop(TcpStream::connect(self.address));
    }
}

impl State {
    /// The status and the body for a path.
    fn answer(&self, path: &str) -> (&'static str, String) {
        let path = path.split('?').next().unwrap_or_default();
        if path == PATH {
            let pods = json!({"name": "pods", "singularName": "", "namespaced": true, "kind": "PodMetrics",
                "verbs": ["get", "list"]});
            let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "metrics.k8s.io/v1beta1",
                "resources": [pods]});
            return ("200 OK", list.to_string());
        }
        if path != format!("{PATH}/namespaces/{}/pods", self.namespace) {
            return ("404 Not Found", json!({"kind": "Status", "apiVersion": "v1", "code": 404}).to_string());
        }
        match self.metrics() {
            Ok(metrics) => ("200 OK", metrics.to_string()),
            Err(error) => ("500 Internal Server Error", format!("{error:#}")),
        }
    }

    fn metrics(&self) -> Result<Value> {
        let pods = operator::pods(self.cluster.space(&self.namespace))?;
        let count = u32::try_from(pods.len())?.max(1);
        let each = format!("{}m", self.millicores.load(Ordering::Relaxed) / count);
        let metrics = |pod: &Value| {
            json!({"metadata": {"namespace": self.namespace, "name": pod["metadata"]["name"]},
                "timestamp": Timestamp::now().to_string(), "window": "1s",
                "containers": [{"name": "manager", "usage": {"cpu": each, "memory": "32Mi"}}]})
        };
        let items: Vec<Value> = pods.iter().map(metrics).collect();
        Ok(json!({"kind": "PodMetricsList", "apiVersion": "metrics.k8s.io/v1beta1", "metadata": {}, "items": items}))
    }
}

/// The address of this machine at the end of the node's wire: the one before the node's.
fn machine(cluster: &Cluster) -> Result<Ipv4Addr> {
    let node: Ipv4Addr = mesh::address(cluster)?.parse()?;
    Ok(Ipv4Addr::from_bits(node.to_bits() - 1))
}

/// With a certificate that nobody verifies.
fn tls() -> Result<Arc<ServerConfig>> {
    let certified = rcgen::generate_simple_self_signed([SERVICE.to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = config.with_no_client_auth().with_single_cert(vec![certified.cert.der().clone()], key.into())?;
    Ok(Arc::new(config))
}

fn serve(state: &Arc<State>, listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        if state.is_over.load(Ordering::Relaxed) {
            return;
        }
        let state = Arc::clone(state);
        // Whoever hears nothing asks again.
        thread::spawn(move || drop(answer(&state, stream)));
    }
}

/// Answers one request.
fn answer(state: &State, stream: TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(ASKED_WITHIN))?;
    let mut tls = StreamOwned::new(ServerConnection::new(Arc::clone(&state.tls))?, stream);
    let mut lines = BufReader::new(&mut tls).lines();
    let first = lines.next().context("no request")??;
    // The rest are headers, up to an empty line.
    while !lines.next().context("half a request")??.is_empty() {}
    drop(lines);
    let (status, body) = state.answer(first.split(' ').nth(1).unwrap_or_default());
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n", body.len());
    write!(tls, "{head}connection: close\r\n\r\n{body}")?;
    tls.conn.send_close_notify();
    Ok(tls.flush()?)
}

/// Has the autoscaler scale a Deployment to as many pods as use 100 millicores each.
pub(crate) fn autoscaler(space: Space<'_>, most: usize) -> Result<()> {
    let cpu = json!({"type": "Resource", "resource": {"name": "cpu",
        "target": {"type": "AverageValue", "averageValue": "100m"}}});
    let autoscaler = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": operator::NAME, "labels": {MADE: "true"}}, "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": operator::NAME},
            "minReplicas": 1, "maxReplicas": most, "metrics": [cpu],
            // By itself it waits for five minutes before it scales in.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}});
    space.apply(&autoscaler.to_string())
}
