//! Exemplars: for a series, the trace of one of the requests that it counts.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::SystemTime;

use opentelemetry::trace::TraceId;
use prometheus_client::encoding::MetricEncoder;
use prometheus_client::metrics::exemplar::CounterWithExemplar;

/// The label by which Prometheus and Grafana know a trace.
const TRACE_ID: &str = "trace_id";

pub(super) type TraceLabel = [(&'static str, String); 1];

/// The last request of a counter whose trace was recorded.
///
/// Only this type of prometheus-client makes exemplars of counters. What it counts by itself is not shown.
#[derive(Debug, Default)]
pub(super) struct LastTrace(CounterWithExemplar<TraceLabel, f64, AtomicU64>);

pub(super) fn label(trace: TraceId) -> TraceLabel {
    [(TRACE_ID, trace.to_string())]
}

impl LastTrace {
    /// Each request adds one to its counter.
    pub(super) fn set(&self, trace: TraceId) {
        self.0.inc_by(1.0, Some(label(trace)), Some(SystemTime::now()));
    }

    /// Writes a counter that stands at `count`.
    pub(super) fn encode(&self, count: u64, mut to: MetricEncoder<'_>) -> fmt::Result {
        let (_, exemplar) = self.0.get();
        to.encode_counter(&count, exemplar.as_ref())
    }
}
