//! Serves a client connection over HTTP/2.

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
use crate::serve::failure::Abort;
use crate::serve::http2::frames::Frames;
use crate::serve::reply::Reply;
use crate::serve::tap::Tap;
use crate::session::Session;

/// The largest head of a request: what the API server takes.
const MAX_HEAD_BYTES: u32 = 1 << 20;

/// Concurrent requests on a connection: the default of Go's servers. An API server allows 100; beyond that, upstream
/// gets further connections.
const MAX_STREAMS: u32 = 250;

/// For one request's body.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// For the bodies of all requests of a connection: bounds what one client can make the proxy buffer.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// Of a response.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// SETTINGS frames that a client may send within [`SETTINGS_PERIOD`]: an ordinary client sends one or two in all.
const MAX_SETTINGS: u64 = 100;
const SETTINGS_PERIOD: Duration = Duration::from_secs(10);

/// The authority of a request that names none.
const DEFAULT_AUTHORITY: &str = "kubernetes.default.svc";

pub(super) async fn serve(session: Rc<Session>, stream: ServerStream, deadline: Instant) {
    let server = session.server.clone();
    let (stream, driver) = BatchedStream::new(stream);
    let frames = Rc::<RefCell<Frames>>::default();
    let budget = session.resources.unread.budget();
    let stream = Tap::new(stream, frames.clone(), budget);
    let Some(handshake) = server.in_time(deadline, Box::pin(builder().handshake::<_, CountedBytes>(stream))).await
    else {
        return;
    };
    let ended = match handshake {
        Ok(connection) => Box::pin(run(&session, connection, driver, &frames, deadline)).await,
        Err(error) => Err(error),
    };
    session.lock.end();
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        if !error.is_io() && !error.is_remote() {
            server.metrics.client_error(ClientError::Protocol);
        }
    }
}

async fn run(
    session: &Rc<Session>,
    mut connection: Connection<Tap<BatchedStream<ServerConnection>, Rc<RefCell<Frames>>>, CountedBytes>,
    driver: BatchedStream<ServerConnection>,
    frames: &RefCell<Frames>,
    deadline: Instant,
) -> Result<(), h2::Error> {
    let drain = &session.server.drain;
    let mut head_deadline = HeadDeadline::new(deadline, session.server.header_timeout);
    let mut settings = SettingsRate::new();
    let closing = pin!(async {
        tokio::select! {
            // Shutdown.
            () = drain.started() => {}
            // The API server wants its client to go elsewhere.
            () = session.leaving.notified() => {}
        }
    });
    let mut closing = PollOnWake::new(closing);
    let mut is_closing = false;
    loop {
        let accepted = poll_fn(|cx| {
            if !is_closing && Pin::new(&mut closing).poll(cx).is_ready() {
                is_closing = true;
                connection.graceful_shutdown();
            }
            let accepted = driver.poll_batched(cx, |cx| connection.poll_accept(cx)).map(Ok);
            let frames = frames.borrow();
            if settings.is_flood(frames.settings()) {
                return Poll::Ready(Err(ClientError::Protocol));
            }
            if accepted.is_ready() {
                return accepted;
            }
            head_deadline.poll(frames.is_amid_head(), cx).map(|()| Err(ClientError::Slow))
        });
        let accepted = match accepted.await {
            Ok(accepted) => accepted,
            Err(error) => {
                session.server.metrics.client_error(error);
                return Ok(());
            }
        };
        head_deadline.on_request();
        match accepted {
            Some(Ok((request, respond))) => {
                drain.spawn_part(answer(session.clone(), request, respond));
            }
            Some(Err(error)) => return Err(error),
            None => return Ok(()),
        }
    }
}

/// The SETTINGS frames of the current period.
struct SettingsRate {
    since: Instant,
    before: u64,
    total: u64,
}

impl SettingsRate {
    fn new() -> Self {
        Self { since: Instant::now(), before: 0, total: 0 }
    }

    /// `total` counts all frames since the connection began.
    fn is_flood(&mut self, total: u64) -> bool {
        if total == self.total {
            return false;
        }
        if self.since.elapsed() > SETTINGS_PERIOD {
            (self.since, self.before) = (Instant::now(), self.total);
        }
        self.total = total;
        total - self.before > MAX_SETTINGS
    }
}

/// The deadline of a client's first request, and of the head of each.
struct HeadDeadline {
    first: bool,
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl HeadDeadline {
    fn new(deadline: Instant, timeout: Duration) -> Self {
        Self { first: true, timeout, timer: Some(Box::pin(time::sleep_until(deadline))) }
    }

    fn on_request(&mut self) {
        self.first = false;
        self.timer = None;
    }

    /// Ready once the deadline is over. `amid_head` says whether a head has begun.
    fn poll(&mut self, amid_head: bool, cx: &mut Context<'_>) -> Poll<()> {
        if !self.first && !amid_head {
            self.timer = None;
            return Poll::Pending;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(time::sleep(self.timeout)));
        timer.as_mut().poll(cx)
    }
}

/// Answers one request until its response has been sent.
async fn answer(session: Rc<Session>, request: Request<RecvStream>, mut respond: SendResponse<CountedBytes>) {
    let Ok(reservation) = reserve_body(&session, &request) else {
        return respond.send_reset(Reason::ENHANCE_YOUR_CALM);
    };
    let mut request = request.map(|body| Relay::uploaded(body, reservation));
    if request.uri().authority().is_none() {
        name_authority(&mut request);
    }
    let respond = Rc::new(RefCell::new(respond));
    let early_respond = Rc::downgrade(&respond);
    let on_informational = move |early: Response<()>| {
        if let Some(respond) = early_respond.upgrade() {
            // Fails only where the client is gone.
            let _gone = respond.borrow_mut().send_informational(early);
        }
    };
    // Boxed, so that a watch does not hold the memory of its request's future for hours.
    let exchange = Box::pin(unless_reset(&respond, session.exchange(request, on_informational)));
    let Some(answered) = exchange.await else {
        return;
    };
    // Nobody else has it.
    let Some(mut respond) = Rc::into_inner(respond).map(RefCell::into_inner) else { return };
    let response = match answered {
        Ok(response) => response,
        Err(Abort(reason)) => return respond.send_reset(reason),
    };
    let (head, body) = response.into_parts();
    if let Err(error) = send(Response::from_parts(head, ()), body, &mut respond).await {
        debug!(error = &error as &dyn std::error::Error, "response broke off");
    }
}

/// Reserves memory for the part of a request's body that may arrive before the proxy reads it.
fn reserve_body(session: &Session, request: &Request<RecvStream>) -> Result<Option<Reservation>, BudgetExceeded> {
    if request.body().is_end_stream() {
        return Ok(None);
    }
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let window = STREAM_WINDOW_BYTES as usize;
    let bytes = length.unwrap_or(window).min(window);
    session.resources.unread.budget().reserve(bytes).map(Some).ok_or(BudgetExceeded)
}

/// Turns a `Host` header into the `:authority` that HTTP/2 wants; Go's servers take either.
fn name_authority(request: &mut Request<Relay>) {
    let host = request.headers_mut().remove(header::HOST);
    let named = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(named.unwrap_or_else(|| Authority::from_static(DEFAULT_AUTHORITY)));
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

/// `None` where the client resets the stream before `work` is done.
async fn unless_reset<T>(respond: &RefCell<SendResponse<CountedBytes>>, work: impl Future<Output = T>) -> Option<T> {
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
