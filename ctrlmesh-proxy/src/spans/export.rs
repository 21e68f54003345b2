//! The bounded queue from the serving threads to the collector.
//!
//! A span that finds the queue full is dropped and counted, and so are the spans of an export that fails. No request
//! waits. The queue ends once nobody can begin spans any more, and what is in it then is exported.

use std::mem;
use std::time::Duration;

use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::telemetry;
use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time;
use tokio::time::Instant;
use tracing::warn;

use super::collector::EXPORT_TIMEOUT;
use crate::metrics::{DroppedSpan, SpanMetrics};

/// Spans that wait for an export: about 4 MiB, and ten times as much where clients write values as long as may be.
const QUEUE_SPANS: usize = 4_096;

/// Spans in one export, which is what a collector takes in one message of some 500 KiB.
const BATCH_SPANS: usize = 512;

/// How long a batch may take to fill.
const FILL_TIME: Duration = Duration::from_secs(1);

/// For one export once shutdown has begun.
const LAST_EXPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Between two warnings that the collector takes nothing.
const WARNING_INTERVAL: Duration = Duration::from_mins(1);

/// Takes the spans that end.
#[derive(Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<SpanData>,
    metrics: SpanMetrics,
}

pub(super) fn queue(metrics: SpanMetrics) -> (Queue, mpsc::Receiver<SpanData>) {
    let (spans, received) = mpsc::channel(QUEUE_SPANS);
    (Queue { spans, metrics }, received)
}

impl SpanProcessor for Queue {
    fn on_start(&self, _span: &mut Span, _parent: &Context) {}

    fn on_end(&self, span: SpanData) {
        match self.spans.try_send(span) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.metrics.dropped(DroppedSpan::QueueFull, 1),
            Err(TrySendError::Closed(_)) => self.metrics.dropped(DroppedSpan::NotExported, 1),
        }
    }

    /// The export is not waited for: the queue outlives the tracer.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Exports the spans of a queue until the queue ends. During shutdown the first failed export ends it, too.
pub(super) async fn run(
    mut queue: mpsc::Receiver<SpanData>,
    exporter: impl SpanExporter,
    metrics: SpanMetrics,
    drain: Drain,
) {
    let mut warnings = Warnings::default();
    let mut batch = Vec::new();
    while fill(&mut batch, &mut queue, &drain).await {
        let timeout = if drain.has_started() { LAST_EXPORT_TIMEOUT } else { EXPORT_TIMEOUT };
        let number = batch.len();
        let done = time::timeout(timeout, exporter.export(mem::take(&mut batch))).await;
        let failed = match done {
            Ok(Ok(())) => {
                metrics.exported(number);
                continue;
            }
            Ok(Err(error)) => telemetry::chain(&error),
            Err(_elapsed) => format!("no answer within {timeout:?}"),
        };
        metrics.dropped(DroppedSpan::NotExported, number);
        warnings.failed(&failed);
        if drain.has_started() {
            queue.close();
            metrics.dropped(DroppedSpan::NotExported, queue.len());
            return;
        }
    }
}

/// Waits for spans, and then for a full batch for some time, which shutdown cuts short. False once the queue has ended.
async fn fill(batch: &mut Vec<SpanData>, queue: &mut mpsc::Receiver<SpanData>, drain: &Drain) -> bool {
    if queue.recv_many(batch, BATCH_SPANS).await == 0 {
        return false;
    }
    let full =
        async { while batch.len() < BATCH_SPANS && queue.recv_many(batch, BATCH_SPANS - batch.len()).await > 0 {} };
    tokio::select! {
        () = full => {}
        () = drain.started() => {}
        () = time::sleep(FILL_TIME) => {}
    }
    true
}

/// When the last warning was logged.
#[derive(Debug, Default)]
struct Warnings(Option<Instant>);

impl Warnings {
    fn failed(&mut self, error: &str) {
        if self.0.is_none_or(|last| last.elapsed() >= WARNING_INTERVAL) {
            self.0 = Some(Instant::now());
            warn!(error, "the collector takes no spans, so they are dropped");
        }
    }
}
