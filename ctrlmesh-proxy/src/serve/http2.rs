//! A client connection that carries many requests at once.

mod frames;

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use ctrlmesh_runtime::poll_on_wake::PollOnWake;
use h2::server::{Builder, Connection, SendResponse};
use h2::{Reason, RecvStream};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri, header};
use hyper::body::Body as _;
use rustls::ServerConnection;
use tokio::time;
use tokio::time::{Instant, Sleep};
use tracing::debug;

use crate::metrics::ClientError;
use crate::net::body;
use crate::net::body::{BudgetExceeded, CountedBytes, Relay};
use crate::net::memory_budget::Reservation;
use crate::net::tls::stream::{BatchedStream, ServerStream};
use crate::serve::exchange::Abort;
use crate::serve::http2::frames::Frames;
use crate::serve::reply::Reply;
use crate::serve::tap::Looked;
use crate::session::Session;

/// The largest head of a request: what the API server takes.
const MAX_HEAD_BYTES: u32 = 1 << 20;

/// How many requests a connection may have under way: what Go's servers allow by themselves. An API server allows 100,
/// and where a client asks more than that at once, it has further connections.
const MAX_STREAMS: u32 = 250;

/// CollectBudget for one request's body.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// CollectBudget for all requests' bodies of a connection: this bounds what one client can make the proxy keep.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// How much of a response may wait to be written.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// How many SETTINGS a client may send in how long: others send one, or two.
const MAX_SETTINGS: (u64, Duration) = (100, Duration::from_secs(10));

/// Whom a client asks that does not say.
const UNNAMED: &str = "kubernetes.default.svc";

/// Serves a connection until its client leaves, or is asked to.
pub(super) async fn serve(session: Rc<Session>, stream: ServerStream, deadline: Instant) {
    let server = session.server.clone();
    let (stream, driver) = BatchedStream::new(stream);
    let frames = Rc::<RefCell<Frames>>::default();
    let backlog = session.resources.unread.budget();
    let stream = Looked::new(stream, frames.clone(), backlog);
    let Some(handshake) =
        server.in_time(deadline, Box::pin(builder().handshake::<_, CountedBytes>(stream))).await
    else {
        return;
    };
    let ended = match handshake {
        Ok(connection) => Box::pin(run(&session, connection, driver, &frames, deadline)).await,
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        if !error.is_io() && !error.is_remote() {
            server.metrics.client_error(ClientError::Protocol);
        }
    }
}

async fn run(
    session: &Rc<Session>,
    mut connection: Connection<
        Looked<BatchedStream<ServerConnection>, Rc<RefCell<Frames>>>,
        CountedBytes,
    >,
    driver: BatchedStream<ServerConnection>,
    frames: &RefCell<Frames>,
    deadline: Instant,
) -> Result<(), h2::Error> {
    let drain = &session.server.drain;
    let mut patience = Patience::new(deadline, session.server.header_timeout);
    let mut flood = Flood::new();
    let closing = pin!(async {
        tokio::select! {
            // Shutdown.
            () = drain.started() => {}
            // The API server wants its client to go elsewhere.
            () = session.leaving.notified() => {}
        }
    });
    let mut closing = PollOnWake::new(closing);
    let mut asked = false;
    loop {
        let accepted = poll_fn(|cx| {
            if !asked && Pin::new(&mut closing).poll(cx).is_ready() {
                asked = true;
                connection.graceful_shutdown();
            }
            let accepted = driver.poll_batched(cx, |cx| connection.poll_accept(cx)).map(Ok);
            let frames = frames.borrow();
            if flood.is_one(frames.settings()) {
                return Poll::Ready(Err(ClientError::Protocol));
            }
            if accepted.is_ready() {
                return accepted;
            }
            patience.poll(frames.is_amid_head(), cx).map(|()| Err(ClientError::Slow))
        });
        let accepted = match accepted.await {
            Ok(accepted) => accepted,
            Err(error) => {
                session.server.metrics.client_error(error);
                return Ok(());
            }
        };
        patience.request_came();
        match accepted {
            Some(Ok((request, respond))) => {
                drain.spawn_part(answer(session.clone(), request, respond));
            }
            Some(Err(error)) => return Err(error),
            None => return Ok(()),
        }
    }
}

/// How many SETTINGS came lately.
struct Flood {
    since: Instant,
    before: u64,
    seen: u64,
}

impl Flood {
    fn new() -> Self {
        Self { since: Instant::now(), before: 0, seen: 0 }
    }

    /// Whether it is one, now that so many came in all.
    fn is_one(&mut self, settings: u64) -> bool {
        if settings == self.seen {
            return false;
        }
        let (most, time) = MAX_SETTINGS;
        if self.since.elapsed() > time {
            (self.since, self.before) = (Instant::now(), self.seen);
        }
        self.seen = settings;
        settings - self.before > most
    }
}

/// How long a client may take for its first request, and for the head of each.
struct Patience {
    first: bool,
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    fn new(deadline: Instant, timeout: Duration) -> Self {
        Self { first: true, timeout, timer: Some(Box::pin(time::sleep_until(deadline))) }
    }

    fn request_came(&mut self) {
        self.first = false;
        self.timer = None;
    }

    /// Ready once it is over; `amid_head` says whether a head is on its way.
    fn poll(&mut self, amid_head: bool, cx: &mut Context<'_>) -> Poll<()> {
        if !self.first && !amid_head {
            self.timer = None;
            return Poll::Pending;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(time::sleep(self.timeout)));
        timer.as_mut().poll(cx)
    }
}

/// Answers one request, to the end of its response's body.
async fn answer(
    session: Rc<Session>,
    request: Request<RecvStream>,
    mut respond: SendResponse<CountedBytes>,
) {
    let Ok(waits) = awaited(&session, &request) else {
        return respond.send_reset(Reason::ENHANCE_YOUR_CALM);
    };
    let mut request = request.map(|body| Relay::uploaded(body, waits));
    if request.uri().authority().is_none() {
        name_authority(&mut request);
    }
    let respond = RefCell::new(respond);
    let informed = |early: Response<()>| {
        // A client that is gone needs no answer.
        let _gone = respond.borrow_mut().send_informational(early);
    };
    // Apart, so that a watch does not hold for hours the room that its request took.
    let exchange = Box::pin(unless_reset(&respond, session.exchange(request, informed)));
    let Some(answered) = exchange.await else {
        return;
    };
    let mut respond = respond.into_inner();
    let response = match answered {
        Ok(response) => response,
        Err(Abort(reason)) => return respond.send_reset(reason),
    };
    let (head, body) = response.into_parts();
    if let Err(error) = send(Response::from_parts(head, ()), body, &mut respond).await {
        debug!(error = &error as &dyn std::error::Error, "response broke off");
    }
}

/// Counts what may come of a request's body before the API server is asked for it; fails where too much waits already.
fn awaited(
    session: &Session,
    request: &Request<RecvStream>,
) -> Result<Option<Reservation>, BudgetExceeded> {
    if request.body().is_end_stream() {
        return Ok(None);
    }
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let window = STREAM_WINDOW_BYTES as usize;
    let most = length.unwrap_or(window).min(window);
    session.resources.unread.budget().reserve(most).map(Some).ok_or(BudgetExceeded)
}

/// Where a client says only by a header whom it asks, as Go's servers let it, says it as HTTP/2 does.
fn name_authority(request: &mut Request<Relay>) {
    let host = request.headers_mut().remove(header::HOST);
    let named = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(named.unwrap_or_else(|| Authority::from_static(UNNAMED)));
    parts.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
}

async fn send(
    head: Response<()>,
    body: Reply,
    respond: &mut SendResponse<CountedBytes>,
) -> Result<(), body::PipeError> {
    let unread = body.unread().clone();
    let ends = body.is_end_stream();
    let mut stream = respond.send_response(head, ends).map_err(body::PipeError::Write)?;
    if ends { Ok(()) } else { body::pipe(body, &mut stream, &unread).await }
}

/// What `work` gives, unless the client gives the request up.
async fn unless_reset<T>(
    respond: &RefCell<SendResponse<CountedBytes>>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(done));
        }
        respond.borrow_mut().poll_reset(cx).map(|_: Result<Reason, h2::Error>| None)
    })
    .await
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buffer_size(SEND_BUFFER_BYTES);
    builder
}
