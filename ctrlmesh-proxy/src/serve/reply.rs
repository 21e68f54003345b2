//! Response bodies to clients, and the metrics of their requests.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use ctrlmesh_request::request::RequestInfo;
use hyper::body::{Body, Frame, SizeHint};
use opentelemetry::trace::TraceId;
use tokio::time::Instant;

use crate::metrics::{MemberRequests, Outcome, ResourceRequests, Verb};
use crate::net::body::{BodyError, BudgetExceeded, CountedBytes, Relay, UnreadBytes};
use crate::serve::lock_list::LockList;
use crate::serve::shaping::Shaped;
use crate::session::Session;
use crate::watch::Watch;

/// The body of a response.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) content: Content,
    pub(super) metrics_guard: RequestMetrics,
}

/// Counts a request as open until it is dropped, and then by its outcome.
#[derive(Debug)]
pub(super) struct RequestMetrics {
    session: Rc<Session>,
    verb: Verb,
    resource: Arc<ResourceRequests>,
    /// `None` until the response has begun.
    outcome: Option<Outcome>,
    /// Whether the response passed to its end.
    complete: bool,
    /// Boxed, so that other requests hold no memory for it.
    more: Option<Box<More>>,
}

/// What few requests have.
#[derive(Debug, Default)]
struct More {
    /// The request's trace, where it is recorded.
    trace: Option<TraceId>,
    /// Those of the member cluster that the request is for.
    member: Option<Arc<MemberRequests>>,
}

#[derive(Debug)]
pub(super) enum Content {
    /// From the API server, or the proxy itself.
    Plain(Relay),
    /// A watch that follows the policy.
    Watch(Box<Watch>),
    /// A list in which the lock is renamed.
    LockList(Box<LockList>),
    /// What a fault slows down or cuts.
    Shaped(Box<Shaped>),
}

/// The body of a response over HTTP/1.1, whose bytes count as unread until hyper has written them.
#[derive(Debug)]
pub(super) struct Http1Reply(pub(super) Reply);

impl Reply {
    pub(super) fn unread(&self) -> &Rc<UnreadBytes> {
        &self.metrics_guard.session.resources.unread
    }
}

impl Content {
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self {
            Self::Plain(body) => Pin::new(body).poll_frame(cx),
            Self::Watch(watch) => watch.poll_frame(cx),
            Self::LockList(list) => list.poll_frame(cx),
            Self::Shaped(shaped) => shaped.poll_frame(cx),
        }
    }

    pub(super) fn is_end_stream(&self) -> bool {
        match self {
            Self::Plain(body) => body.is_end_stream(),
            Self::Watch(_) | Self::LockList(_) => false,
            Self::Shaped(shaped) => shaped.is_end_stream(),
        }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Self { content, metrics_guard } = self.get_mut();
        let polled = content.poll_frame(cx);
        metrics_guard.complete |= match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(frame))) => {
                frame.data_ref().iter().for_each(|data| metrics_guard.resource.response_bytes(data.len()));
                frame.is_trailers()
            }
            Poll::Ready(Some(Err(_))) | Poll::Pending => false,
        };
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Plain(body) => body.size_hint(),
            Content::Watch(_) | Content::LockList(_) | Content::Shaped(_) => SizeHint::default(),
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.metrics_guard.complete |= self.is_end_stream();
    }
}

/// Each part of a body counts twice: hyper reads as much again ahead.
const COPIES: usize = 2;

impl Body for Http1Reply {
    type Data = CountedBytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<CountedBytes>, BodyError>>> {
        let reply = &mut self.get_mut().0;
        let Some(frame) = ready!(Pin::new(&mut *reply).poll_frame(cx)?) else {
            return Poll::Ready(None);
        };
        let piece = frame.into_data().map(|data| reply.unread().count_bytes(data, COPIES));
        Poll::Ready(match piece {
            Ok(Ok(piece)) => Some(Ok(Frame::data(piece))),
            Ok(Err(BudgetExceeded)) => Some(Err(BodyError::Unread)),
            Err(frame) => frame.into_trailers().ok().map(|trailers| Ok(Frame::trailers(trailers))),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl RequestMetrics {
    /// `info` is `None` where the request cannot be read.
    pub(super) fn begin(session: Rc<Session>, info: Option<&RequestInfo<'_>>) -> Self {
        session.server.metrics.begin_request();
        let verb = Verb::of(info.map_or("other", RequestInfo::verb));
        let named = info.filter(|info| info.is_resource_request());
        let (group, resource) = named.map_or(("", ""), |info| (info.api_group(), info.resource()));
        let resource = session.requests.resource(group, resource);
        if let Some(info) = named.filter(|info| info.cluster().is_none() && !info.namespace().is_empty()) {
            session.requests.in_namespace(info.namespace());
        }
        let cluster = info.and_then(RequestInfo::cluster);
        let member = cluster.map(|cluster| session.requests.member(cluster));
        let more = member.map(|member| Box::new(More { member: Some(member), ..More::default() }));
        Self { session, verb, resource, outcome: None, complete: false, more }
    }

    /// Shows the trace of the request beside what is counted.
    pub(super) fn set_trace(&mut self, trace: Option<TraceId>) {
        if trace.is_some() {
            self.more.get_or_insert_default().trace = trace;
        }
    }

    fn trace(&self) -> Option<TraceId> {
        self.more.as_ref()?.trace
    }

    /// The API server's answer to a request that came at `start` has begun. Watches and tunnels are not timed.
    pub(super) fn answer_began(&mut self, outcome: Outcome, start: Instant, is_long_running: bool) {
        self.outcome = Some(outcome);
        if !is_long_running {
            self.session.requests.answered_after(self.verb, start.elapsed(), self.trace());
        }
    }

    /// The proxy answers instead of the API server.
    pub(super) fn refused(&mut self) {
        self.outcome = Some(Outcome::Refused);
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        let outcome = self.outcome.filter(|_| self.complete).unwrap_or(Outcome::Aborted);
        self.session.server.metrics.end_request(self.verb, outcome);
        self.resource.ended(self.verb, outcome, self.trace());
        if let Some(member) = self.more.as_ref().and_then(|more| more.member.as_ref()) {
            member.ended(outcome);
        }
    }
}
