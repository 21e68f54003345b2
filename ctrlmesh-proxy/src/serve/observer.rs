//! Follows one request for its spans, and for those who trace its pod live.

use std::error::Error;

use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::telemetry;
use http::uri::PathAndQuery;
use http::{HeaderMap, Request, Response, StatusCode};
use opentelemetry::trace::TraceId;

use crate::metrics::Outcome;
use crate::net::body::Relay;
use crate::serve::failure::Failure;
use crate::session::Session;
use crate::spans::{ConnectionSpan, Decision, LoggedTrace, RequestOrigin, RequestSpan};
use crate::trace::LiveRequest;

/// What follows a request.
#[derive(Debug)]
pub(super) struct Observer {
    span: Option<Box<RequestSpan>>,
    live: Option<Box<LiveRequest>>,
}

impl Session {
    /// Begins to follow a request. `None` where no spans are made, and nobody traces its pod.
    pub(super) fn observe(
        &self,
        headers: &HeaderMap,
        method: &str,
        target: &PathAndQuery,
        info: Option<&RequestInfo<'_>>,
    ) -> Option<Box<Observer>> {
        let server = &self.server;
        if server.tracer.is_none() && !server.listeners.any() {
            return None;
        }
        let (policy, connection) = (self.policy.current(), self.span.as_deref().map(ConnectionSpan::context));
        let (path, pod) = (target.path(), self.requests.pod());
        let origin = RequestOrigin { method, path, info, pod, shard: policy.shard(), connection };
        let span = server.tracer.as_ref().map(|tracer| tracer.begin_request(headers, &origin));
        let live = server.listeners.begin(&origin, target);
        (span.is_some() || live.is_some()).then(|| Box::new(Observer { span, live }))
    }
}

impl Observer {
    /// The trace, where spans of it are recorded.
    pub(super) fn recorded_trace(&self) -> Option<TraceId> {
        self.span.as_deref().and_then(RequestSpan::recorded_trace)
    }

    /// The trace of a request, for its log lines.
    pub(super) fn logged(observer: Option<&Self>) -> LoggedTrace {
        LoggedTrace::of(observer.and_then(|observer| observer.span.as_deref()))
    }

    /// The request is about to be sent to the API server. `target` is what it asked for. Takes and returns the request,
    /// which a borrow would keep in the caller's future.
    pub(super) fn sent(
        observer: Option<&mut Self>,
        mut request: Request<Relay>,
        target: &PathAndQuery,
        is_body_renamed: bool,
    ) -> Request<Relay> {
        if let Some(Self { span, live }) = observer {
            let is_rewritten = is_body_renamed || request.uri().path_and_query() != Some(target);
            let decision = if is_rewritten { Decision::Rewritten } else { Decision::Passed };
            if let Some(live) = live {
                live.sent(decision, request.uri(), is_body_renamed);
            }
            if let Some(span) = span {
                span.sent(decision, request.headers_mut());
            }
        }
        request
    }

    /// The API server has answered, or could not be asked.
    pub(super) fn received<T, E>(
        observer: Option<&mut Self>,
        answered: Result<Response<T>, E>,
    ) -> Result<Response<T>, E> {
        RequestSpan::received(observer.and_then(|observer| observer.span.as_deref_mut()), answered)
    }

    /// The request goes no further.
    pub(super) fn failed(&mut self, failure: &Failure) {
        let decision = failure.decision();
        if let Some((span, decision)) = self.span.as_deref_mut().zip(decision) {
            span.decided(decision);
        }
        if let Some(live) = &mut self.live {
            live.failed(decision, telemetry::chain(failure as &dyn Error));
        }
    }

    /// The head of the answer is there, by which the request `ended`.
    pub(super) fn answered(self, status: StatusCode, ended: Outcome) {
        if let Some(mut span) = self.span {
            span.answered(status, ended);
        }
        if let Some(mut live) = self.live {
            live.answered(status);
        }
    }
}
