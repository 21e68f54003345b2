//! Follows one request until the head of its answer, for those who want to see it.

use std::sync::Arc;
use std::time::Instant;

use http::uri::PathAndQuery;
use http::{StatusCode, Uri};
use jiff::Timestamp;

use super::line::TracedRequest;
use super::listeners::Listener;
use super::shown_target::shown;
use crate::spans::{Decision, RequestOrigin};

/// A request that somebody follows.
#[derive(Debug)]
pub struct LiveRequest {
    begun: Instant,
    request: TracedRequest,
    decision: Decision,
    listeners: Vec<Arc<Listener>>,
}

impl LiveRequest {
    pub(super) fn new(of: &RequestOrigin<'_>, target: &PathAndQuery, listeners: Vec<Arc<Listener>>) -> Self {
        let request = TracedRequest {
            time: format!("{:.3}", Timestamp::now()),
            pod: of.pod.to_owned(),
            shard: of.shard.map(str::to_owned),
            method: of.method.to_owned(),
            verb: of.info.map_or("other", |info| info.verb()).to_owned(),
            target: shown(target.as_str()),
            ..TracedRequest::default()
        };
        Self { begun: Instant::now(), request, decision: Decision::Failed, listeners }
    }

    /// The request is about to be sent to the API server, as `uri`.
    pub(crate) fn sent(&mut self, decision: Decision, uri: &Uri, lock_renamed: bool) {
        let sent = shown(uri.path_and_query().map_or("/", PathAndQuery::as_str));
        self.request.sent = (sent != self.request.target).then_some(sent);
        self.request.lock_renamed = lock_renamed;
        self.decision = decision;
    }

    /// The request fails, for this reason. `None`: the proxy has decided nothing anew.
    pub(crate) fn failed(&mut self, decision: Option<Decision>, reason: String) {
        self.decision = decision.unwrap_or(Decision::Failed);
        self.request.reason = Some(reason);
    }

    /// The head of the answer is there.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.request.status = Some(status.as_u16());
    }
}

impl Drop for LiveRequest {
    /// Without an answer, the client has gone or its stream was reset.
    fn drop(&mut self) {
        self.request.milliseconds = self.begun.elapsed().as_secs_f64() * 1e3;
        if self.request.status.is_none() && self.request.reason.is_none() {
            self.request.reason = Some("the client has gone".to_owned());
        }
        self.decision.name().clone_into(&mut self.request.decision);
        for listener in &self.listeners {
            listener.show(&self.request, self.decision);
        }
    }
}
