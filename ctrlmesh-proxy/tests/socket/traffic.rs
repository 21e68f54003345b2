//! Counts of an operator's requests, as the manager hears of them.

use std::io;

use bytes::Bytes;
use ctrlmesh_common::wire::Traffic;
use http::{Request, StatusCode, Version};
use http_body_util::channel::Sender;
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task;

use crate::harness::client::Client;
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, streamed, whole};
use crate::harness::watches::json_content;
use crate::manager::{Manager, Stream};

/// In slot 31.
pub(crate) const OWN: &str = "/apis/example.com/v1/namespaces/own/widgets";
/// In slot 21, which belongs to another shard.
pub(crate) const OTHER: &str = "/apis/example.com/v1/namespaces/other/widgets";
pub(crate) const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/other/leases";

/// The policy of a pod that owns slot 31.
pub(crate) fn policy(epoch: u64, report_traffic: bool) -> Value {
    let widgets = json!([{"apiGroups": ["example.com"], "resources": ["widgets"]}]);
    json!({
        "epoch": epoch,
        "limits": [{"relateResources": widgets, "selector": "hash=31"}],
        "lock": {"namespace": "other", "name": "lead", "shard": "s1"},
        "fence": {"owner": "mine", "slots": {"31": "mine", "21": "theirs"}, "resources": widgets},
        "reportTraffic": report_traffic,
    })
}

/// An API server that answers with the status that is asked for.
async fn upstream(pki: &Pki) -> Upstream {
    Upstream::http(pki.server(&["h2", "http/1.1"]), |seen| async move {
        if seen.target.contains("watch=") {
            let (_over, mut response) = streamed();
            json_content(&mut response);
            return response;
        }
        let status = StatusCode::from_bytes(seen.headers["x-status"].as_bytes()).unwrap();
        let mut response = whole(status, seen.body);
        json_content(&mut response);
        response
    })
    .await
}

/// A proxy whose manager takes counts, and that has acknowledged a policy which does not ask for them.
pub(crate) async fn following(pki: &Pki, upstream: &Upstream) -> (Proxy, Manager, Stream) {
    let mut manager = Manager::start(pki).await;
    let flags = manager.flags(pki);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let telling = tokio::spawn(async move {
        let (mut stream, _) = manager.stream().await;
        stream.take_states().await;
        stream.send(&policy(1, false)).await;
        (manager, stream)
    });
    let proxy = task::block_in_place(|| Proxy::start(pki, upstream.address, &flags));
    let (manager, mut stream) = telling.await.unwrap();
    assert_eq!(stream.verdict().await.refused, "");
    (proxy, manager, stream)
}

/// Asks for everything that counts, and for what does not. The counts of it, without the latency.
async fn ask(pki: &Pki, proxy: &Proxy, version: Version) -> Traffic {
    let mut client = Client::connect(pki, proxy.address, version).await;
    let (own, lead) = (format!("{OWN}/w"), format!("{LEASES}/lead"));
    for (method, target, name, status) in [
        ("GET", OWN.to_owned(), "", 200),
        ("POST", OWN.to_owned(), "w", 201),
        ("PUT", own.clone(), "w", 200),
        ("PUT", own.clone(), "w", 409),
        ("PUT", own.clone(), "w", 422),
        ("PUT", own.clone(), "w", 500),
        ("PUT", format!("{own}?dryRun=All"), "w", 200),
        ("DELETE", own.clone(), "", 200),
        ("GET", own.clone(), "", 404),
        ("GET", own.clone(), "", 403),
        ("POST", "/api/v1/namespaces/own/secrets".to_owned(), "s", 201),
        ("POST", LEASES.to_owned(), "another", 201),
        // The lock, and what the proxy refuses.
        ("POST", LEASES.to_owned(), "lead", 201),
        ("PUT", lead.clone(), "lead", 409),
        ("GET", lead, "", 404),
        ("PUT", format!("{OTHER}/w"), "w", 200),
    ] {
        let body = if name.is_empty() { Bytes::new() } else { json!({"metadata": {"name": name}}).to_string().into() };
        let request = Request::builder().method(method).uri(&target).header("content-type", "application/json");
        let request = request.header("x-status", status).body(Full::new(body)).unwrap();
        let is_refused = target.starts_with(OTHER);
        let expected = if is_refused { 403 } else { status };
        assert_eq!(client.ask(request).await.status, expected, "{method} {target}");
    }
    let watch = Request::get("/apis/example.com/v1/widgets?watch=1").body(Full::default()).unwrap();
    assert_eq!(client.send(watch).await.unwrap().status(), StatusCode::OK);
    Traffic {
        since: 0,
        requests: 13,
        conflicts: 1,
        invalid: 1,
        client_errors: 1,
        server_errors: 1,
        writes: 3,
        deletes: 1,
        watches: 1,
        timed: 12,
        ..Traffic::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_the_api_server_count_while_the_policy_asks() {
    let pki = Pki::new();
    let upstream = upstream(&pki).await;
    let (proxy, _manager, mut stream) = following(&pki, &upstream).await;
    ask(&pki, &proxy, Version::HTTP_2).await;
    assert!(stream.is_silent());

    stream.send(&policy(2, true)).await;
    let begun = stream.traffic().await.traffic.unwrap();
    let nothing = Traffic { since: begun.since, first_writes: vec![0; 7], ..Traffic::default() };
    assert_eq!(begun, nothing, "it has begun to count");
    assert!(begun.since > 0);
    let one = ask(&pki, &proxy, Version::HTTP_11).await;
    let other = ask(&pki, &proxy, Version::HTTP_2).await;
    assert_eq!(one, other);
    // Counts are reported every 10 s.
    let counted = loop {
        let counted = stream.traffic().await.traffic.unwrap();
        if counted.requests >= 2 * one.requests {
            break counted;
        }
    };
    assert!(counted.latency_micros > 0);
    let expected = Traffic {
        first_writes: vec![0; 7],
        since: begun.since,
        requests: 2 * one.requests,
        conflicts: 2,
        invalid: 2,
        client_errors: 2,
        server_errors: 2,
        writes: 6,
        deletes: 2,
        watches: 2,
        latency_micros: counted.latency_micros,
        timed: 24,
        ..Traffic::default()
    };
    assert_eq!(counted, expected);

    stream.send(&policy(3, false)).await;
    let over = stream.traffic().await;
    assert_eq!((over.traffic, over.pod.unwrap().uid), (None, "u".to_owned()));
}

/// An API server that streams what is sent to the watches, and where another pod holds the lock.
async fn streaming(pki: &Pki) -> (Upstream, mpsc::UnboundedReceiver<Sender<Bytes, io::Error>>) {
    let (opened, watches) = mpsc::unbounded_channel();
    let upstream = Upstream::http(pki.server(&["h2"]), move |seen| {
        let mut response = match (seen.target.contains("watch="), seen.method.as_str()) {
            (true, _) => {
                let (send, response) = streamed();
                opened.send(send).unwrap();
                response
            }
            (_, "GET") => whole(StatusCode::OK, lease("other")),
            _ => whole(StatusCode::OK, seen.body),
        };
        json_content(&mut response);
        async move { response }
    })
    .await;
    (upstream, watches)
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_follow_changes_and_losses_of_the_lock_count() {
    let pki = Pki::new();
    let (upstream, mut watches) = streaming(&pki).await;
    let (proxy, _manager, mut stream) = following(&pki, &upstream).await;
    stream.send(&policy(2, true)).await;
    stream.traffic().await;
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;

    // From now on it is known that the pod writes widgets. Gadgets are not divided.
    put(&mut client, &format!("{OWN}/z"), "{}".into()).await;
    for (resource, names) in [("widgets", ["w", "v"]), ("gadgets", ["u", "t"])] {
        let target = format!("/apis/example.com/v1/{resource}?watch=1&resourceVersion=5");
        let mut watching = client.send(Request::get(target).body(Full::default()).unwrap()).await.unwrap();
        let mut send = watches.recv().await.unwrap();
        for name in names {
            let object = json!({"metadata": {"name": name, "namespace": "own", "resourceVersion": "6"}});
            let event = json!({"type": "MODIFIED", "object": object}).to_string() + "\n";
            send.send_data(event.into()).await.unwrap();
            watching.body_mut().frame().await.unwrap().unwrap();
        }
        put(&mut client, &format!("{OWN}/{}/status", names[0]), "{}".into()).await;
    }
    let lead = format!("{LEASES}/lead");
    put(&mut client, &lead, lease("me")).await;
    assert_eq!(client.ask(Request::get(&lead).body(Full::default()).unwrap()).await.status, StatusCode::OK);
    let counted = loop {
        let counted = stream.traffic().await.traffic.unwrap();
        if counted.lock_losses > 0 {
            break counted;
        }
    };
    let expected = Traffic {
        since: counted.since,
        requests: 5,
        writes: 3,
        watches: 2,
        latency_micros: counted.latency_micros,
        timed: 3,
        first_writes: vec![1, 0, 0, 0, 0, 0, 0],
        lock_losses: 1,
        ..Traffic::default()
    };
    assert_eq!(counted, expected);
}

async fn put(client: &mut Client, target: &str, body: Bytes) {
    let request = Request::put(target).header("content-type", "application/json").body(Full::new(body)).unwrap();
    assert_eq!(client.ask(request).await.status, StatusCode::OK);
}

/// The lock with this holder.
fn lease(holder: &str) -> Bytes {
    let metadata = json!({"name": "lead", "namespace": "other"});
    json!({"kind": "Lease", "metadata": metadata, "spec": {"holderIdentity": holder}}).to_string().into()
}
