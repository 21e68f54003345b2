//! A pod whose writes are dry runs, and what the manager hears of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use ctrlmesh_common::wire::{Shadow, ShadowDifference};
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::harness::client::Client;
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{ReceivedRequest, Upstream, whole};
use crate::harness::watches::json_content;
use crate::manager::Stream;
use crate::traffic::{LEASES, OTHER, OWN, following, policy};

/// The objects of an API server, by path.
type Objects = Arc<Mutex<HashMap<String, Value>>>;

fn widget(name: &str, size: u32) -> Value {
    json!({"metadata": {"name": name, "uid": name, "resourceVersion": "7"}, "spec": {"size": size}})
}

/// An API server that makes dry runs of writes, and remembers which writes were none.
async fn upstream(pki: &Pki, objects: &Objects, stored: &Arc<Mutex<Vec<String>>>) -> Upstream {
    let (objects, stored) = (objects.clone(), stored.clone());
    Upstream::http(pki.server(&["h2", "http/1.1"]), move |seen| {
        let (objects, stored) = (objects.clone(), stored.clone());
        async move {
            let path = seen.target.split('?').next().unwrap().to_owned();
            let object = objects.lock().unwrap().get(&path).cloned();
            let body: Value = serde_json::from_slice(&seen.body).unwrap_or_default();
            if seen.method != "GET" && !is_dry_run(&seen, &body) {
                stored.lock().unwrap().push(format!("{} {}", seen.method, seen.target));
            }
            let (status, answer) = match (seen.method.as_str(), object) {
                _ if body["spec"]["size"] == 0 => (StatusCode::UNPROCESSABLE_ENTITY, json!({"kind": "Status"})),
                ("POST", _) => (StatusCode::CREATED, body),
                ("PUT", _) => (StatusCode::OK, body),
                (_, Some(object)) => (StatusCode::OK, object),
                (_, None) => (StatusCode::NOT_FOUND, json!({"kind": "Status"})),
            };
            let mut response = whole(status, answer.to_string());
            json_content(&mut response);
            response
        }
    })
    .await
}

/// As an API server reads it: where there is a body of options, the query does not count.
fn is_dry_run(seen: &ReceivedRequest, body: &Value) -> bool {
    let in_query = seen.target.contains("dryRun=All");
    if seen.method == "DELETE" && !seen.body.is_empty() { body["dryRun"] == json!(["All"]) } else { in_query }
}

async fn ask(client: &mut Client, method: &str, target: &str, body: &Value, expected: u16) {
    let bytes = if body.is_null() { Bytes::new() } else { body.to_string().into() };
    let request = Request::builder().method(method).uri(target).header("content-type", "application/json");
    let accept = "application/vnd.kubernetes.protobuf,application/json";
    let answer = client.ask(request.header("accept", accept).body(Full::new(bytes)).unwrap()).await;
    assert_eq!(answer.status, expected, "{method} {target}: {answer:?}");
}

/// The report in which every write has its result.
async fn reported(stream: &mut Stream, intended: u64) -> Shadow {
    loop {
        let Some(shadow) = stream.traffic().await.traffic.and_then(|traffic| traffic.shadow) else { continue };
        let known = shadow.equal + shadow.different + shadow.refused + shadow.unknown;
        if shadow.intended >= intended && known == shadow.intended {
            return shadow;
        }
    }
}

fn difference(verb: &str, namespace: &str, name: &str, fields: &[&str]) -> ShadowDifference {
    ShadowDifference {
        verb: verb.to_owned(),
        resource: "widgets.example.com".to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        fields: fields.iter().map(|field| (*field).to_owned()).collect(),
    }
}

/// Writes as an operator does, and what it is answered.
async fn write_all(client: &mut Client) {
    let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
    for (method, target, body, status) in [
        ("PUT", own("same"), widget("same", 1), 200),
        ("PUT", own("later"), widget("later", 2), 200),
        ("PUT", own("differs"), widget("differs", 3), 200),
        // The second waits for the first.
        ("PUT", own("differs"), widget("differs", 3), 200),
        ("PUT", own("refused"), widget("refused", 0), 422),
        ("POST", OWN.to_owned(), widget("new", 4), 201),
        ("POST", OWN.to_owned(), json!({"metadata": {"name": "x-1", "generateName": "x-"}}), 201),
        ("DELETE", own("kept"), options.clone(), 200),
        ("DELETE", own("gone"), options.clone(), 200),
        ("DELETE", format!("{OTHER}/kept"), Value::Null, 200),
        // What does not count.
        ("PUT", format!("{}?dryRun=All", own("same")), widget("same", 9), 200),
        ("POST", "/api/v1/namespaces/own/events".to_owned(), json!({"metadata": {"name": "e"}}), 201),
        ("POST", "/api/v1/namespaces/own/pods/p/exec".to_owned(), Value::Null, 403),
        ("DELETE", own("kept"), json!("no options"), 415),
    ] {
        ask(client, method, &target, &body, status).await;
    }
}

fn own(name: &str) -> String {
    format!("{OWN}/{name}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_stores_nothing_and_its_writes_are_compared() {
    let pki = Pki::new();
    let (objects, stored) = (Objects::default(), Arc::new(Mutex::new(Vec::new())));
    let put = |path: &str, object: Value| objects.lock().unwrap().insert(path.to_owned(), object);
    for name in ["same", "later", "differs", "kept", "gone"] {
        put(&own(name), widget(name, 1));
    }
    put(&format!("{OTHER}/kept"), widget("kept", 1));
    let upstream = upstream(&pki, &objects, &stored).await;
    let (proxy, _manager, mut stream): (Proxy, _, _) = following(&pki, &upstream).await;
    let mut shadow = policy(2, true);
    shadow["shadow"] = json!(true);
    stream.send(&shadow).await;
    drop(stream.traffic().await);
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    write_all(&mut client).await;
    assert_eq!(*stored.lock().unwrap(), [""; 0]);
    // Its own lock is real, and so are questions.
    let lead = json!({"metadata": {"name": "lead", "resourceVersion": "1"}});
    ask(&mut client, "PUT", &format!("{LEASES}/lead"), &lead, 200).await;
    let review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    ask(&mut client, "POST", review, &json!({"spec": {}}), 201).await;
    let real = [format!("PUT {LEASES}/lead---s1"), format!("POST {review}")];
    assert_eq!(*stored.lock().unwrap(), real);

    // Meanwhile the old version writes.
    put(&own("later"), json!({"metadata": {"name": "later", "resourceVersion": "8"}, "spec": {"size": 2}}));
    objects.lock().unwrap().remove(&own("gone"));
    let mut report = reported(&mut stream, 10).await;
    report.differences.sort_by_key(|one| (one.verb.clone(), one.namespace.clone()));
    let expected = Shadow {
        intended: 10,
        equal: 3,
        different: 5,
        refused: 1,
        unknown: 1,
        differences: vec![
            difference("create", "own", "new", &["spec.size: is absent, meant 4"]),
            difference("delete", "other", "kept", &[]),
            difference("delete", "own", "kept", &[]),
            difference("update", "own", "differs", &["spec.size: is 1, meant 3"]),
        ],
    };
    assert_eq!(report, expected);
}
