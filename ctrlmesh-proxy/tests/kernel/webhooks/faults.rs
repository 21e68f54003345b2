//! An operator whose webhook server is not up.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time;

use super::bed::{A, B, IDLE, OF_A, OF_B, PORT, Webhooks, review};
use super::{who, without_certificate};
use crate::harness::until;

const PATIENCE: Duration = Duration::from_secs(30);

/// A caller keeps its connection. What the pod's network takes with it, no caller would learn of.
#[tokio::test(flavor = "multi_thread")]
async fn a_callers_connection_ends_with_the_server_of_the_pod() {
    // The review of another pod's object goes from proxy to proxy.
    for (namespace, connections) in [(OF_A, 1), (OF_B, 3)] {
        let mut pods = Webhooks::new().await;
        let (mut caller, review) = (pods.connect_tls().await, review("websites", namespace).to_string());
        let head = format!("POST /validate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", review.len());
        caller.write_all(&[head.as_bytes(), review.as_bytes()].concat()).await.unwrap();
        caller.read_u8().await.unwrap();
        let metric = format!("ctrlmesh_proxy_upstream_connections {connections}\n");
        until("connections to the pods' own servers", || async { pods.metrics().await.contains(&metric) }).await;
        pods.stop_servers().await;
        let ended = time::timeout(PATIENCE, caller.read_to_end(&mut Vec::new())).await;
        ended.expect("the end of the connection").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_callers_connection_outlives_what_an_idle_server_ends() {
    let pods = Webhooks::new().await;
    let caller = TokioIo::new(pods.connect_tls().await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(caller).await.unwrap();
    tokio::spawn(connection);
    for namespace in [OF_B, OF_A, OF_B] {
        sender.ready().await.unwrap();
        let request = Request::post("/validate").header("host", "localhost");
        let request = request.body(Full::<Bytes>::from(review("websites", namespace).to_string())).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        drop(answer.into_body().collect().await.unwrap());
        time::sleep(2 * IDLE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_server_or_certificate_connections_fail_as_without_us() {
    let mut pods = without_certificate().await;
    pods.stop_servers().await;
    let url = format!("https://{A}:{PORT}/");
    let (_, code) = pods.curl(&["--insecure", &url]).await;
    // Reset in the hello, by whoever listens there in place of the operator.
    assert!([7, 35, 52, 56].contains(&code), "{code}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_server_still_leads_to_the_owner() {
    let mut pods = Webhooks::new().await;
    pods.stop_servers().await;
    pods.serve("b", B);
    assert_eq!(who(&pods, A, &review("websites", OF_B)).await, "b");
    let (status, answer) = pods.call(A, "/validate", &review("websites", OF_A)).await;
    assert_eq!(status, 502, "{answer}");
    // The other way round it is asked in vain, and then the pod that was called answers, or nobody.
    assert_eq!(who(&pods, B, &review("websites", OF_A)).await, "b");
    assert_eq!(pods.answered("fallback", "ok").await, 1);
    let mut webhook = Webhooks::webhook(&pods.node, &json!([{"shard": "a", "addresses": [A]}]));
    webhook["onUnowned"] = json!("fail");
    pods.change("b", &super::policy(2, "b", &webhook)).await;
    let (status, answer) = pods.call(B, "/validate", &review("websites", OF_A)).await;
    let nobody = "ctrlmesh-proxy: no replica of shard \"a\", which owns the object, has answered\n";
    assert_eq!((status, answer), (502, json!(nobody)));
    pods.serve("a", A);
    assert_eq!(who(&pods, A, &review("websites", OF_A)).await, "a");
    assert_eq!(who(&pods, B, &review("websites", OF_A)).await, "a");
}
