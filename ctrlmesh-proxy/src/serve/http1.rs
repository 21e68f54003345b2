//! Serves a client connection over HTTP/1.1.

mod progress;

use std::cell::Cell;
use std::future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::poll_on_wake::PollOnWake;
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::metrics::ClientError;
use crate::net::body::Relay;
use crate::net::tls::stream::ServerStream;
use crate::net::tunnel;
use crate::serve::failure::Abort;
use crate::serve::headers;
use crate::serve::http1::progress::HeadProgress;
use crate::serve::reply::{Http1Reply, Reply};
use crate::serve::tap::Tap;
use crate::serve::unless_gone;
use crate::serve::websocket;
use crate::serve::websocket::LastFrames;
use crate::session::Session;
use crate::watch::upgraded::UpgradedWatch;

/// The largest head of a request: what the API server takes (Go's default, and its slack).
const MAX_HEAD_BYTES: usize = (1 << 20) + 4096;

/// Between requests: what the API server allows.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// Counts the requests of a connection.
struct Exchanges {
    requests: Cell<u64>,
    progress: Arc<HeadProgress>,
}

pub(super) async fn serve(session: Rc<Session>, stream: ServerStream, deadline: Instant) {
    let progress = Arc::<HeadProgress>::default();
    let budget = session.resources.unread.budget();
    let stream = Tap::new(stream, progress.clone(), budget);
    let exchanges = Rc::new(Exchanges { requests: Cell::default(), progress });
    let service = {
        let (session, exchanges) = (session.clone(), exchanges.clone());
        service_fn(move |request| exchanges.clone().answer(session.clone(), request))
    };
    let connection = builder().serve_connection(TokioIo::new(stream), service).with_upgrades();
    let mut connection = pin!(connection);
    let metrics = &session.server.metrics;
    let closing = pin!(session.server.drain.started());
    let mut closing = PollOnWake::new(closing);
    let mut first = pin!(time::sleep_until(deadline));
    let (mut is_closing, mut timed_out) = (false, false);
    let ended = loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => break ended,
            // Shutdown: no request after this one.
            () = &mut closing, if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
            // The first request takes too long to come.
            () = &mut first, if !timed_out && exchanges.requests.get() == 0 => {
                timed_out = true;
                if exchanges.requests.get() == 0 {
                    return metrics.client_error(ClientError::Slow);
                }
            }
        }
    };
    session.lock.end();
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        if error.is_timeout() {
            // A client that idles between two requests is not slow.
            if exchanges.progress.is_amid_request() {
                metrics.client_error(ClientError::Slow);
            }
        } else if error.is_parse() {
            metrics.client_error(ClientError::Protocol);
        }
    }
}

impl Exchanges {
    async fn answer(
        self: Rc<Self>,
        session: Rc<Session>,
        request: Request<Incoming>,
    ) -> Result<Response<Http1Reply>, Abort> {
        self.requests.set(self.requests.get() + 1);
        self.progress.begin_answer();
        // Boxed, so that an idle connection does not hold the memory of a request's future.
        let response = Box::pin(answer(session, request)).await?;
        let expects_request = response.status() != StatusCode::SWITCHING_PROTOCOLS;
        self.progress.end_answer(expects_request);
        Ok(response.map(Http1Reply))
    }
}

fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .preserve_header_case(true)
        .auto_date_header(false);
    builder
}

async fn answer(session: Rc<Session>, mut request: Request<Incoming>) -> Result<Response<Reply>, Abort> {
    let protocol = headers::upgrade(request.headers());
    let client = protocol.is_some().then(|| upgrade::on(&mut request));
    let continued = expectation(&mut request);
    let mut request = request.map(|body| match &continued {
        Some(continued) => Relay::expected(body, continued.clone()),
        None => Relay::http1(body, None),
    });
    headers::strip(request.headers_mut());
    if let Some(protocol) = protocol {
        headers::set_upgrade(request.headers_mut(), protocol);
        headers::strip_second_token(request.headers_mut());
    }
    let mut response = session.clone().exchange(request, |_| {}).await?;
    let protocol = headers::upgrade(response.headers());
    let upstream = response.extensions_mut().remove::<OnUpgrade>();
    let watch = response.extensions_mut().remove::<Arc<UpgradedWatch>>();
    let last = response.extensions_mut().remove::<LastFrames>();
    headers::strip(response.headers_mut());
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        if let Some(protocol) = protocol {
            headers::set_upgrade(response.headers_mut(), protocol);
        }
        match (client, upstream, last) {
            (Some(client), _, Some(last)) => websocket::close(&session, client, last),
            (Some(client), Some(upstream), None) => switch(session, client, upstream, watch),
            _ => {}
        }
    }
    Ok(response)
}

/// Tunnels an upgraded connection.
fn switch(session: Rc<Session>, client: OnUpgrade, upstream: OnUpgrade, watch: Option<Arc<UpgradedWatch>>) {
    let open = session.server.metrics.tunnel();
    let drain = session.server.drain.clone();
    drain.spawn_local(async move {
        let tunnel = async {
            if let Err(error) = tunnel::upgraded(client, upstream).await {
                debug!(error = &error as &dyn std::error::Error, "tunnel broke");
            }
        };
        let outdated = async {
            match &watch {
                Some(watch) => watch.outdated(&session).await,
                None => future::pending().await,
            }
        };
        let tunnel = async {
            tokio::select! {
                // The watch would go on under an outdated policy.
                () = outdated => {}
                () = tunnel => {}
            }
        };
        unless_gone(session.gone.as_ref(), tunnel).await;
        drop(open);
    });
}

/// For a client that expects `100 Continue`: cancelled once the API server has sent it.
fn expectation(request: &mut Request<Incoming>) -> Option<CancellationToken> {
    let expects = request.headers().get(header::EXPECT).map(HeaderValue::as_bytes)?;
    if !expects.eq_ignore_ascii_case(b"100-continue") {
        return None;
    }
    let continued = CancellationToken::new();
    let received = continued.clone();
    hyper::ext::on_informational(request, move |early| {
        if early.status() == StatusCode::CONTINUE {
            received.cancel();
        }
    });
    Some(continued)
}
