//! Connections that carry many requests at once.

use std::cell::{Cell, RefCell};
use std::future;
use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ctrlmesh_runtime::poll_on_wake::PollOnWake;
use h2::client;
use h2::client::{Connection, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason};
use http::{Request, Response};
use hyper::body::Body as _;
use rustls::ClientConnection;
use tokio::sync::{Mutex, Notify};
use tokio::time;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::metrics::UpstreamError;
use crate::net::body;
use crate::net::body::{AHEAD_BYTES, Piece, Relay, Share, Unread};
use crate::net::tls::stream::BatchedStream;
use crate::upstream;
use crate::upstream::{Dialer, SendError, Target};

/// Room for one response: 1 MiB feeds 1 GB/s at a round trip of a millisecond.
const STREAM_WINDOW_BYTES: u32 = AHEAD_BYTES;

/// Room for all responses of a connection: for each of the streams that a client may open, and one more, so that lists
/// nobody reads hold up no watch beside them. What a client does not read of that is counted, and bounded, as unread.
const CONNECTION_WINDOW_BYTES: u32 = 251 * STREAM_WINDOW_BYTES;

/// The size of a response's head that the proxy still takes: what clients in Go take.
const MAX_HEAD_BYTES: u32 = 1 << 20;

/// How much of a request's body may wait to be written.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// How many 1xx of a request its client is told: no window bounds them.
const MAX_INFORMED: usize = 16;

/// How many streams an API server takes before it has said so: what kube-apiserver takes unless told otherwise, and
/// what clients in Go begin with.
const FIRST_STREAMS: usize = 100;

/// Connections of one client connection.
#[derive(Debug)]
pub struct Pool {
    dialer: Rc<Dialer>,
    target: Target,
    leaving: Rc<Notify>,
    unread: Rc<Unread>,
    lanes: RefCell<Vec<Rc<Lane>>>,
    /// BatchedStream while a connection is opened, so that requests that come together wait for one and the same.
    dialing: Mutex<()>,
    /// How often that was tried, and how it failed last.
    dialed: Cell<u64>,
    failed: RefCell<Option<Arc<SendError>>>,
}

/// One connection.
#[derive(Debug)]
struct Lane {
    send: RefCell<SendRequest<Piece>>,
    /// How many streams are open on it.
    used: Rc<Cell<usize>>,
}

/// The connection on which a request was sent.
#[derive(Debug, Default)]
pub struct Asked(RefCell<Weak<Lane>>);

impl Pool {
    /// No connection yet.
    pub fn new(
        dialer: Rc<Dialer>,
        target: Target,
        leaving: Rc<Notify>,
        unread: Rc<Unread>,
    ) -> Self {
        Self {
            dialer,
            target,
            leaving,
            unread,
            lanes: RefCell::default(),
            dialing: Mutex::default(),
            dialed: Cell::default(),
            failed: RefCell::default(),
        }
    }

    /// Sends a request on a connection that has room for one more, or on a new one; which it is, `asked` says.
    pub async fn send(
        &self,
        request: Request<Relay>,
        asked: &Asked,
        informed: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, SendError> {
        let lane = match self.free() {
            Some(free) => free,
            None => Box::pin(self.open()).await?,
        };
        let mut share = Share::of(&lane.used);
        let mut send = lane.send.borrow().clone();
        *asked.0.borrow_mut() = Rc::downgrade(&lane);
        drop(lane);
        let (head, body) = request.into_parts();
        let ends = body.is_end_stream();
        let (response, mut stream) =
            send.send_request(Request::from_parts(head, ()), ends).map_err(SendError::Http2)?;
        drop(send);
        if !ends {
            let unread = self.unread.clone();
            let ended = share.ended();
            self.dialer.drain.spawn_part(async move {
                tokio::select! {
                    biased;
                    piped = body::pipe(body, &mut stream, &unread) => if let Err(error) = piped {
                        debug!(error = &error as &dyn std::error::Error, "request body broke off");
                    },
                    // Its client is gone, or has its answer: nobody reads more of it.
                    _ended = ended => stream.send_reset(Reason::CANCEL),
                }
            });
        }
        listen(response, informed)
            .await
            .map(|response| response.map(|body| Relay::http2(body, Some(share))))
            .map_err(SendError::Http2)
    }

    /// A connection with room for one more stream.
    fn free(&self) -> Option<Rc<Lane>> {
        let mut lanes = self.lanes.borrow_mut();
        lanes.retain(|lane| lane.is_open());
        lanes
            .iter()
            .find(|lane| lane.used.get() < lane.send.borrow().current_max_send_streams())
            .cloned()
    }

    /// Sends nothing more on a connection; what is under way on it goes on.
    pub fn retire(&self, asked: &Asked) {
        let lane = asked.0.take();
        self.lanes.borrow_mut().retain(|other| !std::ptr::eq(Rc::as_ptr(other), lane.as_ptr()));
    }

    /// A new connection, or one that somebody else opened meanwhile. Who waited for somebody else to fail fails so too:
    /// the deadline is over.
    async fn open(&self) -> Result<Rc<Lane>, SendError> {
        let before = self.dialed.get();
        let _dialing = self.dialing.lock().await;
        if let Some(free) = self.free() {
            return Ok(free);
        }
        if let Some(error) = self.failed.borrow().as_ref().filter(|_| self.dialed.get() != before) {
            return Err(SendError::Shared(error.clone()));
        }
        let dialed = self.dial().await.map_err(Arc::new);
        self.dialed.set(self.dialed.get() + 1);
        *self.failed.borrow_mut() = dialed.as_ref().err().cloned();
        dialed.map_err(|error| {
            if matches!(*error, SendError::Protocol) {
                // The client's next connection is offered what the API server speaks.
                self.leaving.notify_one();
            }
            SendError::Shared(error)
        })
    }

    async fn dial(&self) -> Result<Rc<Lane>, SendError> {
        let until = Instant::now() + self.dialer.deadline;
        let stream = self.dialer.dial(&self.target, true, until).await?;
        let (stream, turns) = BatchedStream::new(stream);
        let handshake = Box::pin(builder().handshake(stream));
        let (send, connection) = time::timeout_at(until, handshake)
            .await
            .map_err(|_elapsed| self.dialer.too_late())?
            .map_err(SendError::Http2)?;
        let lane = Rc::new(Lane { send: RefCell::new(send), used: Rc::default() });
        let (dialer, leaving) = (self.dialer.clone(), self.leaving.clone());
        let run = Box::pin(run(connection, turns, Rc::downgrade(&lane), leaving, dialer));
        self.dialer.drain.spawn_part(run);
        self.lanes.borrow_mut().push(lane.clone());
        Ok(lane)
    }
}

impl Lane {
    /// Whether new streams may still be opened: not after GOAWAY, or once the connection broke.
    fn is_open(&self) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        !matches!(self.send.borrow_mut().poll_ready(&mut cx), Poll::Ready(Err(_)))
    }
}

/// Drives a connection to its end, and notifies `leaving` when the API server wants no more streams on it.
async fn run(
    mut connection: Connection<BatchedStream<ClientConnection>, Piece>,
    turns: BatchedStream<ClientConnection>,
    lane: Weak<Lane>,
    leaving: Rc<Notify>,
    dialer: Rc<Dialer>,
) {
    let _open = upstream::count(&dialer);
    let silence = pin!(silence(connection.ping_pong(), &turns, dialer.silence));
    let mut silence = PollOnWake::new(silence);
    let mut told = false;
    let ended = poll_fn(|cx| {
        let mut ended = turns.turn(cx, |cx| Pin::new(&mut connection).poll(cx)).map(Some);
        // Asked after what came was read.
        if ended.is_pending() && Pin::new(&mut silence).poll(cx).is_ready() {
            ended = Poll::Ready(None);
        }
        // On one that was retired nobody sends any more, whatever becomes of it.
        let left = lane.upgrade().is_some_and(|lane| ended.is_ready() || !lane.is_open());
        if !told && left {
            told = true;
            leaving.notify_one();
        }
        ended
    });
    match ended.await {
        Some(Ok(())) => {}
        Some(Err(error)) => {
            debug!(error = &error as &dyn std::error::Error, "upstream connection broke");
        }
        None => {
            dialer.metrics.upstream_error(UpstreamError::Timeout);
            warn!(after = ?dialer.silence, "an upstream connection fell silent, and is given up");
        }
    }
}

/// Completes once nothing was heard for as long as `patience`, in the last third of which the API server was asked
/// whether it is still there. A client that asks us the same learns nothing of the API server.
async fn silence(
    pings: Option<PingPong>,
    turns: &BatchedStream<ClientConnection>,
    patience: Duration,
) {
    let Some(mut pings) = pings else { return future::pending().await };
    let tick = patience / 3;
    loop {
        let mut quiet = 0;
        while quiet < 2 {
            time::sleep(tick).await;
            quiet = if turns.was_heard() { 0 } else { quiet + 1 };
        }
        let mut pong = pin!(pings.ping(Ping::opaque()));
        while time::timeout(tick, &mut pong).await.is_err() {
            if !turns.was_heard() {
                return;
            }
        }
    }
}

/// Waits for the response, and reports the informational ones before it.
async fn listen(
    mut response: ResponseFuture,
    mut informed: impl FnMut(Response<()>),
) -> Result<Response<h2::RecvStream>, h2::Error> {
    let mut passed = 0;
    poll_fn(|cx| {
        while let Poll::Ready(Some(Ok(early))) = response.poll_informational(cx) {
            passed += 1;
            if passed <= MAX_INFORMED {
                informed(early);
            }
        }
        Pin::new(&mut response).poll(cx)
    })
    .await
}

fn builder() -> client::Builder {
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .initial_max_send_streams(FIRST_STREAMS)
        .enable_push(false);
    builder
}
