//! An operator whose webhook server is not up.

use serde_json::json;

use super::bed::{A, B, OF_A, OF_B, PORT, Webhooks, review};
use super::{who, without_certificate};

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
