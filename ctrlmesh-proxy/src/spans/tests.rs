//! Spans as the queue to the collector gets them.

use std::time::Duration;

use http::header::HeaderMap;
use http::{HeaderValue, Response, StatusCode};
use opentelemetry::trace::{SpanKind, Status};
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::sync::mpsc;

use super::*;
use crate::metrics::{Metrics, Outcome};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn tracer(ratio: &str) -> (Tracer, mpsc::Receiver<SpanData>) {
    let (queue, spans) = export::queue(Metrics::new().spans.clone());
    (Tracer::new(ratio.parse().unwrap(), queue), spans)
}

fn origin() -> RequestOrigin<'static> {
    RequestOrigin { method: "GET", path: "/version", info: None, pod: "ops/op-0", shard: None, connection: None }
}

fn attribute(span: &SpanData, name: &str) -> Option<String> {
    let pair = span.attributes.iter().find(|pair| pair.key.as_str() == name)?;
    Some(pair.value.to_string())
}

#[test]
fn the_span_to_the_api_server_is_in_that_of_the_request() {
    let (tracer, mut spans) = tracer("1.0");
    let mut headers = HeaderMap::from_iter([(context::TRACEPARENT, HeaderValue::from_static(PARENT))]);
    let mut span = tracer.begin_request(&headers, &origin());
    span.sent(Decision::Passed, &mut headers);
    let answer = Response::builder().status(StatusCode::NOT_FOUND).body(()).unwrap();
    let _same = RequestSpan::received(Some(&mut span), Ok::<_, std::io::Error>(answer));
    span.answered(StatusCode::NOT_FOUND, Outcome::ClientError);
    let (client, server) = (spans.try_recv().unwrap(), spans.try_recv().unwrap());
    assert_eq!([&client.span_kind, &server.span_kind], [&SpanKind::Client, &SpanKind::Server]);
    assert_eq!(client.parent_span_id, server.span_context.span_id());
    assert_eq!(server.parent_span_id.to_string(), "00f067aa0ba902b7");
    assert!(matches!(client.status, Status::Error { .. }), "an error for who asked");
    assert_eq!(server.status, Status::Unset, "none of the proxy's");
    assert_eq!(attribute(&server, attributes::OUTCOME).as_deref(), Some("client_error"));
    let passed_on = context::read(&headers).unwrap();
    assert_eq!(passed_on.span_id(), client.span_context.span_id());
}

#[test]
fn a_request_without_an_answer_is_aborted() {
    let (tracer, mut spans) = tracer("1.0");
    let mut headers = HeaderMap::new();
    let mut span = tracer.begin_request(&headers, &origin());
    span.sent(Decision::Passed, &mut headers);
    drop(span);
    let spans = [spans.try_recv().unwrap(), spans.try_recv().unwrap()];
    let server = spans.iter().find(|span| span.span_kind == SpanKind::Server).unwrap();
    assert_eq!(attribute(server, attributes::OUTCOME).as_deref(), Some("aborted"));
    assert_eq!(attribute(server, attributes::DECISION).as_deref(), Some("passed"));
}

#[test]
fn a_request_that_got_nowhere_failed() {
    let (tracer, mut spans) = tracer("1.0");
    let mut span = tracer.begin_request(&HeaderMap::new(), &origin());
    span.answered(StatusCode::BAD_REQUEST, Outcome::Refused);
    drop(span);
    let server = spans.try_recv().unwrap();
    assert_eq!(attribute(&server, attributes::DECISION).as_deref(), Some("failed"));
    assert!(spans.try_recv().is_err(), "it ends once");
}

#[test]
fn a_trace_that_is_not_recorded_still_has_a_name() {
    let (tracer, mut spans) = tracer("0.0");
    let mut headers = HeaderMap::new();
    let mut span = tracer.begin_request(&headers, &origin());
    span.sent(Decision::Passed, &mut headers);
    assert_eq!(span.recorded_trace(), None);
    assert!(span.logged().trace_id().is_some());
    drop(span);
    assert!(spans.try_recv().is_err());
    assert!(!context::read(&headers).unwrap().is_sampled());
}

#[test]
fn about_the_wanted_share_of_traces_is_recorded() {
    let (tracer, _spans) = tracer("0.25");
    let recorded = |_: &usize| tracer.begin_request(&HeaderMap::new(), &origin()).recorded_trace().is_some();
    let number = (0..4_000).filter(recorded).count();
    assert!((700..1_300).contains(&number), "{number}");
}

#[test]
fn what_finds_the_queue_full_is_counted() {
    let metrics = Metrics::new();
    let (queue, spans) = export::queue(metrics.spans.clone());
    let tracer = Tracer::new(TraceRatio::default(), queue);
    for _ in 0..spans.max_capacity() + 3 {
        drop(tracer.begin_request(&HeaderMap::new(), &origin()));
    }
    let page = metrics.render().unwrap();
    assert!(page.contains("ctrlmesh_proxy_spans_dropped_total{reason=\"queue_full\"} 3"), "{page}");
}

/// A collector that answers with an error, or not at all.
#[derive(Debug)]
struct Deaf {
    answers: bool,
}

impl SpanExporter for Deaf {
    async fn export(&self, _batch: Vec<SpanData>) -> OTelSdkResult {
        if !self.answers {
            std::future::pending::<()>().await;
        }
        Err(OTelSdkError::InternalFailure("as asked".to_owned()))
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_does_not_wait_for_a_deaf_collector() {
    for answers in [true, false] {
        let (metrics, drain) = (Metrics::new(), Drain::default());
        let (queue, spans) = export::queue(metrics.spans.clone());
        drain.spawn(export::run(spans, Deaf { answers }, metrics.spans.clone(), drain.clone()));
        let tracer = Tracer::new(TraceRatio::default(), queue);
        for _ in 0..3_000 {
            drop(tracer.begin_request(&HeaderMap::new(), &origin()));
        }
        drop(tracer);
        assert!(drain.finish(Duration::from_secs(10)).await, "it ends by itself");
        let page = metrics.render().unwrap();
        assert!(page.contains("ctrlmesh_proxy_spans_dropped_total{reason=\"not_exported\"} 3000"), "{page}");
    }
}

#[test]
fn the_span_of_a_connection_ends_with_the_first_attempt() {
    let (tracer, mut spans) = tracer("1.0");
    let span = tracer.begin_connection(Duration::from_secs(2), true, "ops/op-0", Some("op-0"));
    span.reached("10.0.0.1", 443, &Err::<(), _>(std::io::Error::other("as asked")));
    span.reached("10.0.0.1", 443, &Ok::<_, std::io::Error>(()));
    let ended = spans.try_recv().unwrap();
    assert!(matches!(ended.status, Status::Error { .. }));
    assert!(ended.end_time.duration_since(ended.start_time).unwrap() >= Duration::from_secs(2));
    drop(span);
    assert!(spans.try_recv().is_err());
}
