//! An API server whose watches and lists a test controls, behind a proxy whose policy changes.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, Version};
use http_body_util::BodyExt as _;
use http_body_util::channel::Sender;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};

use super::client::{Client, get, plain_get};
use super::pki::Pki;
use super::proxy::Proxy;
use super::upstream::{Body, ReceivedRequest, Upstream, streamed, whole};
use super::{soon, until};

pub(crate) const PODS: &str = "/api/v1/pods";
pub(crate) const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
/// The version from which every client here continues.
pub(crate) const WATCH: &str = "/api/v1/pods?watch=1&resourceVersion=5&allowWatchBookmarks=true";

pub(crate) type Lists = Arc<Mutex<Box<dyn Fn(&str) -> Response<Body> + Send>>>;

/// An API server whose watches a test holds, and whose lists it makes.
pub(crate) struct Bed {
    // Dropped before the folder, in which it writes as long as it lives.
    pub(crate) proxy: Proxy,
    pub(crate) pki: Pki,
    pub(crate) upstream: Upstream,
    pub(crate) watches: mpsc::UnboundedReceiver<(ReceivedRequest, Sender<Bytes, io::Error>)>,
    pub(crate) lists: Lists,
    /// Whether lists wait to be released, and the means to release them.
    pub(crate) slow: Arc<AtomicBool>,
    pub(crate) arrived: Arc<Notify>,
    pub(crate) release: Arc<Notify>,
}

/// An open watch of a client.
pub(crate) struct Watching {
    #[expect(dead_code, reason = "held: the connection ends with it")]
    client: Client,
    pub(crate) body: Incoming,
    pub(crate) read: Vec<u8>,
    /// What the API server sends.
    pub(crate) send: Sender<Bytes, io::Error>,
}

impl Bed {
    pub(crate) async fn new(policy: &Value) -> Self {
        let pki = Pki::new();
        let (opened, watches) = mpsc::unbounded_channel();
        let lists: Lists = Arc::new(Mutex::new(Box::new(list)));
        let answers = lists.clone();
        let (slow, arrived, release) = <(Arc<AtomicBool>, Arc<Notify>, Arc<Notify>)>::default();
        let (waits, there, released) = (slow.clone(), arrived.clone(), release.clone());
        let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), move |seen| {
            let response = if seen.target.contains("watch=") {
                let (send, mut response) = streamed();
                json_content(&mut response);
                if seen.headers.contains_key("x-gzip") {
                    let gzip = HeaderValue::from_static("gzip");
                    response.headers_mut().insert("content-encoding", gzip);
                }
                opened.send((seen, send)).unwrap();
                response
            } else {
                answers.lock().unwrap()(&seen.target)
            };
            let wait = waits.load(Ordering::SeqCst).then(|| (there.clone(), released.clone()));
            async move {
                if let Some((there, released)) = wait {
                    there.notify_one();
                    released.notified().await;
                }
                response
            }
        })
        .await;
        write(&pki, policy);
        let proxy = start(&pki, &upstream, true);
        Self { proxy, pki, upstream, watches, lists, slow, arrived, release }
    }

    /// Another process serves the pod, under another policy. `knows` tells whether it finds the state folder.
    pub(crate) fn restart(&mut self, policy: &Value, knows: bool) {
        write(&self.pki, policy);
        self.proxy = start(&self.pki, &self.upstream, knows);
    }

    /// Lets the API server answer lists by `lists`.
    pub(crate) fn answer_lists(&self, lists: impl Fn(&str) -> Response<Body> + Send + 'static) {
        *self.lists.lock().unwrap() = Box::new(lists);
    }

    /// Changes the policy and waits until it holds.
    pub(crate) async fn change(&self, policy: &Value) {
        write(&self.pki, policy);
        let epoch = policy["epoch"].as_u64().unwrap();
        until("the new policy", || async {
            let page = plain_get(self.proxy.admin, "/metrics").await.1;
            page.contains(&format!("ctrlmesh_proxy_policy_epoch{{pod=\"\"}} {epoch}\n"))
        })
        .await;
    }

    pub(crate) async fn watch(
        &mut self,
        version: Version,
        target: &str,
        headers: &[(&'static str, &'static str)],
    ) -> (Watching, ReceivedRequest) {
        let mut client = Client::connect(&self.pki, self.proxy.address, version).await;
        let mut request = get(target);
        for (name, value) in headers {
            request.headers_mut().insert(*name, HeaderValue::from_static(value));
        }
        let response = client.send(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let (seen, send) = soon("a watch", self.watches.recv()).await.unwrap();
        (Watching { client, body: response.into_body(), read: Vec::new(), send }, seen)
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.pki, self.proxy.address, Version::HTTP_2).await
    }

    /// The history that the proxy has stored.
    pub(crate) fn kept(&self) -> String {
        fs::read_to_string(self.pki.path("state").join("histories/_")).unwrap_or_default()
    }

    /// The requests that the API server got, without watches.
    pub(crate) fn listed(&self) -> Vec<String> {
        let seen = self.upstream.seen.lock().unwrap().clone();
        let lists = seen.into_iter().filter(|seen| !seen.target.contains("watch="));
        lists.map(|seen| seen.target).collect()
    }
}

impl Watching {
    /// The next event; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = soon("an event", self.body.frame()).await?.unwrap();
            self.read.extend(frame.into_data().unwrap_or_default());
        }
    }

    /// Type and object of the next event.
    pub(crate) async fn sees(&mut self) -> (String, String) {
        let event = self.next().await.expect("an event");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&event["type"]), text(&event["object"]["metadata"]["name"]))
    }

    /// Whether the watch ends here with an event that makes the client list again.
    pub(crate) async fn expires(&mut self) {
        let event = self.next().await.expect("an event");
        assert_eq!(event["type"], "ERROR", "{event}");
        let status = &event["object"];
        assert_eq!(
            (&status["kind"], &status["code"], &status["reason"]),
            (&json!("Status"), &json!(410), &json!("Expired"))
        );
        assert_eq!(self.next().await, None);
    }
}

/// A proxy whose policy the test writes. `keeps` tells whether it has a state folder for the next one.
fn start(pki: &Pki, upstream: &Upstream, keeps: bool) -> Proxy {
    let (policy, state) = (pki.path("policy"), pki.path("state"));
    let policy = ["--policy", policy.to_str().unwrap()];
    if keeps {
        let state = ["--state-dir", state.to_str().unwrap()];
        Proxy::start(pki, upstream.address, &[policy, state].concat())
    } else {
        Proxy::forgetful(pki, upstream.address, &policy)
    }
}

pub(crate) fn write(pki: &Pki, policy: &Value) {
    fs::write(pki.path("next"), policy.to_string()).unwrap();
    fs::rename(pki.path("next"), pki.path("policy")).unwrap();
}

/// A policy that lets these pods be seen.
pub(crate) fn pods(epoch: u64, selector: &str) -> Value {
    json!({"epoch": epoch, "limits": [{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": selector}]})
}

pub(crate) fn json_content(response: &mut Response<Body>) {
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
}

pub(crate) fn answer(status: u16, body: &Value) -> Response<Body> {
    let mut response = whole(StatusCode::from_u16(status).unwrap(), body.to_string());
    json_content(&mut response);
    response
}

/// A list of a pod for each selector, named after it, at the version that is asked for, or at 9 now.
pub(crate) fn list(target: &str) -> Response<Body> {
    let value = |key: &str| {
        let query = target.split_once('?').map_or("", |(_, query)| query);
        query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
    };
    let version = if value("resourceVersionMatch") == "Exact" { value("resourceVersion") } else { "9" };
    let name = ["%3D=", "%21!", "%2C,", "%20 ", "%28(", "%29)"]
        .iter()
        .fold(value("labelSelector").to_owned(), |name, escape| name.replace(&escape[..3], &escape[3..]));
    answer(
        200,
        &json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version},
                "items": [{"metadata": {"name": name, "resourceVersion": "3"}}]}),
    )
}

pub(crate) fn event(kind: &str, name: &str, version: u64) -> Bytes {
    let object =
        json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "resourceVersion": version.to_string()}});
    format!("{}\n", json!({"type": kind, "object": object})).into()
}

pub(crate) fn sees(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

/// A policy that lets these leases be seen, and renames one.
pub(crate) fn leases(epoch: u64, selector: &str) -> Value {
    json!({
        "epoch": epoch, "lock": {"namespace": "ops", "name": "lead", "shard": "s1"},
        "limits": [{"relateResources": [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}], "selector": selector}],
    })
}
