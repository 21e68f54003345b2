//! Pool of HTTP/2 connections to the API server.

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
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::metrics::UpstreamError;
use crate::net::body;
use crate::net::body::{CountedBytes, READ_AHEAD_BYTES, Relay, StreamPermit, UnreadBytes};
use crate::net::tls::stream::BatchedStream;
use crate::upstream::{DialedTarget, Dialer, SendError};

/// For one response: 1 MiB feeds 1 GB/s at a round trip of a millisecond.
const STREAM_WINDOW_BYTES: u32 = READ_AHEAD_BYTES;

/// For all responses of a connection: one window for each stream that a client may open, and one more. So lists that
/// nobody reads hold up no watch beside them. Unread bytes are bounded by the memory budget.
const CONNECTION_WINDOW_BYTES: u32 = 251 * STREAM_WINDOW_BYTES;

/// The largest head of a response: what clients in Go take.
const MAX_HEAD_BYTES: u32 = 1 << 20;

/// Of a request's body.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// Informational responses that are passed on for each request: no flow-control window bounds them.
const MAX_INFORMATIONAL: usize = 16;

/// Streams that are opened before the API server's SETTINGS: kube-apiserver's default, and that of clients in Go.
const INITIAL_STREAMS: usize = 100;

/// The HTTP/2 connections of one client connection.
#[derive(Debug)]
pub struct Pool {
    api_server: DialedTarget,
    leaving: Rc<Notify>,
    unread: Rc<UnreadBytes>,
    connections: RefCell<Vec<Rc<PooledConnection>>>,
    /// Locked while a connection is opened, so that concurrent requests wait for the same one.
    dialing: Mutex<()>,
    dial_attempts: Cell<u64>,
    last_dial_error: RefCell<Option<Arc<SendError>>>,
}

#[derive(Debug)]
struct PooledConnection {
    send: RefCell<SendRequest<CountedBytes>>,
    open_streams: Rc<Cell<usize>>,
    reset: CancellationToken,
}

/// The connection on which a request was sent.
#[derive(Debug, Default)]
pub struct UsedConnection {
    /// Of HTTP/2.
    http2: RefCell<Option<(Weak<PooledConnection>, CancellationToken)>>,
    is_used: Cell<bool>,
}

impl UsedConnection {
    /// Whether something of the request may have been sent.
    pub fn is_used(&self) -> bool {
        self.is_used.get()
    }

    pub(super) fn uses(&self) {
        self.is_used.set(true);
    }
}

impl Pool {
    pub(super) fn new(api_server: DialedTarget, leaving: Rc<Notify>, unread: Rc<UnreadBytes>) -> Self {
        Self {
            api_server,
            leaving,
            unread,
            connections: RefCell::default(),
            dialing: Mutex::default(),
            dial_attempts: Cell::default(),
            last_dial_error: RefCell::default(),
        }
    }

    /// Uses a connection with a free stream, or opens a new one, and stores it in `used`.
    pub async fn send(
        &self,
        request: Request<Relay>,
        used: &UsedConnection,
        on_informational: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, SendError> {
        let connection = match self.free() {
            Some(free) => free,
            None => Box::pin(self.open()).await?,
        };
        let mut permit = StreamPermit::acquire(&connection.open_streams);
        let mut send = connection.send.borrow().clone();
        *used.http2.borrow_mut() = Some((Rc::downgrade(&connection), connection.reset.clone()));
        used.uses();
        drop(connection);
        let (head, body) = request.into_parts();
        let ends = body.is_end_stream();
        let (response, mut stream) =
            send.send_request(Request::from_parts(head, ()), ends).map_err(SendError::Http2)?;
        drop(send);
        if !ends {
            let unread = self.unread.clone();
            let released = permit.released();
            self.api_server.dialer.drain.spawn_part(async move {
                tokio::select! {
                    biased;
                    piped = body::pipe(body, &mut stream, &unread) => if let Err(error) = piped {
                        debug!(error = &error as &dyn std::error::Error, "request body broke off");
                    },
                    // The client is gone or has its answer, so nobody reads more of the request.
                    _released = released => stream.send_reset(Reason::CANCEL),
                }
            });
        }
        receive(response, on_informational)
            .await
            .map(|response| response.map(|body| Relay::http2(body, Some(permit))))
            .map_err(SendError::Http2)
    }

    /// A connection with a free stream.
    fn free(&self) -> Option<Rc<PooledConnection>> {
        let mut connections = self.connections.borrow_mut();
        connections.retain(|connection| connection.is_open());
        connections
            .iter()
            .find(|connection| connection.open_streams.get() < connection.send.borrow().current_max_send_streams())
            .cloned()
    }

    /// Sends no new requests on a connection; those under way go on.
    pub fn retire(&self, used: &UsedConnection) {
        let Some((retired, _)) = used.http2.take() else { return };
        let mut connections = self.connections.borrow_mut();
        connections.retain(|other| !std::ptr::eq(Rc::as_ptr(other), retired.as_ptr()));
    }

    /// Resets a connection, and ends all that is under way on it.
    pub fn reset(&self, used: &UsedConnection) {
        if let Some((_, reset)) = &*used.http2.borrow() {
            reset.cancel();
        }
        self.retire(used);
    }

    /// A new connection, or one that another request opened meanwhile. A request that waited for another's failed
    /// attempt fails as well, because its deadline is over.
    async fn open(&self) -> Result<Rc<PooledConnection>, SendError> {
        let attempts = self.dial_attempts.get();
        let _dialing = self.dialing.lock().await;
        if let Some(free) = self.free() {
            return Ok(free);
        }
        if self.dial_attempts.get() != attempts
            && let Some(error) = self.last_dial_error.borrow().as_ref()
        {
            return Err(SendError::Shared(error.clone()));
        }
        let dialed = self.dial().await.map_err(Arc::new);
        self.dial_attempts.set(self.dial_attempts.get() + 1);
        *self.last_dial_error.borrow_mut() = dialed.as_ref().err().cloned();
        dialed.map_err(|error| {
            if matches!(*error, SendError::Protocol) {
                // The client's next connection is offered what the API server speaks.
                self.leaving.notify_one();
            }
            SendError::Shared(error)
        })
    }

    async fn dial(&self) -> Result<Rc<PooledConnection>, SendError> {
        let dialer = &self.api_server.dialer;
        let until = Instant::now() + dialer.deadline;
        let reset = CancellationToken::new();
        let stream = self.api_server.dial(true, until, &reset).await?;
        let (stream, driver) = BatchedStream::new(stream);
        let handshake = Box::pin(builder().handshake(stream));
        let (send, connection) = time::timeout_at(until, handshake)
            .await
            .map_err(|_elapsed| dialer.too_late())?
            .map_err(SendError::Http2)?;
        let open_streams = Rc::default();
        let pooled = Rc::new(PooledConnection { send: RefCell::new(send), open_streams, reset: reset.clone() });
        let leaving = self.leaving.clone();
        let run = Box::pin(run(connection, driver, Rc::downgrade(&pooled), leaving, dialer.clone()));
        dialer.drain.spawn_part(async move {
            let _ended = reset.run_until_cancelled(run).await;
        });
        self.connections.borrow_mut().push(pooled.clone());
        Ok(pooled)
    }
}

impl PooledConnection {
    /// Whether new streams may still be opened: not after GOAWAY, or once the connection broke.
    fn is_open(&self) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        !matches!(self.send.borrow_mut().poll_ready(&mut cx), Poll::Ready(Err(_)))
    }
}

/// Drives a connection to its end. Notifies `leaving` when the API server wants no more streams on it.
async fn run(
    mut connection: Connection<BatchedStream<ClientConnection>, CountedBytes>,
    driver: BatchedStream<ClientConnection>,
    pooled: Weak<PooledConnection>,
    leaving: Rc<Notify>,
    dialer: Rc<Dialer>,
) {
    let _open = dialer.metrics.upstream_connection();
    let silence = pin!(silence(connection.ping_pong(), &driver, dialer.silence));
    let mut silence = PollOnWake::new(silence);
    let mut notified = false;
    let ended = poll_fn(|cx| {
        let mut ended = driver.poll_batched(cx, |cx| Pin::new(&mut connection).poll(cx)).map(Some);
        // Polled last, so that bytes which have arrived count as heard.
        if ended.is_pending() && Pin::new(&mut silence).poll(cx).is_ready() {
            ended = Poll::Ready(None);
        }
        // A retired connection concerns no new requests.
        let left = pooled.upgrade().is_some_and(|pooled| ended.is_ready() || !pooled.is_open());
        if !notified && left {
            notified = true;
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

/// Completes once nothing arrived for `timeout`. After two thirds of that the API server is sent a PING. A client's own
/// PINGs reach only the proxy.
async fn silence(pings: Option<PingPong>, driver: &BatchedStream<ClientConnection>, timeout: Duration) {
    let Some(mut pings) = pings else { return future::pending().await };
    let tick = timeout / 3;
    loop {
        let mut quiet = 0;
        while quiet < 2 {
            time::sleep(tick).await;
            quiet = if driver.take_received() { 0 } else { quiet + 1 };
        }
        let mut pong = pin!(pings.ping(Ping::opaque()));
        while time::timeout(tick, &mut pong).await.is_err() {
            if !driver.take_received() {
                return;
            }
        }
    }
}

/// Waits for the response, and reports the informational ones before it.
async fn receive(
    mut response: ResponseFuture,
    mut on_informational: impl FnMut(Response<()>),
) -> Result<Response<h2::RecvStream>, h2::Error> {
    let mut passed = 0;
    poll_fn(|cx| {
        while let Poll::Ready(Some(Ok(early))) = response.poll_informational(cx) {
            passed += 1;
            if passed <= MAX_INFORMATIONAL {
                on_informational(early);
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
        .initial_max_send_streams(INITIAL_STREAMS)
        .enable_push(false);
    builder
}
