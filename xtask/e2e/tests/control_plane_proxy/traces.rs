//! Traces from a client through the proxy, as a real collector writes them.

use http::{HeaderValue, StatusCode, Version};
use serde_json::json;

use crate::bed::{Bed, write_policy_with};
use crate::collector::{Collector, WrittenSpan};
use crate::harness::client::Client;
use crate::harness::proxy::Proxy;
use crate::harness::until;

/// The trace of a client, by its number.
fn trace(number: u128) -> String {
    format!("4bf92f3577b34da6a3ce929d{number:08x}")
}

const PARENT: &str = "00f067aa0ba902b7";

/// Asks for `target` within a trace.
async fn ask(bed: &Bed, proxy: &Proxy, number: u128, target: &str, version: Version) -> StatusCode {
    let mut request = bed.get(target, "application/json");
    let context = format!("00-{}-{PARENT}-01", trace(number));
    request.headers_mut().insert("traceparent", HeaderValue::from_str(&context).unwrap());
    Client::connect(&bed.pki, proxy.address, version).await.ask(request).await.status
}

/// The span of the request in a trace, once all of its attributes are there.
async fn of_request(collector: &Collector, number: u128) -> WrittenSpan {
    let (trace, kind) = (trace(number), "Server");
    let is_whole = |span: &WrittenSpan| span.attributes.contains_key("ctrlmesh.outcome");
    collector.span(|span| span.fields["Trace ID"] == trace && span.fields["Kind"] == kind && is_whole(span)).await
}

fn shown<const N: usize>(span: &WrittenSpan, names: [&str; N]) -> [String; N] {
    names.map(|name| span.attributes.get(name).cloned().unwrap_or_default())
}

#[tokio::test]
async fn a_clients_traces_reach_a_real_collector() {
    let bed = Bed::new().await;
    let collector = Collector::start().await;
    bed.create("one", 5).await;
    let selector = "slot in (5,6)";
    let fields = json!({"epoch": 1, "lock": {"namespace": bed.namespace, "name": "lead", "shard": "op-0"}});
    write_policy_with(&bed.pki, "policy", selector, &fields);
    let (policy, url) = (bed.pki.path("policy"), format!("http://{}", collector.address));
    let pod = format!("{}/operator-0", bed.namespace);
    let flags = ["--policy", policy.to_str().unwrap(), "--pod", &pod, "--otlp-endpoint", &url];
    let proxy = Proxy::start(&bed.pki, bed.upstream(), &flags);

    let list = bed.config_maps();
    assert_eq!(ask(&bed, &proxy, 1, &list, Version::HTTP_2).await, StatusCode::OK);
    let of_another = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases/lead---op-1", bed.namespace);
    assert_eq!(ask(&bed, &proxy, 2, &of_another, Version::HTTP_11).await, StatusCode::FORBIDDEN);
    let missing = format!("/api/v1/namespaces/{}/secrets/none", bed.namespace);
    assert_eq!(ask(&bed, &proxy, 3, &missing, Version::HTTP_2).await, StatusCode::NOT_FOUND);

    let names = ["ctrlmesh.shard", "k8s.request.verb", "k8s.request.resource", "ctrlmesh.decision", "ctrlmesh.outcome"];
    let cases = [
        (1, ["op-0", "list", "configmaps", "rewritten", "ok"], &list, "200"),
        (2, ["op-0", "get", "leases", "refused", "refused"], &of_another, "403"),
        (3, ["op-0", "get", "secrets", "passed", "client_error"], &missing, "404"),
    ];
    for (number, expected, path, status) in cases {
        let span = of_request(&collector, number).await;
        assert_eq!(shown(&span, names), expected.map(str::to_owned), "{span:?}");
        assert_eq!(span.fields["Parent ID"], PARENT);
        assert_eq!(shown(&span, ["url.path", "http.response.status_code"]), [path.clone(), status.to_owned()]);
        assert_eq!(shown(&span, ["k8s.namespace.name", "k8s.pod.name"]), [bed.namespace.as_str(), "operator-0"]);
        let asked = collector.spans().into_iter().find(|client| client.fields["Parent ID"] == span.fields["ID"]);
        assert_eq!(asked.map(|client| client.fields["Kind"].clone()), (number != 2).then(|| "Client".to_owned()));
    }
    collector.span(|span| span.fields["Name"] == "connect").await;
    until("all spans to be exported", || async { proxy.metric("ctrlmesh_proxy_spans_exported_total").await >= 8.0 })
        .await;
    for reason in ["queue_full", "not_exported"] {
        let dropped = proxy.metric(&format!("ctrlmesh_proxy_spans_dropped_total{{reason=\"{reason}\"}}")).await;
        assert_eq!(dropped, 0.0, "{reason}");
    }
}
