//! A client connection that carries one request at a time.

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
use crate::serve::exchange::Abort;
use crate::serve::headers;
use crate::serve::http1::progress::HeadProgress;
use crate::serve::reply::{Pieces, Reply};
use crate::serve::tap::Looked;
use crate::serve::unless_gone;
use crate::session::Session;
use crate::watch::upgraded::UpgradedWatch;

/// The largest head of a request: what the API server takes (Go's default, and its slack).
const MAX_HEAD_BYTES: usize = (1 << 20) + 4096;

/// How long a connection may idle between requests: as long as the API server lets it.
const IDLE: Duration = Duration::from_secs(90);

/// What is known of the requests of a connection.
struct Exchanges {
    /// How many there were.
    requests: Cell<u64>,
    progress: Arc<HeadProgress>,
}

/// Serves a connection until its client leaves, or is asked to.
pub(super) async fn serve(session: Rc<Session>, stream: ServerStream, deadline: Instant) {
    let progress = Arc::<HeadProgress>::default();
    let backlog = session.resources.unread.budget();
    let stream = Looked::new(stream, progress.clone(), backlog);
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
    let (mut asked, mut waited) = (false, false);
    let ended = loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => break ended,
            // Shutdown: no request after this one.
            () = &mut closing, if !asked => {
                asked = true;
                connection.as_mut().graceful_shutdown();
            }
            // The first request takes too long to come.
            () = &mut first, if !waited && exchanges.requests.get() == 0 => {
                waited = true;
                if exchanges.requests.get() == 0 {
                    return metrics.client_error(ClientError::Slow);
                }
            }
        }
    };
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "connection of a client broke");
        if error.is_timeout() {
            // One that says nothing between two requests is not slow.
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
    ) -> Result<Response<Pieces>, Abort> {
        self.requests.set(self.requests.get() + 1);
        self.progress.begin_answer();
        // Apart, so that an idle connection does not hold the room that a request takes.
        let response = Box::pin(answer(session, request)).await?;
        let goes_on = response.status() != StatusCode::SWITCHING_PROTOCOLS;
        self.progress.end_answer(goes_on);
        Ok(response.map(Pieces))
    }
}

fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(MAX_HEAD_BYTES)
        .preserve_header_case(true)
        .auto_date_header(false);
    builder
}

/// Answers one request.
async fn answer(
    session: Rc<Session>,
    mut request: Request<Incoming>,
) -> Result<Response<Reply>, Abort> {
    let protocol = headers::upgrade(request.headers());
    let client = protocol.is_some().then(|| upgrade::on(&mut request));
    let asked_for = expectation(&mut request);
    let mut request = request.map(|body| match &asked_for {
        Some(asked_for) => Relay::expected(body, asked_for.clone()),
        None => Relay::http1(body, None),
    });
    headers::strip(request.headers_mut());
    if let Some(protocol) = protocol {
        headers::set_upgrade(request.headers_mut(), protocol);
    }
    let mut response = session.clone().exchange(request, |_| {}).await?;
    let protocol = headers::upgrade(response.headers());
    let upstream = response.extensions_mut().remove::<OnUpgrade>();
    let watch = response.extensions_mut().remove::<Arc<UpgradedWatch>>();
    headers::strip(response.headers_mut());
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        if let Some(protocol) = protocol {
            headers::set_upgrade(response.headers_mut(), protocol);
        }
        if let (Some(client), Some(upstream)) = (client, upstream) {
            switch(session, client, upstream, watch);
        }
    }
    Ok(response)
}

/// Carries on with what the connection becomes.
fn switch(
    session: Rc<Session>,
    client: OnUpgrade,
    upstream: OnUpgrade,
    watch: Option<Arc<UpgradedWatch>>,
) {
    let open = session.server.metrics.tunnel();
    let drain = session.server.drain.clone();
    drain.spawn_local(async move {
        let tunnel = async {
            if let Err(error) = tunnel::upgraded(client, upstream).await {
                debug!(error = &error as &dyn std::error::Error, "tunnel broke");
            }
        };
        let replaced = async {
            match &watch {
                Some(watch) => watch.outdated(&session).await,
                None => future::pending().await,
            }
        };
        let tunnel = async {
            tokio::select! {
                // It would go on under a policy that holds no more.
                () = replaced => {}
                () = tunnel => {}
            }
        };
        unless_gone(session.gone.as_ref(), tunnel).await;
        drop(open);
    });
}

/// Where the client waits to be asked for its body: what tells that the API server did.
fn expectation(request: &mut Request<Incoming>) -> Option<CancellationToken> {
    let expects = request.headers().get(header::EXPECT).map(HeaderValue::as_bytes)?;
    if !expects.eq_ignore_ascii_case(b"100-continue") {
        return None;
    }
    let asked_for = CancellationToken::new();
    let tell = asked_for.clone();
    hyper::ext::on_informational(request, move |early| {
        if early.status() == StatusCode::CONTINUE {
            tell.cancel();
        }
    });
    Some(asked_for)
}
