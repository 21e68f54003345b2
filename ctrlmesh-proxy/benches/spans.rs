//! What do spans cost a request: where there are none, where its trace is not recorded, and where it is?
//!
//! `cargo bench -p ctrlmesh-proxy --bench spans [-- [--quick]]`. Each figure is the median of the rounds, in
//! nanoseconds a request, with the least and the greatest. A request takes the steps of the request path: its span
//! begins, it is sent on, answered, and counted with its trace. Nobody takes the recorded spans, so that most of them
//! are dropped.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, or panics")]
#![allow(clippy::cast_precision_loss, reason = "what is counted is far below 2^52")]

use std::env;
use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_proxy::metrics::{Metrics, Outcome, Verb};
use ctrlmesh_proxy::spans::{Decision, LoggedTrace, RequestOrigin, RequestSpan, SpanArgs, Tracer};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::drain::Drain;
use http::header::HeaderMap;
use http::{Response, StatusCode};

const ROUNDS: usize = 21;

/// Nobody listens there.
const COLLECTOR: &str = "http://127.0.0.1:1";

const TARGET: &str = "/apis/example.com/v1/namespaces/shop/widgets?labelSelector=a%3Db&limit=500";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    // `cargo test --benches` only builds.
    if arguments.iter().any(|argument| argument == "--test") {
        return;
    }
    let times = if arguments.iter().any(|argument| argument == "--quick") { 2_000 } else { 100_000 };
    let drain = Drain::default();
    println!("ns a request             | median (least to most)");
    for (name, collector, ratio) in
        [("no spans", None, "1"), ("not recorded", Some(COLLECTOR), "0"), ("recorded", Some(COLLECTOR), "1")]
    {
        let metrics = Metrics::with_exemplars(collector.is_some());
        let args = SpanArgs {
            otlp_endpoint: collector.map(|url| url.parse().unwrap()),
            trace_ratio: ratio.parse().unwrap(),
            ..SpanArgs::default()
        };
        let tracer = Tracer::start(&args, &metrics.spans, &drain).unwrap();
        let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round(tracer.as_ref(), &metrics, times)).collect();
        rounds.sort_by(f64::total_cmp);
        println!("{name:<24} | {:.0} ({:.0} to {:.0})", rounds[ROUNDS / 2], rounds[0], rounds[ROUNDS - 1]);
    }
    drain.finish(Duration::from_secs(10)).await;
}

/// The nanoseconds that spans and exemplars add to a request.
fn round(tracer: Option<&Tracer>, metrics: &Arc<Metrics>, times: usize) -> f64 {
    let requests = metrics.pods.requests("ops/operator-0");
    let resource = requests.resource("example.com", "widgets");
    let info = RequestInfo::parse("GET", TARGET).unwrap();
    let (path, verb, mut headers) = (info.path().to_owned(), Verb::of("list"), HeaderMap::new());
    let begun = Instant::now();
    for _ in 0..times {
        let mut span = black_box(tracer).map(|tracer| {
            let (pod, shard) = (requests.pod(), Some("operator-0"));
            let origin = RequestOrigin { method: "GET", path: &path, info: Some(&info), pod, shard, connection: None };
            headers.clear();
            tracer.begin_request(&headers, &origin)
        });
        let trace = span.as_deref().and_then(RequestSpan::recorded_trace);
        if let Some(span) = span.as_deref_mut() {
            span.sent(Decision::Rewritten, &mut headers);
        }
        let _answer = RequestSpan::received(span.as_deref_mut(), Ok::<_, io::Error>(Response::new(())));
        black_box(LoggedTrace::of(span.as_deref()));
        if let Some(mut span) = span {
            span.answered(StatusCode::OK, Outcome::Ok);
        }
        requests.answered_after(verb, Duration::from_millis(3), black_box(trace));
        metrics.added(Duration::from_micros(30), trace);
        resource.ended(verb, Outcome::Ok, trace);
    }
    begun.elapsed().as_nanos() as f64 / times as f64
}
