//! What does a message carry, whichever protocol it came by?
//!
//! Bytes go from one side to the other as they were read: nothing is gathered, and no part of a body is copied. Room
//! at the sender's side is given back only for what the receiver's side took, so that pressure travels through.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use h2::{Reason, RecvStream, SendStream};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use thiserror::Error;
use tokio::sync::oneshot;
use tokio::time;
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::net::memory_budget::Waiting;
pub use unread::{AHEAD_BYTES, Piece, TooMuch, Unread};

mod unread;

/// How long a client's body waits for the API server's `100 Continue`: clients themselves wait no longer than this.
const EXPECT_PATIENCE: Duration = Duration::from_secs(1);

/// The body of a request or a response, on its way through.
#[derive(Debug)]
pub enum Relay {
    /// Nothing.
    Empty,
    /// Made, or changed as a whole, by the proxy.
    Full(Option<Bytes>),
    /// As it comes over HTTP/1.1.
    Http1(Incoming, Option<Share>),
    /// As it comes over HTTP/1.1, once the API server has asked for it.
    Expected(Box<Expected>),
    /// As it comes over HTTP/2.
    Http2(Http2),
}

/// A share of an upstream connection, given back when it is dropped; the request's own body is sent no longer than that.
#[derive(Debug)]
pub struct Share {
    used: Rc<Cell<usize>>,
    sent: Option<oneshot::Sender<()>>,
}

/// A body that the client holds back until it is told to go on.
#[derive(Debug)]
pub struct Expected {
    body: Incoming,
    waiting: Option<Unasked>,
}

#[derive(Debug)]
struct Unasked {
    asked_for: Pin<Box<WaitForCancellationFutureOwned>>,
    too_long: Pin<Box<Sleep>>,
}

/// A body as it comes over HTTP/2.
#[derive(Debug)]
pub struct Http2 {
    stream: RecvStream,
    data_ended: bool,
    /// Counts what may have come of it before it is read.
    waits: Option<Waiting>,
    /// Held until the body ends.
    _share: Option<Share>,
}

/// Why a body ended before its end.
#[derive(Debug, Error)]
pub enum BodyError {
    /// The HTTP/1.1 connection broke.
    #[error("read a body over HTTP/1.1")]
    Http1(#[source] hyper::Error),
    /// The HTTP/2 stream was reset, or its connection broke.
    #[error("read a body over HTTP/2")]
    Http2(#[source] h2::Error),
    /// The proxy gave it up.
    #[error("the body was given up")]
    GivenUp,
    /// Its receiver does not read, and more waits already than may.
    #[error("nobody reads the body, and too much waits already")]
    Unread,
}

/// Why a body could not be passed on to its end.
#[derive(Debug, Error)]
pub enum PipeError {
    /// It could not be read.
    #[error("pass a body on: it broke off")]
    Read(#[source] BodyError),
    /// Who was to receive it is gone.
    #[error("pass a body on: its receiver is gone")]
    Write(#[source] h2::Error),
}

// === impl Relay ===

impl Relay {
    /// What an HTTP/2 stream carries.
    pub fn http2(stream: RecvStream, share: Option<Share>) -> Self {
        if stream.is_end_stream() {
            return Relay::Empty;
        }
        Relay::Http2(Http2 { stream, data_ended: false, waits: None, _share: share })
    }

    /// What a client sends over HTTP/2, of which `waits` counts what comes before somebody reads it.
    pub fn uploaded(stream: RecvStream, waits: Option<Waiting>) -> Self {
        let mut relay = Self::http2(stream, None);
        if let Relay::Http2(body) = &mut relay {
            body.waits = waits;
        }
        relay
    }

    /// What an HTTP/1.1 message carries.
    pub fn http1(body: Incoming, share: Option<Share>) -> Self {
        if body.is_end_stream() {
            return Relay::Empty;
        }
        Relay::Http1(body, share)
    }

    /// What an HTTP/1.1 client holds back until `asked_for`, or until it would send it unasked.
    pub fn expected(body: Incoming, asked_for: CancellationToken) -> Self {
        let waiting = Unasked {
            asked_for: Box::pin(asked_for.cancelled_owned()),
            too_long: Box::pin(time::sleep(EXPECT_PATIENCE)),
        };
        Relay::Expected(Box::new(Expected { body, waiting: Some(waiting) }))
    }

    /// One piece of bytes.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Relay::Full(Some(bytes.into()))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Relay::Empty => Poll::Ready(None),
            Relay::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Relay::Http1(body, _) => Pin::new(body).poll_frame(cx).map_err(BodyError::Http1),
            Relay::Expected(body) => body.poll_frame(cx),
            Relay::Http2(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Relay::Empty => true,
            Relay::Full(bytes) => bytes.is_none(),
            Relay::Http1(body, _) => body.is_end_stream(),
            Relay::Expected(body) => body.body.is_end_stream(),
            Relay::Http2(body) => body.stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Relay::Empty => SizeHint::with_exact(0),
            Relay::Full(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Relay::Http1(body, _) => body.size_hint(),
            Relay::Expected(body) => body.body.size_hint(),
            Relay::Http2(_) => SizeHint::default(),
        }
    }
}

// === impl Share ===

impl Share {
    /// One more of what `counter` counts.
    pub fn of(counter: &Rc<Cell<usize>>) -> Self {
        counter.set(counter.get() + 1);
        Self { used: counter.clone(), sent: None }
    }

    /// What ends once this share is given back.
    pub fn ended(&mut self) -> oneshot::Receiver<()> {
        let (sent, ended) = oneshot::channel();
        self.sent = Some(sent);
        ended
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.set(self.used.get() - 1);
    }
}

// === impl Expected ===

impl Expected {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(waiting) = &mut self.waiting {
            if waiting.asked_for.as_mut().poll(cx).is_pending()
                && waiting.too_long.as_mut().poll(cx).is_pending()
            {
                return Poll::Pending;
            }
            self.waiting = None;
        }
        Pin::new(&mut self.body).poll_frame(cx).map_err(BodyError::Http1)
    }
}

// === impl Http2 ===

impl Http2 {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        // From here on it is read as it comes.
        self.waits = None;
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    let room = self.stream.flow_control().release_capacity(bytes.len());
                    return Poll::Ready(Some(
                        room.map(|()| Frame::data(bytes)).map_err(BodyError::Http2),
                    ));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(BodyError::Http2(error)))),
                None => self.data_ended = true,
            }
        }
        match ready!(self.stream.poll_trailers(cx)) {
            Ok(Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            Ok(None) => Poll::Ready(None),
            Err(error) => Poll::Ready(Some(Err(BodyError::Http2(error)))),
        }
    }
}

// === impl PipeError ===

impl From<BodyError> for PipeError {
    fn from(error: BodyError) -> Self {
        Self::Read(error)
    }
}

// === impl BodyError ===

impl BodyError {
    /// How to say it to an HTTP/2 peer.
    pub fn reason(&self) -> Reason {
        match self {
            BodyError::Http2(error) => error.reason().unwrap_or(Reason::INTERNAL_ERROR),
            BodyError::Http1(_) | BodyError::GivenUp => Reason::INTERNAL_ERROR,
            BodyError::Unread => Reason::ENHANCE_YOUR_CALM,
        }
    }
}

/// Sends `body` over an HTTP/2 stream, to its end or to the receiver's. What waits meanwhile counts as `unread`.
///
/// # Errors
///
/// Fails when the body breaks off, or too much waits, which the receiver is told by a reset, or when the receiver is gone.
pub async fn pipe<B>(
    body: B,
    send: &mut SendStream<Piece>,
    unread: &Rc<Unread>,
) -> Result<(), PipeError>
where
    B: Body<Data = Bytes, Error = BodyError> + Unpin,
{
    let passed = pass(body, send, unread).await;
    if let Err(PipeError::Read(error)) = &passed {
        send.send_reset(error.reason());
    }
    passed
}

async fn pass<B>(
    mut body: B,
    send: &mut SendStream<Piece>,
    unread: &Rc<Unread>,
) -> Result<(), PipeError>
where
    B: Body<Data = Bytes, Error = BodyError> + Unpin,
{
    while let Some(frame) = next(&mut body, send).await? {
        match frame.into_data() {
            Ok(data) => {
                let last = body.is_end_stream();
                send_data(data, last, send, unread).await?;
                if last {
                    return Ok(());
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    return send.send_trailers(trailers).map_err(PipeError::Write);
                }
            }
        }
    }
    let nothing = unread.piece(Bytes::new(), 1).map_err(|TooMuch| BodyError::Unread)?;
    send.send_data(nothing, true).map_err(PipeError::Write)
}

/// The next frame of `body`, unless the receiver goes away first.
fn next<'a, B>(
    body: &'a mut B,
    send: &'a mut SendStream<Piece>,
) -> impl Future<Output = Result<Option<Frame<Bytes>>, PipeError>> + 'a
where
    B: Body<Data = Bytes, Error = BodyError> + Unpin,
{
    poll_fn(move |cx| {
        if let Poll::Ready(reset) = send.poll_reset(cx) {
            return Poll::Ready(Err(PipeError::Write(
                reset.map_or_else(|error| error, h2::Error::from),
            )));
        }
        match ready!(Pin::new(&mut *body).poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Ok(Some(frame))),
            Some(Err(error)) => Poll::Ready(Err(PipeError::Read(error))),
            None => Poll::Ready(Ok(None)),
        }
    })
}

async fn send_data(
    data: Bytes,
    last: bool,
    send: &mut SendStream<Piece>,
    unread: &Rc<Unread>,
) -> Result<(), PipeError> {
    let mut part = unread.piece(data, 1).map_err(|TooMuch| BodyError::Unread)?;
    while part.remaining() > send.capacity() {
        send.reserve_capacity(part.remaining());
        let room = match poll_fn(|cx| Poll::Ready(poll_room(send, cx))).await {
            Poll::Ready(room) => room?,
            Poll::Pending => {
                // Until it is read, the other side fills what it may send ahead.
                let ahead = (!last).then(|| unread.ahead()).transpose();
                let _ahead = ahead.map_err(|TooMuch| BodyError::Unread)?;
                poll_fn(|cx| poll_room(send, cx)).await?
            }
        };
        if room < part.remaining() {
            send.send_data(part.split_to(room), false).map_err(PipeError::Write)?;
        }
    }
    send.send_data(part, last).map_err(PipeError::Write)
}

/// How much the receiver takes now; pending while that is nothing.
fn poll_room(send: &mut SendStream<Piece>, cx: &mut Context<'_>) -> Poll<Result<usize, PipeError>> {
    loop {
        let room = send.capacity();
        if room > 0 {
            return Poll::Ready(Ok(room));
        }
        if let Poll::Ready(reset) = send.poll_reset(cx) {
            return Poll::Ready(Err(PipeError::Write(
                reset.map_or_else(|error| error, h2::Error::from),
            )));
        }
        match ready!(send.poll_capacity(cx)) {
            Some(Ok(_)) => {}
            Some(Err(error)) => return Poll::Ready(Err(PipeError::Write(error))),
            None => return Poll::Ready(Err(PipeError::Write(h2::Error::from(Reason::CANCEL)))),
        }
    }
}
