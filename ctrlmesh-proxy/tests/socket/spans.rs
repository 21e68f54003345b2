//! Spans of requests, as a collector gets them.

pub(crate) mod receiver;

use std::fs;

use http::{HeaderMap, HeaderValue, Request, StatusCode, Version};
use http_body_util::Full;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};

use self::receiver::{Receiver, hex, value};
use crate::harness::client::{Client, get};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::harness::upstream::{Upstream, whole};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];
const PODS: &str = "/api/v1/namespaces/shop/pods";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const DROPPED: &str = "ctrlmesh_proxy_spans_dropped_total{reason=\"not_exported\"}";

/// An API server, a collector, and a proxy that sends spans to it.
struct Bed {
    pki: Pki,
    upstream: Upstream,
    receiver: Receiver,
    proxy: Proxy,
}

impl Bed {
    async fn new(policy: &Value, more: &[&str]) -> Self {
        let pki = Pki::new();
        let upstream = upstream(&pki).await;
        let receiver = Receiver::start(None).await;
        fs::write(pki.path("policy"), policy.to_string()).unwrap();
        let (policy, url) = (pki.path("policy"), format!("http://{}", receiver.address));
        let flags = ["--policy", policy.to_str().unwrap(), "--pod", "ops/op-0", "--otlp-endpoint", &url];
        let proxy = Proxy::start(&pki, upstream.address, &[&flags[..], more].concat());
        Self { pki, upstream, receiver, proxy }
    }

    async fn ask(&self, version: Version, target: &str, headers: &[(&'static str, &str)]) -> StatusCode {
        self.send(version, with(get(target), headers)).await
    }

    async fn send(&self, version: Version, request: Request<Full<bytes::Bytes>>) -> StatusCode {
        Client::connect(&self.pki, self.proxy.address, version).await.ask(request).await.status
    }
}

async fn upstream(pki: &Pki) -> Upstream {
    Upstream::http(pki.server(&["h2", "http/1.1"]), |_| async { whole(StatusCode::OK, "{}") }).await
}

fn with(mut request: Request<Full<bytes::Bytes>>, headers: &[(&'static str, &str)]) -> Request<Full<bytes::Bytes>> {
    for (name, value) in headers {
        request.headers_mut().append(*name, HeaderValue::from_str(value).unwrap());
    }
    request
}

/// A policy of the shard `s1`, which sees only some pods.
pub(crate) fn policy() -> Value {
    json!({
        "epoch": 1,
        "limits": [{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": "team=a"}],
        "lock": {"namespace": "ops", "name": "lead", "shard": "s1"},
    })
}

/// Trace, parent and flags that the API server got.
fn passed_on(headers: &HeaderMap) -> [String; 3] {
    let parent = headers["traceparent"].to_str().unwrap();
    let fields: Vec<&str> = parent.split('-').collect();
    assert_eq!((fields.len(), fields[0]), (4, "00"), "{parent}");
    [fields[1], fields[2], fields[3]].map(str::to_owned)
}

fn values<const N: usize>(span: &Span, names: [&str; N]) -> [Option<String>; N] {
    names.map(|name| value(span, name))
}

#[tokio::test]
async fn a_trace_of_the_operator_is_continued() {
    for version in BOTH {
        let bed = Bed::new(&policy(), &[]).await;
        let parent = format!("00-{TRACE}-{PARENT}-01");
        bed.ask(version, PODS, &[("traceparent", &parent), ("tracestate", "a=1"), ("tracestate", "b=2")]).await;
        let (server, client) = bed.receiver.request(PODS).await;
        let client = client.unwrap();
        assert_eq!((hex(&server.trace_id), hex(&server.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
        assert_eq!([server.kind(), client.kind()], [SpanKind::Server, SpanKind::Client]);
        let sent = bed.upstream.last().headers;
        assert_eq!(passed_on(&sent), [TRACE.to_owned(), hex(&client.span_id), "01".to_owned()], "{version:?}");
        let states: Vec<_> = sent.get_all("tracestate").iter().collect();
        assert_eq!(states, ["a=1", "b=2"]);
        assert_eq!(bed.receiver.service(), "ctrlmesh-proxy");
    }
}

#[tokio::test]
async fn a_request_shows_shard_verb_resource_and_decision() {
    let bed = Bed::new(&policy(), &[]).await;
    bed.ask(Version::HTTP_2, &format!("{PODS}?limit=500&labelSelector=x%3D1"), &[]).await;
    bed.ask(Version::HTTP_2, "/version", &[]).await;
    let (server, client) = bed.receiver.request(PODS).await;
    assert_eq!(server.name, "list pods");
    let names = ["ctrlmesh.shard", "k8s.request.verb", "k8s.request.resource", "k8s.request.label_selector"];
    assert_eq!(values(&server, names), ["s1", "list", "pods", "x=1"].map(|text| Some(text.to_owned())));
    let names = ["ctrlmesh.decision", "ctrlmesh.outcome", "http.response.status_code", "k8s.pod.name"];
    assert_eq!(values(&server, names), ["rewritten", "ok", "200", "op-0"].map(|text| Some(text.to_owned())));
    assert_eq!(value(&client.unwrap(), "http.response.status_code").as_deref(), Some("200"));
    let (server, _) = bed.receiver.request("/version").await;
    assert_eq!(value(&server, "ctrlmesh.decision").as_deref(), Some("passed"));
}

#[tokio::test]
async fn a_trace_is_begun_where_the_operators_is_malformed() {
    let bed = Bed::new(&policy(), &[]).await;
    let malformed = format!("00-{TRACE}-{PARENT}-1");
    bed.ask(Version::HTTP_2, PODS, &[("traceparent", &malformed), ("tracestate", "a=1")]).await;
    let (server, client) = bed.receiver.request(PODS).await;
    assert!(server.parent_span_id.is_empty());
    assert_ne!(hex(&server.trace_id), TRACE);
    let sent = bed.upstream.last().headers;
    let own = [hex(&server.trace_id), hex(&client.unwrap().span_id), "01".to_owned()];
    assert_eq!((passed_on(&sent), sent.get("tracestate")), (own, None), "a state belongs to its trace");
}

#[tokio::test]
async fn the_operators_decision_to_record_is_followed() {
    let bed = Bed::new(&policy(), &["--trace-ratio", "0"]).await;
    let parent = |flags: &str| format!("00-{TRACE}-{PARENT}-{flags}");
    bed.ask(Version::HTTP_2, PODS, &[("traceparent", &parent("00"))]).await;
    let [trace, span, flags] = passed_on(&bed.upstream.last().headers);
    assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "00"));
    assert_ne!(span, PARENT);
    bed.ask(Version::HTTP_2, PODS, &[]).await;
    let [trace, _, flags] = passed_on(&bed.upstream.last().headers);
    assert_eq!(flags, "00", "of {trace}, which the proxy begins");
    bed.ask(Version::HTTP_2, "/version", &[("traceparent", &parent("01"))]).await;
    bed.receiver.request("/version").await;
    let spans = bed.receiver.spans();
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE), "{spans:?}");
    assert!(spans.iter().all(|span| value(span, "url.path").as_deref() != Some(PODS)), "{spans:?}");
}

#[tokio::test]
async fn a_refused_request_has_no_span_to_the_api_server() {
    let bed = Bed::new(&policy(), &[]).await;
    let method = Request::builder().method("BREW").uri(PODS).body(Full::default()).unwrap();
    let status = bed.send(Version::HTTP_11, method).await;
    assert!(status.is_client_error(), "{status}");
    let (server, client) = bed.receiver.request(PODS).await;
    let names = ["ctrlmesh.decision", "ctrlmesh.outcome", "http.response.status_code"];
    let expected = ["refused", "refused", status.as_str()].map(|text| Some(text.to_owned()));
    assert_eq!((values(&server, names), client), (expected, None));
    assert!(bed.upstream.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_request_that_a_fault_answers_says_so() {
    let mut policy = policy();
    let abort = json!({"status": 503, "share": 1_000_000_000});
    policy["faults"] = json!([{"injection": "ops/storm", "fault": "0", "abort": abort}]);
    let bed = Bed::new(&policy, &[]).await;
    assert_eq!(bed.ask(Version::HTTP_2, PODS, &[]).await, StatusCode::SERVICE_UNAVAILABLE);
    let (server, client) = bed.receiver.request(PODS).await;
    let names = ["ctrlmesh.decision", "ctrlmesh.outcome", "error.type"];
    assert_eq!((values(&server, names), client), (["fault", "refused", "503"].map(|it| Some(it.to_owned())), None));
}

#[tokio::test]
async fn a_connection_has_a_span_that_its_requests_name() {
    let bed = Bed::new(&policy(), &[]).await;
    bed.ask(Version::HTTP_2, PODS, &[]).await;
    let connection = bed.receiver.span(|span| span.name == "connect").await;
    let (server, _) = bed.receiver.request(PODS).await;
    assert_eq!(server.links.len(), 1);
    assert_eq!(server.links[0].span_id, connection.span_id);
    assert_ne!(server.trace_id, connection.trace_id);
    let names = ["server.address", "server.port", "network.protocol.version", "ctrlmesh.shard"];
    let port = bed.upstream.address.port().to_string();
    assert_eq!(values(&connection, names), ["127.0.0.1", &port, "2", "s1"].map(|text| Some(text.to_owned())));
    let (begun, reached) = (connection.start_time_unix_nano, connection.end_time_unix_nano);
    assert!(begun < server.start_time_unix_nano && reached > server.start_time_unix_nano);
}

#[tokio::test]
async fn log_lines_and_metrics_show_the_trace() {
    let bed = Bed::new(&policy(), &[]).await;
    let method = Request::builder().method("BREW").uri(PODS).body(Full::default()).unwrap();
    let parent = format!("00-{TRACE}-{PARENT}-01");
    bed.send(Version::HTTP_11, with(method, &[("traceparent", &parent)])).await;
    bed.ask(Version::HTTP_11, PODS, &[("traceparent", &parent)]).await;
    let server = bed.receiver.span(|span| value(span, "ctrlmesh.decision").as_deref() == Some("refused")).await;
    until("the log line", || async { bed.proxy.log().contains("request failed") }).await;
    let log = bed.proxy.log();
    let line = log.lines().find(|line| line.contains("request failed")).unwrap();
    let line: Value = serde_json::from_str(line).unwrap();
    assert_eq!((&line["trace_id"], &line["span_id"]), (&json!(TRACE), &json!(hex(&server.span_id))), "{line}");
    for series in ["pod_requests_total", "pod_request_seconds_bucket", "added_seconds_bucket"] {
        let exemplar = format!("# {{trace_id=\"{TRACE}\"}}");
        let series = format!("ctrlmesh_proxy_{series}");
        until(&format!("an exemplar of {series}"), || async {
            bed.proxy.page().await.lines().any(|line| line.starts_with(&series) && line.contains(&exemplar))
        })
        .await;
    }
}

#[tokio::test]
async fn spans_reach_a_collector_over_tls() {
    let pki = Pki::new();
    let upstream = upstream(&pki).await;
    let receiver = Receiver::start(Some(pki.server(&["h2"]))).await;
    let url = format!("https://{}", receiver.address);
    let ca = pki.path("real.crt");
    let flags = ["--otlp-endpoint", &url, "--otlp-ca", ca.to_str().unwrap()];
    let proxy = Proxy::start(&pki, upstream.address, &flags);
    Client::connect(&pki, proxy.address, Version::HTTP_2).await.get("/version").await;
    receiver.request("/version").await;
}

#[tokio::test]
async fn what_has_ended_is_exported_before_the_proxy_ends() {
    let bed = Bed::new(&policy(), &[]).await;
    bed.ask(Version::HTTP_2, PODS, &[]).await;
    bed.proxy.terminate();
    assert!(bed.proxy.ended().await.success());
    assert!(bed.receiver.spans().iter().any(|span| value(span, "url.path").as_deref() == Some(PODS)));
}

#[tokio::test]
async fn a_collector_that_is_away_costs_one_warning() {
    let pki = Pki::new();
    let upstream = upstream(&pki).await;
    let nobody = { tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap() };
    let proxy = Proxy::start(&pki, upstream.address, &["--otlp-endpoint", &format!("http://{nobody}")]);
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    for exports in 1..3 {
        assert_eq!(client.get("/version").await.status, StatusCode::OK);
        let spans = f64::from(exports * 2);
        until("the spans to be dropped", || async { proxy.metric(DROPPED).await >= spans }).await;
    }
    assert_eq!(proxy.log().matches("the collector takes no spans").count(), 1, "{}", proxy.log());
    proxy.terminate();
    assert!(proxy.ended().await.success());
}

#[tokio::test]
async fn without_a_collector_the_context_passes_untouched() {
    let pki = Pki::new();
    let upstream = upstream(&pki).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    let request = with(get(PODS), &[("traceparent", "whatever it is"), ("tracestate", "a=1")]);
    client.ask(request).await;
    let sent = upstream.last().headers;
    assert_eq!(
        (&sent["traceparent"], &sent["tracestate"]),
        (&"whatever it is".parse().unwrap(), &"a=1".parse().unwrap())
    );
    client.get(PODS).await;
    assert!(!upstream.last().headers.contains_key("traceparent"));
    let page = proxy.page().await;
    assert!(!page.contains("trace_id"), "{page}");
}
