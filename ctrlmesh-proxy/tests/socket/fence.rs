//! Writes to objects that the pod's shard does not own.

mod under_way;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::harness::client::{Answer, Client, get};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, streamed, whole};
use crate::harness::watches::{json_content, list};
use crate::harness::{soon, until};
use crate::manager::{Manager, Stream};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Version};
use http_body_util::channel::Sender;
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::task;
use tokio::task::JoinHandle;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// In slot 31.
const OWN: &str = "/apis/example.com/v1/namespaces/own/widgets";
/// In slot 21, which belongs to another shard.
const OTHER: &str = "/apis/example.com/v1/namespaces/other/widgets";
const WATCH: &str = "/apis/example.com/v1/widgets?watch=1&resourceVersion=5&allowWatchBookmarks=true";

/// An API server that holds marked requests, and a proxy before it that follows a manager.
struct Bed {
    // Dropped before the folder, in which it writes.
    proxy: Proxy,
    pki: Pki,
    upstream: Upstream,
    manager: Manager,
    stream: Stream,
    /// The targets of marked requests that have arrived.
    held: mpsc::UnboundedReceiver<String>,
    release: Arc<Notify>,
    watches: mpsc::UnboundedReceiver<Sender<Bytes, io::Error>>,
}

/// The policy of a pod that owns these slots.
fn owning(epoch: u64, slots: &[u8]) -> Value {
    let mut owners = json!({"21": "theirs"});
    for slot in slots {
        owners[slot.to_string()] = json!("mine");
    }
    let resources = json!([
        {"apiGroups": ["example.com"], "resources": ["widgets"]},
        {"apiGroups": [""], "resources": ["configmaps"]},
    ]);
    let slots: Vec<String> = slots.iter().map(u8::to_string).collect();
    json!({
        "epoch": epoch,
        "limits": [{"relateResources": resources, "selector": format!("hash in ({})", slots.join(","))}],
        "lock": {"namespace": "other", "name": "lead", "shard": "s1"},
        "fence": {"operator": "ns/root", "owner": "mine", "slots": owners, "resources": resources},
    })
}

/// A proxy before this API server that has acknowledged `policy`, its manager, and the stream between them.
async fn following(pki: &Pki, upstream: SocketAddr, policy: Value, more: &[&str]) -> (Proxy, Manager, Stream) {
    let mut manager = Manager::start(pki).await;
    let flags = manager.flags(pki);
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let telling = tokio::spawn(async move {
        let (mut stream, _) = manager.stream().await;
        stream.send(&policy).await;
        (manager, stream)
    });
    let proxy = task::block_in_place(|| Proxy::start(pki, upstream, &flags));
    let (manager, mut stream) = telling.await.unwrap();
    assert_eq!(stream.verdict().await.refused, "");
    (proxy, manager, stream)
}

impl Bed {
    /// The proxy has acknowledged `policy`.
    async fn new(policy: Value, more: &[&str]) -> Self {
        let pki = Pki::new();
        let (arrived, held) = mpsc::unbounded_channel();
        let (opened, watches) = mpsc::unbounded_channel();
        let release = Arc::<Notify>::default();
        let released = release.clone();
        let upstream = Upstream::http(pki.server(&["h2", "http/1.1"]), move |seen| {
            let (arrived, released, opened) = (arrived.clone(), released.clone(), opened.clone());
            async move {
                // The proxy's own lists carry the headers of their watch, too.
                let is_watch = seen.target.contains("watch=");
                if seen.headers.contains_key("x-hold") && !is_watch {
                    arrived.send(seen.target.clone()).unwrap();
                    released.notified().await;
                }
                if is_watch {
                    let (send, mut response) = streamed();
                    json_content(&mut response);
                    opened.send(send).unwrap();
                    return response;
                }
                if seen.method == Method::GET { list(&seen.target) } else { whole(StatusCode::OK, "{}") }
            }
        })
        .await;
        let (proxy, manager, stream) = following(&pki, upstream.address, policy, more).await;
        Self { proxy, pki, upstream, manager, stream, held, release, watches }
    }

    async fn client(&self, version: Version) -> Client {
        Client::connect(&self.pki, self.proxy.address, version).await
    }

    /// Begins a write that the API server holds.
    async fn hold(&mut self, version: Version, target: &str) -> JoinHandle<Answer> {
        let mut client = self.client(version).await;
        let mut request = request("PUT", target);
        request.headers_mut().insert("x-hold", HeaderValue::from_static("1"));
        let answer = tokio::spawn(async move { client.ask(request).await });
        assert_eq!(soon("the write", self.held.recv()).await.unwrap(), target);
        answer
    }

    /// Waits until writes to a target are refused.
    async fn until_refused(&self, target: &str) {
        let client = tokio::sync::Mutex::new(self.client(Version::HTTP_2).await);
        let refused =
            || async { client.lock().await.ask(request("PUT", target)).await.status == StatusCode::FORBIDDEN };
        until("writes to be refused", refused).await;
    }

    async fn counted(&self, metric: &str) -> f64 {
        self.proxy.metric(&format!("ctrlmesh_proxy_{metric}_total")).await
    }

    fn written(&self) -> Vec<String> {
        let seen = self.upstream.seen.lock().unwrap().clone();
        let writes = seen.into_iter().filter(|seen| seen.method != Method::GET);
        writes.map(|seen| format!("{} {}", seen.method, seen.target)).collect()
    }
}

/// Where nothing is to be cut, however slow the machine.
const PATIENT: [&str; 2] = ["--write-drain-timeout", "10m"];

fn request(method: &str, target: &str) -> Request<Full<Bytes>> {
    Request::builder().method(method).uri(target).body(Full::from("{}")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_write_never_reaches_the_api_server() {
    let bed = Bed::new(owning(7, &[31]), &[]).await;
    let object = format!("{OTHER}/w");
    let mut refused = 0.0;
    for version in BOTH {
        let mut client = bed.client(version).await;
        for (method, target) in [
            ("POST", OTHER),
            ("PUT", object.as_str()),
            ("PATCH", object.as_str()),
            ("DELETE", object.as_str()),
            ("DELETE", OTHER),
            ("PUT", "/apis/example.com/v1/widgets/other/status"),
        ] {
            let answer = client.ask(request(method, target)).await;
            let status: Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(
                (answer.status, &status["kind"], &status["reason"], &status["code"]),
                (StatusCode::FORBIDDEN, &json!("Status"), &json!("Forbidden"), &json!(403)),
                "{method} {target}"
            );
            let message = status["message"].as_str().unwrap();
            for part in ["slot 21", "\"theirs\"", "\"mine\"", "epoch 7", "-n ns root"] {
                assert!(message.contains(part), "no {part} in {message}");
            }
            refused += 1.0;
        }
        let mut protobuf = request("PUT", &object);
        protobuf.headers_mut().insert("accept", HeaderValue::from_static("application/vnd.kubernetes.protobuf"));
        let answer = client.ask(protobuf).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN);
        assert!(answer.body.starts_with(b"k8s\0"), "{:?}", answer.body);
        refused += 1.0;
        assert_eq!(client.ask(request("PUT", &format!("{OWN}/w"))).await.status, StatusCode::OK);
    }
    assert_eq!(bed.written(), [format!("PUT {OWN}/w"), format!("PUT {OWN}/w")]);
    assert_eq!(bed.counted("writes_refused").await, refused);
    assert!(bed.proxy.log().contains("write refused"));
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_pass_only_while_the_manager_confirms_them() {
    let mut policy = owning(7, &[31]);
    policy["fence"]["lapses"] = json!(true);
    let bed = Bed::new(policy, &[]).await;
    let own = format!("{OWN}/w");
    for version in BOTH {
        let mut client = bed.client(version).await;
        for target in [own.clone(), format!("{OTHER}/w")] {
            let answer = client.ask(request("PUT", &target)).await;
            let status: Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(
                (answer.status, &status["reason"], &status["details"]["retryAfterSeconds"]),
                (StatusCode::SERVICE_UNAVAILABLE, &json!("ServiceUnavailable"), &json!(1)),
                "{target}"
            );
            assert_eq!(answer.headers["retry-after"], "1");
            assert!(status["message"].as_str().unwrap().contains("not confirmed"), "{status}");
        }
        // What is read, what no fence is for, and the lock.
        let lock = "/apis/coordination.k8s.io/v1/namespaces/other/leases/lead";
        for other in [request("GET", OWN), request("PUT", "/api/v1/namespaces/own/secrets/s"), request("DELETE", lock)]
        {
            assert_eq!(client.ask(other).await.status, StatusCode::OK);
        }
    }
    assert!(bed.written().iter().all(|write| write.contains("secrets") || write.contains("leases")));
    assert_eq!(bed.counted("writes_unconfirmed").await, 4.0);
    bed.manager.confirms.store(true, Ordering::Relaxed);
    let client = tokio::sync::Mutex::new(bed.client(Version::HTTP_2).await);
    let passes = || async { client.lock().await.ask(request("PUT", &own)).await.status == StatusCode::OK };
    until("writes to pass", passes).await;
    let answer = client.lock().await.ask(request("PUT", &format!("{OTHER}/w"))).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN, "confirmed, and another's");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_under_way_is_cut_when_the_policy_lapses() {
    let mut policy = owning(7, &[31]);
    policy["fence"]["lapses"] = json!(true);
    let mut bed = Bed::new(policy, &[]).await;
    bed.manager.confirms.store(true, Ordering::Relaxed);
    let own = format!("{OWN}/w");
    let client = tokio::sync::Mutex::new(bed.client(Version::HTTP_2).await);
    let passes = || async { client.lock().await.ask(request("PUT", &own)).await.status == StatusCode::OK };
    until("writes to pass", passes).await;
    let answers = [bed.hold(Version::HTTP_11, &own).await, bed.hold(Version::HTTP_2, &own).await];
    bed.manager.confirms.store(false, Ordering::Relaxed);
    for answer in answers {
        let answer = soon("the answer", answer).await.unwrap();
        let status: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(status["message"].as_str().unwrap().contains("has not confirmed"), "{status}");
    }
    assert_eq!(bed.counted("writes_cut").await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_new_config_maps_there_only_the_lock_passes() {
    let bed = Bed::new(owning(1, &[31]), &[]).await;
    let maps = "/api/v1/namespaces/other/configmaps";
    let create = |name: &str| {
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}).to_string();
        let request = Request::post(maps).header("content-type", "application/json");
        request.body(Full::from(body)).unwrap()
    };
    for version in BOTH {
        let mut client = bed.client(version).await;
        assert_eq!(client.ask(create("else")).await.status, StatusCode::FORBIDDEN);
        assert_eq!(client.ask(create("lead")).await.status, StatusCode::OK);
    }
    assert_eq!(bed.written().len(), 2);
    assert_eq!(bed.counted("writes_refused").await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_given_back_is_written_over_the_same_connection() {
    for version in BOTH {
        let mut bed = Bed::new(owning(1, &[31]), &[]).await;
        let mut client = bed.client(version).await;
        let mut epoch = 1;
        for (slots, status) in [(&[9][..], StatusCode::FORBIDDEN), (&[9, 31], StatusCode::OK)] {
            epoch += 1;
            bed.stream.send(&owning(epoch, slots)).await;
            assert_eq!(bed.stream.verdict().await.epoch, epoch);
            assert_eq!(client.ask(request("PUT", &format!("{OWN}/w"))).await.status, status);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_is_led_over_before_the_acknowledgement() {
    for version in BOTH {
        let mut bed = Bed::new(owning(1, &[9, 31]), &PATIENT).await;
        let mut client = bed.client(version).await;
        let mut watch = get(WATCH);
        watch.headers_mut().insert("x-hold", HeaderValue::from_static("1"));
        let mut events = client.send(watch).await.unwrap().into_body();
        let _open = soon("the watch", bed.watches.recv()).await.unwrap();
        let reading = tokio::spawn(async move { while events.frame().await.is_some() {} });
        bed.stream.send(&owning(2, &[9])).await;
        // The list of what leaves.
        soon("a list", bed.held.recv()).await.unwrap();
        bed.until_refused(&format!("{OWN}/w")).await;
        assert!(bed.stream.is_silent());
        bed.release.notify_one();
        assert_eq!(bed.stream.verdict().await.epoch, 2);
        reading.abort();
    }
}
