//! The span of a client's connection: from when it was accepted until the API server is reached for it.

use std::cell::RefCell;
use std::error::Error;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{Span as _, SpanContext, SpanKind, Status, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::Span;

use super::Tracer;
use super::attributes;

/// A trace of its own, to which the spans of its requests have a link: a connection serves many traces.
#[derive(Debug)]
pub struct ConnectionSpan {
    context: SpanContext,
    /// `None` once it has ended.
    span: RefCell<Option<Span>>,
}

impl Tracer {
    /// Begins the span of a connection of `pod` that was accepted some time `ago`.
    pub fn begin_connection(&self, ago: Duration, http2: bool, pod: &str, shard: Option<&str>) -> Rc<ConnectionSpan> {
        let now = SystemTime::now();
        let begun = self.0.span_builder("connect").with_kind(SpanKind::Internal);
        let begun = begun.with_start_time(now.checked_sub(ago).unwrap_or(now));
        let mut span = self.0.build_with_context(begun, &Context::new());
        if span.is_recording() {
            span.set_attributes(attributes::of_pod(pod, shard));
            let version = if http2 { "2" } else { "1.1" };
            span.set_attribute(KeyValue::new(attributes::PROTOCOL_VERSION, version));
        }
        Rc::new(ConnectionSpan { context: span.span_context().clone(), span: RefCell::new(Some(span)) })
    }
}

impl ConnectionSpan {
    pub fn context(&self) -> &SpanContext {
        &self.context
    }

    /// The first attempt to reach the API server at `host` and `port` has ended. Later ones are no part of the span.
    pub fn reached<T, E: Error>(&self, host: &str, port: u16, done: &Result<T, E>) {
        let Some(mut span) = self.span.take() else { return };
        span.set_attribute(KeyValue::new(attributes::SERVER_ADDRESS, host.to_owned()));
        span.set_attribute(KeyValue::new(attributes::SERVER_PORT, i64::from(port)));
        if let Err(error) = done {
            span.set_status(Status::error(error.to_string()));
        }
        span.end();
    }
}
