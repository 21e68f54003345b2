//! Response bodies to clients, and the metrics of their requests.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::metrics::{Outcome, Verb};
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
    /// `None` until the response has begun.
    outcome: Option<Outcome>,
    /// Whether the response passed to its end.
    complete: bool,
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
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers(),
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
    pub(super) fn begin(session: Rc<Session>, verb: &str) -> Self {
        session.server.metrics.begin_request();
        Self { session, verb: Verb::of(verb), outcome: None, complete: false }
    }

    pub(super) fn response_began(&mut self, outcome: Outcome) {
        self.outcome = Some(outcome);
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        let outcome = self.outcome.filter(|_| self.complete).unwrap_or(Outcome::Aborted);
        self.session.server.metrics.end_request(self.verb, outcome);
    }
}
