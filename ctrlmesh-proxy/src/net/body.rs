//! Message bodies of HTTP/1.1 and HTTP/2, on their way through the proxy.
//!
//! Bytes go from one side to the other as they were read: nothing is gathered or copied. Flow-control capacity goes
//! back to the sender only for what the receiver took, so backpressure travels through.

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

use crate::net::memory_budget::Reservation;
pub use unread::{BudgetExceeded, CountedBytes, READ_AHEAD_BYTES, UnreadBytes};

mod unread;

/// A client's body waits this long for the API server's `100 Continue`: clients themselves wait no longer.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// The body of a request or a response.
#[derive(Debug)]
pub enum Relay {
    Empty,
    /// Made, or changed as a whole, by the proxy.
    Full(Option<Bytes>),
    Http1(Incoming, Option<StreamPermit>),
    /// As it comes over HTTP/1.1, once the API server has answered `100 Continue`.
    Expected(Box<ExpectContinue>),
    Http2(Http2),
}

/// One stream of an upstream connection, released on drop. The request's body is sent no longer than that.
#[derive(Debug)]
pub struct StreamPermit {
    open_streams: Rc<Cell<usize>>,
    released: Option<oneshot::Sender<()>>,
}

/// A body that an HTTP/1.1 client holds back until `100 Continue`.
#[derive(Debug)]
pub struct ExpectContinue {
    body: Incoming,
    waiting: Option<ContinueWait>,
}

#[derive(Debug)]
struct ContinueWait {
    continued: Pin<Box<WaitForCancellationFutureOwned>>,
    timeout: Pin<Box<Sleep>>,
}

/// A body as it comes over HTTP/2.
#[derive(Debug)]
pub struct Http2 {
    stream: RecvStream,
    data_ended: bool,
    /// Memory for what may arrive before the body is first read.
    reservation: Option<Reservation>,
    /// Held until the body ends.
    _permit: Option<StreamPermit>,
}

#[derive(Debug, Error)]
pub enum BodyError {
    #[error("read a body over HTTP/1.1")]
    Http1(#[source] hyper::Error),
    /// The HTTP/2 stream was reset, or its connection broke.
    #[error("read a body over HTTP/2")]
    Http2(#[source] h2::Error),
    #[error("the body was given up")]
    GivenUp,
    #[error("nobody reads the body, and too much waits already")]
    Unread,
}

#[derive(Debug, Error)]
pub enum PipeError {
    #[error("pass a body on: it broke off")]
    Read(#[source] BodyError),
    #[error("pass a body on: its receiver is gone")]
    Write(#[source] h2::Error),
}

impl Relay {
    pub fn http2(stream: RecvStream, permit: Option<StreamPermit>) -> Self {
        if stream.is_end_stream() {
            return Relay::Empty;
        }
        Relay::Http2(Http2 { stream, data_ended: false, reservation: None, _permit: permit })
    }

    /// A client's body over HTTP/2; `reservation` is held until the body is first read.
    pub fn uploaded(stream: RecvStream, reservation: Option<Reservation>) -> Self {
        let mut relay = Self::http2(stream, None);
        if let Relay::Http2(body) = &mut relay {
            body.reservation = reservation;
        }
        relay
    }

    pub fn http1(body: Incoming, permit: Option<StreamPermit>) -> Self {
        if body.is_end_stream() {
            return Relay::Empty;
        }
        Relay::Http1(body, permit)
    }

    /// A body that an HTTP/1.1 client holds back until `continued` is cancelled, or until it would send it anyway.
    pub fn expected(body: Incoming, continued: CancellationToken) -> Self {
        let waiting = ContinueWait {
            continued: Box::pin(continued.cancelled_owned()),
            timeout: Box::pin(time::sleep(CONTINUE_TIMEOUT)),
        };
        Relay::Expected(Box::new(ExpectContinue { body, waiting: Some(waiting) }))
    }

    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Relay::Full(Some(bytes.into()))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
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
            Relay::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Relay::Http1(body, _) => body.size_hint(),
            Relay::Expected(body) => body.body.size_hint(),
            Relay::Http2(_) => SizeHint::default(),
        }
    }
}

impl StreamPermit {
    pub fn acquire(open_streams: &Rc<Cell<usize>>) -> Self {
        open_streams.set(open_streams.get() + 1);
        Self { open_streams: open_streams.clone(), released: None }
    }

    /// Resolves once this permit is dropped.
    pub fn released(&mut self) -> oneshot::Receiver<()> {
        let (sender, released) = oneshot::channel();
        self.released = Some(sender);
        released
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.open_streams.set(self.open_streams.get() - 1);
    }
}

impl ExpectContinue {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(waiting) = &mut self.waiting {
            if waiting.continued.as_mut().poll(cx).is_pending() && waiting.timeout.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.waiting = None;
        }
        Pin::new(&mut self.body).poll_frame(cx).map_err(BodyError::Http1)
    }
}

impl Http2 {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        // From here on the body is read as it comes.
        self.reservation = None;
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    let room = self.stream.flow_control().release_capacity(bytes.len());
                    return Poll::Ready(Some(room.map(|()| Frame::data(bytes)).map_err(BodyError::Http2)));
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

impl From<BodyError> for PipeError {
    fn from(error: BodyError) -> Self {
        Self::Read(error)
    }
}

impl BodyError {
    /// The code of the `RST_STREAM` that an HTTP/2 peer gets.
    pub fn reason(&self) -> Reason {
        match self {
            BodyError::Http2(error) => error.reason().unwrap_or(Reason::INTERNAL_ERROR),
            BodyError::Http1(_) | BodyError::GivenUp => Reason::INTERNAL_ERROR,
            BodyError::Unread => Reason::ENHANCE_YOUR_CALM,
        }
    }
}

/// Sends `body` over an HTTP/2 stream until either ends. Bytes that wait meanwhile count as `unread`.
///
/// # Errors
/// The body broke off or exceeded the budget, and the stream is reset; or the receiver is gone.
pub async fn pipe<B>(body: B, send: &mut SendStream<CountedBytes>, unread: &Rc<UnreadBytes>) -> Result<(), PipeError>
where
    B: Body<Data = Bytes, Error = BodyError> + Unpin,
{
    let passed = pass(body, send, unread).await;
    if let Err(PipeError::Read(error)) = &passed {
        send.send_reset(error.reason());
    }
    passed
}

async fn pass<B>(mut body: B, send: &mut SendStream<CountedBytes>, unread: &Rc<UnreadBytes>) -> Result<(), PipeError>
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
    let empty = unread.count_bytes(Bytes::new(), 1).map_err(|BudgetExceeded| BodyError::Unread)?;
    send.send_data(empty, true).map_err(PipeError::Write)
}

/// The next frame of `body`, unless the receiver goes away first.
fn next<'a, B>(
    body: &'a mut B,
    send: &'a mut SendStream<CountedBytes>,
) -> impl Future<Output = Result<Option<Frame<Bytes>>, PipeError>> + 'a
where
    B: Body<Data = Bytes, Error = BodyError> + Unpin,
{
    poll_fn(move |cx| {
        if let Poll::Ready(reset) = send.poll_reset(cx) {
            return Poll::Ready(Err(PipeError::Write(reset.map_or_else(|error| error, h2::Error::from))));
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
    send: &mut SendStream<CountedBytes>,
    unread: &Rc<UnreadBytes>,
) -> Result<(), PipeError> {
    let mut part = unread.count_bytes(data, 1).map_err(|BudgetExceeded| BodyError::Unread)?;
    while part.remaining() > send.capacity() {
        send.reserve_capacity(part.remaining());
        let room = match poll_fn(|cx| Poll::Ready(poll_capacity(send, cx))).await {
            Poll::Ready(capacity) => capacity?,
            Poll::Pending => {
                // Until the receiver reads on, the sender fills its read-ahead window.
                let read_ahead = (!last).then(|| unread.reserve_read_ahead()).transpose();
                let _read_ahead = read_ahead.map_err(|BudgetExceeded| BodyError::Unread)?;
                poll_fn(|cx| poll_capacity(send, cx)).await?
            }
        };
        if room < part.remaining() {
            send.send_data(part.split_to(room), false).map_err(PipeError::Write)?;
        }
    }
    send.send_data(part, last).map_err(PipeError::Write)
}

/// The bytes that the receiver takes now; pending while that is zero.
fn poll_capacity(send: &mut SendStream<CountedBytes>, cx: &mut Context<'_>) -> Poll<Result<usize, PipeError>> {
    loop {
        let room = send.capacity();
        if room > 0 {
            return Poll::Ready(Ok(room));
        }
        if let Poll::Ready(reset) = send.poll_reset(cx) {
            return Poll::Ready(Err(PipeError::Write(reset.map_or_else(|error| error, h2::Error::from))));
        }
        match ready!(send.poll_capacity(cx)) {
            Some(Ok(_)) => {}
            Some(Err(error)) => return Poll::Ready(Err(PipeError::Write(error))),
            None => return Poll::Ready(Err(PipeError::Write(h2::Error::from(Reason::CANCEL)))),
        }
    }
}
