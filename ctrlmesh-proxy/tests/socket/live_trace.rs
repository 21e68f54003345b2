//! `ctrlmesh-proxy trace`: the requests of a running proxy, as somebody in its container sees them.

use std::fs;
use std::io::{self, Write as _};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use ctrlmesh_proxy::trace::{TraceLine, TracedRequest};
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::harness::client::{Client, get};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, whole};
use crate::harness::{PATIENCE, PROGRAM, until};
use crate::spans::policy;

const PODS: &str = "/api/v1/namespaces/shop/pods";

const BEGUN: &str = "requests are followed by somebody";

/// An API server, and a proxy that can be asked for its requests.
struct Bed {
    pki: Pki,
    proxy: Proxy,
    _upstream: Upstream,
}

/// The program that somebody runs in the proxy's container.
struct Trace {
    child: std::process::Child,
    lines: mpsc::Receiver<String>,
}

impl Bed {
    async fn new(policy: &Value) -> Self {
        let pki = Pki::new();
        let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), |asked| async move {
            let status = if asked.target == "/version" { StatusCode::NOT_FOUND } else { StatusCode::OK };
            whole(status, "{}")
        })
        .await;
        fs::write(pki.path("policy"), policy.to_string()).unwrap();
        let (policy, socket) = (pki.path("policy"), pki.path("trace"));
        let flags = ["--policy", policy.to_str().unwrap(), "--pod", "ops/op-0"];
        let flags = [&flags[..], &["--trace-socket", socket.to_str().unwrap()]].concat();
        let proxy = Proxy::start(&pki, upstream.address, &flags);
        Self { pki, proxy, _upstream: upstream }
    }

    /// Returns once the proxy shows what it serves.
    async fn trace(&self, flags: &[&str]) -> Trace {
        let before = self.proxy.log().matches(BEGUN).count();
        let trace = self.command(flags);
        until("the trace to begin", async || self.proxy.log().matches(BEGUN).count() > before).await;
        trace
    }

    fn command(&self, flags: &[&str]) -> Trace {
        let mut command = Command::new(PROGRAM);
        command.arg("trace").args(flags).env("CTRLMESH_PROXY_TRACE_SOCKET", self.pki.path("trace"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = lines(child.stdout.take().unwrap());
        Trace { child, lines }
    }

    async fn ask(&self, target: &str) -> StatusCode {
        self.send(get(target)).await
    }

    async fn send(&self, request: Request<Full<bytes::Bytes>>) -> StatusCode {
        Client::connect(&self.pki, self.proxy.address, Version::HTTP_2).await.ask(request).await.status
    }
}

impl Trace {
    /// The next line that says something.
    fn next(&self) -> TraceLine {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap();
            if !line.is_empty() {
                return serde_json::from_str(&line).unwrap();
            }
        }
    }

    fn request(&self) -> TracedRequest {
        match self.next() {
            TraceLine::Request(request) => *request,
            other => panic!("{other:?}"),
        }
    }

    /// Its caller goes away.
    fn leave(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn lines(output: ChildStdout) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in io::BufRead::lines(io::BufReader::new(output)).map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

#[tokio::test]
async fn requests_are_shown_with_what_became_of_them() {
    let bed = Bed::new(&policy()).await;
    bed.ask("/before").await;
    let trace = bed.trace(&["--pod", "ops/op-0"]).await;

    bed.ask(&format!("{PODS}?limit=500&labelSelector=x%3D1&continue=secret")).await;
    let list = trace.request();
    let of = |request: &TracedRequest| (request.decision.clone(), request.status, request.verb.clone());
    assert_eq!(of(&list), ("rewritten".to_owned(), Some(200), "list".to_owned()));
    assert_eq!(list.target, format!("{PODS}?limit=500&labelSelector=x=1&continue=…"));
    let sent = list.sent.unwrap();
    assert!(sent.contains("labelSelector=team=a,x=1") && !sent.contains("secret"), "{sent}");
    assert_eq!((list.pod.as_str(), list.shard.as_deref()), ("ops/op-0", Some("s1")));

    bed.ask("/version").await;
    let version = trace.request();
    assert_eq!(of(&version), ("passed".to_owned(), Some(404), "get".to_owned()));
    assert_eq!((version.target.as_str(), version.sent, version.reason), ("/version", None, None));

    let lock = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "lead"}});
    let create = Request::post("/apis/coordination.k8s.io/v1/namespaces/ops/leases");
    let create = create.header("content-type", "application/json").body(Full::from(lock.to_string())).unwrap();
    bed.send(create).await;
    let lock = trace.request();
    assert!(lock.lock_renamed && lock.decision == "rewritten" && lock.verb == "create", "{lock:?}");

    trace.leave();
    until("the proxy to note it", async || bed.proxy.log().contains("requests are followed no more")).await;
}

#[tokio::test]
async fn a_refused_request_says_why() {
    let mut policy = policy();
    let abort = json!({"status": 503, "share": 1_000_000_000});
    let pods = json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["*"], "namespaces": ["*"]}]);
    policy["faults"] = json!([{"injection": "ops/storm", "fault": "0", "abort": abort, "requests": pods}]);
    let bed = Bed::new(&policy).await;
    let refused = bed.trace(&["--refused"]).await;
    let gets = bed.trace(&["--verb", "get,list"]).await;
    bed.ask("/version").await;
    assert_eq!(bed.ask(PODS).await, StatusCode::SERVICE_UNAVAILABLE);
    let pods = refused.request();
    assert_eq!((pods.target.as_str(), pods.decision.as_str(), pods.status), (PODS, "fault", Some(503)));
    assert!(pods.reason.unwrap().contains("let the request reach the API server"), "a reason");
    assert_eq!([gets.request().target, gets.request().target], ["/version", PODS]);
}

#[tokio::test]
async fn requests_of_another_pod_are_not_shown() {
    let bed = Bed::new(&policy()).await;
    let other = bed.trace(&["--pod", "ops/op-1"]).await;
    let own = bed.trace(&["--resource", "pods"]).await;
    bed.ask(PODS).await;
    assert_eq!(own.request().target, PODS);
    // Whoever follows another pod is told of nothing until its proxy ends.
    bed.proxy.terminate();
    let rest: Vec<String> = other.lines.iter().collect();
    assert!(rest.iter().all(String::is_empty), "{rest:?}");
}

#[tokio::test]
async fn too_many_requests_are_counted_instead() {
    let bed = Bed::new(&policy()).await;
    let trace = bed.trace(&["--rate", "1"]).await;
    let mut client = Client::connect(&bed.pki, bed.proxy.address, Version::HTTP_2).await;
    let (mut asked, mut shown, mut omitted) = (0, 0, 0);
    // So many in a second, however slow the machine is, that one is omitted.
    let begun = Instant::now();
    while omitted == 0 {
        assert!(begun.elapsed() < PATIENCE, "{shown} of {asked} are shown, and the others are not counted");
        for _ in 0..20 {
            client.ask(get("/version")).await;
            asked += 1;
        }
        while let Ok(line) = trace.lines.try_recv() {
            match serde_json::from_str(&line) {
                Ok(TraceLine::Request(_)) => shown += 1,
                Ok(TraceLine::Omitted(count)) => omitted += count,
                other => assert!(line.is_empty(), "{other:?}"),
            }
        }
    }
    assert!(shown > 0 && shown + omitted <= asked, "{shown} and {omitted} of {asked}");
}

#[tokio::test]
async fn nobody_is_shown_anything_without_a_query() {
    let bed = Bed::new(&policy()).await;
    let mut stream = std::os::unix::net::UnixStream::connect(bed.pki.path("trace")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let answer = io::read_to_string(stream).unwrap();
    let TraceLine::Error(error) = serde_json::from_str(&answer).unwrap() else { panic!("{answer}") };
    assert!(error.starts_with("the proxy does not understand what to show"), "{error}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(bed.pki.path("trace")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "others must not open it");
}

#[tokio::test]
async fn without_a_proxy_the_error_names_the_socket() {
    let pki = Pki::new();
    let socket = pki.path("nobody");
    let ended = Command::new(PROGRAM).args(["trace", "--socket"]).arg(&socket).output().unwrap();
    let error = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && error.contains(socket.to_str().unwrap()), "{error}");
}
