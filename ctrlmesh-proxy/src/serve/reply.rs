//! What does the client read?

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::metrics::{Outcome, Verb};
use crate::net::body::{BodyError, BudgetExceeded, CountedBytes, Relay, UnreadBytes};
use crate::serve::lock_list::List;
use crate::session::Session;
use crate::watch::Watch;

/// The body of a response to a client. The request counts as under way until it is dropped.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) content: Content,
    pub(super) counted: Counted,
}

/// Counts a request: as one under way, and how it ended once that is known.
#[derive(Debug)]
pub(super) struct Counted {
    session: Rc<Session>,
    verb: Verb,
    /// What the answer says, as soon as it has begun.
    outcome: Option<Outcome>,
    /// Whether the answer passed to its end.
    whole: bool,
}

/// Where a response's body comes from.
#[derive(Debug)]
pub(super) enum Content {
    /// The API server, or the proxy itself.
    Plain(Relay),
    /// A watch of the API server, which follows the policy.
    Watch(Box<Watch>),
    /// A list of the API server, in which the lock is renamed.
    Items(Box<List>),
}

/// The same, for a client that speaks HTTP/1.1.
#[derive(Debug)]
pub(super) struct Pieces(pub(super) Reply);

// === impl Reply ===

impl Reply {
    /// Where what its client has not read yet is counted.
    pub(super) fn unread(&self) -> &Rc<UnreadBytes> {
        &self.counted.session.resources.unread
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Self { content, counted } = self.get_mut();
        let polled = match content {
            Content::Plain(body) => Pin::new(body).poll_frame(cx),
            Content::Watch(watch) => watch.poll_frame(cx),
            Content::Items(list) => list.poll_frame(cx),
        };
        counted.whole |= match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers(),
            Poll::Ready(Some(Err(_))) | Poll::Pending => false,
        };
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Plain(body) => body.is_end_stream(),
            Content::Watch(_) | Content::Items(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Plain(body) => body.size_hint(),
            Content::Watch(_) | Content::Items(_) => SizeHint::default(),
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.counted.whole |= self.is_end_stream();
    }
}

// === impl Pieces ===

/// Each part of a body counts twice: hyper reads as much again ahead.
const COPIES: usize = 2;

impl Body for Pieces {
    type Data = CountedBytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<CountedBytes>, BodyError>>> {
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

// === impl Counted ===

impl Counted {
    /// A request that has just come.
    pub(super) fn begin(session: Rc<Session>, verb: &str) -> Self {
        session.server.metrics.begin_request();
        Self { session, verb: Verb::of(verb), outcome: None, whole: false }
    }

    /// What the answer says, which has begun.
    pub(super) fn answered(&mut self, outcome: Outcome) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let outcome = self.outcome.filter(|_| self.whole).unwrap_or(Outcome::Aborted);
        self.session.server.metrics.end_request(self.verb, outcome);
    }
}
