//! The bodies of calls to a webhook: held until their owner is known, or streamed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::Request;
use http::request::Parts;
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};

use crate::net::memory_budget::{MemoryBudget, Reservation};

/// The largest review that is held, in bytes. An API server takes requests of 3 MiB, and sends both the object and the
/// old one.
const MAX_HELD_BYTES: usize = 7 << 20;

/// What was read of a body already, and the rest of it.
#[derive(Debug, Default)]
pub(super) struct Body {
    first: Option<Bytes>,
    rest: Option<Incoming>,
}

/// A request that was read whole.
#[derive(Debug)]
pub(super) struct HeldReview {
    head: Parts,
    pub(super) body: Bytes,
    _reservation: Reservation,
}

impl HeldReview {
    /// Reads what may be a review; the request itself, to be streamed, where it is too large, or where there is no
    /// room.
    ///
    /// # Errors
    /// If the body breaks off.
    pub(super) async fn read(
        request: Request<Incoming>,
        budget: &Arc<MemoryBudget>,
    ) -> hyper::Result<Result<Self, Request<Body>>> {
        let (head, mut rest) = request.into_parts();
        let expected = usize::try_from(rest.size_hint().lower()).unwrap_or(usize::MAX);
        // Room is taken for what arrives, and not for what is announced.
        let mut reservation = budget.empty_reservation();
        let mut read = BytesMut::new();
        let mut fits = expected <= MAX_HELD_BYTES;
        while fits {
            let Some(frame) = rest.frame().await.transpose()? else {
                return Ok(Ok(Self { head, body: read.freeze(), _reservation: reservation }));
            };
            if let Ok(data) = frame.into_data() {
                read.extend_from_slice(&data);
                fits = read.len() <= MAX_HELD_BYTES && reservation.resize(read.len());
            }
        }
        let first = Some(read.freeze()).filter(|read| !read.is_empty());
        Ok(Err(Request::from_parts(head, Body { first, rest: Some(rest) })))
    }

    /// The request, to be sent.
    pub(super) fn request(&self) -> Request<Body> {
        let first = Some(self.body.clone()).filter(|body| !body.is_empty());
        Request::from_parts(self.head.clone(), Body { first, rest: None })
    }
}

impl From<Incoming> for Body {
    fn from(rest: Incoming) -> Self {
        Self { first: None, rest: Some(rest) }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        Poll::Ready(ready!(Pin::new(rest).poll_frame(cx)))
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().map_or(0, |first| u64::try_from(first.len()).unwrap_or(u64::MAX));
        let mut hint = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(first));
        }
        hint.set_lower(hint.lower().saturating_add(first));
        hint
    }
}
