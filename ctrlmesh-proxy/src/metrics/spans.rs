//! The metrics of the export of spans.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::ReasonLabels;

/// Why a span does not reach the collector.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DroppedSpan {
    /// The queue to the collector is full.
    QueueFull,
    /// The collector did not take it.
    NotExported,
}

/// In the order of [`DroppedSpan`].
const REASONS: [&str; 2] = ["queue_full", "not_exported"];

/// Counts spans that a collector took, and those that were dropped.
#[derive(Clone, Debug)]
pub struct SpanMetrics {
    exported: Counter,
    dropped: [Counter; REASONS.len()],
}

impl SpanMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let exported = Counter::default();
        registry.register("spans_exported", "Spans that the collector took", exported.clone());
        let family: Family<ReasonLabels, Counter> = Family::default();
        registry.register("spans_dropped", "Spans that did not reach the collector", family.clone());
        let dropped = REASONS.map(|reason| family.get_or_create_owned(&ReasonLabels { reason }));
        Self { exported, dropped }
    }

    pub fn exported(&self, number: usize) {
        self.exported.inc_by(number as u64);
    }

    pub fn dropped(&self, why: DroppedSpan, number: usize) {
        self.dropped[why as usize].inc_by(number as u64);
    }
}
