//! The two spans of a request: the operator's to the proxy, and in it the proxy's to the API server.
//!
//! Both end with the head of the answer. A watch goes on for hours, and a span that ends then is of no use meanwhile.

use http::header::HeaderMap;
use http::{Response, StatusCode};
use opentelemetry::trace::{Link, Span as _, SpanContext, SpanId, SpanKind, Status, TraceId, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::Span;
use tracing::field::{DisplayValue, display};

use super::attributes::{self, Decision, RequestOrigin};
use super::{Tracer, child_of, context};
use crate::metrics::Outcome;

/// The spans of a request, until the head of its answer is there.
#[derive(Debug)]
pub struct RequestSpan {
    tracer: Tracer,
    /// Of the trace that the operator began, or else of one that the proxy begins.
    server: Span,
    /// Whether the proxy begins the trace.
    is_new: bool,
    /// While the API server is asked.
    upstream: Option<Span>,
    decision: Option<Decision>,
    is_answered: bool,
}

/// The trace of a request, for its log lines. Without one, they have no such fields.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoggedTrace(Option<(TraceId, SpanId)>);

impl Tracer {
    /// Begins the span of a request that has these `headers`.
    pub fn begin_request(&self, headers: &HeaderMap, of: &RequestOrigin<'_>) -> Box<RequestSpan> {
        let parent = context::read(headers);
        let links = of.connection.filter(|connection| connection.is_sampled()).map(|connection| {
            let none = Vec::new();
            vec![Link::new(connection.clone(), none, 0)]
        });
        let begun = self.0.span_builder(of.span_name()).with_kind(SpanKind::Server);
        let begun = begun.with_links(links.unwrap_or_default());
        let within = parent.as_ref().map_or_else(Context::new, child_of);
        let mut server = self.0.build_with_context(begun, &within);
        if server.is_recording() {
            server.set_attributes(of.attributes());
        }
        let (tracer, is_new) = (self.clone(), parent.is_none());
        Box::new(RequestSpan { tracer, server, is_new, upstream: None, decision: None, is_answered: false })
    }
}

impl RequestSpan {
    fn context(&self) -> &SpanContext {
        self.server.span_context()
    }

    /// The trace, where it is recorded.
    pub fn recorded_trace(&self) -> Option<TraceId> {
        self.context().is_sampled().then(|| self.context().trace_id())
    }

    pub fn logged(&self) -> LoggedTrace {
        LoggedTrace(Some((self.context().trace_id(), self.context().span_id())))
    }

    /// The request is about to be sent to the API server, with these `headers`.
    pub fn sent(&mut self, decision: Decision, headers: &mut HeaderMap) {
        let name = "ask the API server";
        let begun = self.tracer.0.span_builder(name).with_kind(SpanKind::Client);
        let upstream = self.tracer.0.build_with_context(begun, &child_of(self.context()));
        context::write(headers, upstream.span_context(), self.is_new);
        self.upstream = Some(upstream);
        self.decision = Some(decision);
    }

    /// The API server has answered, or could not be asked. Returns what it got: a borrow would keep it in the caller's
    /// future.
    pub fn received<T, E>(span: Option<&mut Self>, answered: Result<Response<T>, E>) -> Result<Response<T>, E> {
        if let Some(mut upstream) = span.and_then(|span| span.upstream.take()) {
            match &answered {
                Ok(response) => {
                    let status = response.status();
                    upstream.set_attribute(status_code(status));
                    if status.is_client_error() || status.is_server_error() {
                        set_error(&mut upstream, status.as_str().to_owned());
                    }
                }
                Err(_) => set_error(&mut upstream, "unanswered".to_owned()),
            }
            upstream.end();
        }
        answered
    }

    /// The request goes no further, by this decision.
    pub fn decided(&mut self, decision: Decision) {
        self.decision = Some(decision);
    }

    /// The head of the answer is there, by which the request `ended`.
    pub fn answered(&mut self, status: StatusCode, ended: Outcome) {
        self.is_answered = true;
        if !self.server.is_recording() {
            return;
        }
        let decision = self.decision.unwrap_or(Decision::Failed);
        self.server.set_attribute(status_code(status));
        self.server.set_attribute(KeyValue::new(attributes::DECISION, decision.name()));
        self.server.set_attribute(KeyValue::new(attributes::OUTCOME, ended.name()));
        if status.is_server_error() {
            set_error(&mut self.server, status.as_str().to_owned());
        }
        self.server.end();
    }
}

impl Drop for RequestSpan {
    /// Without an answer, the client has gone or its stream was reset.
    fn drop(&mut self) {
        if !self.is_answered && self.server.is_recording() {
            let decision = self.decision.unwrap_or(Decision::Failed);
            self.server.set_attribute(KeyValue::new(attributes::DECISION, decision.name()));
            self.server.set_attribute(KeyValue::new(attributes::OUTCOME, Outcome::Aborted.name()));
            self.server.end();
        }
    }
}

impl LoggedTrace {
    pub fn of(span: Option<&RequestSpan>) -> Self {
        span.map(RequestSpan::logged).unwrap_or_default()
    }

    pub fn trace_id(self) -> Option<DisplayValue<TraceId>> {
        self.0.map(|(trace, _)| display(trace))
    }

    pub fn span_id(self) -> Option<DisplayValue<SpanId>> {
        self.0.map(|(_, span)| display(span))
    }
}

fn status_code(status: StatusCode) -> KeyValue {
    KeyValue::new(attributes::STATUS, i64::from(status.as_u16()))
}

fn set_error(span: &mut Span, kind: String) {
    span.set_attribute(KeyValue::new(attributes::ERROR, kind));
    span.set_status(Status::error(""));
}
