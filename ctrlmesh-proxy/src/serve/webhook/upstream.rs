//! A connection to a webhook server, used for one call after the other.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{self, Instant};
use tokio_rustls::TlsConnector;
use tracing::debug;

use super::body::Body;
use crate::net::accept;
use crate::serve::idle_connection::{IdleConnection, NotAnswered};
use crate::session::Server;

/// What a proxy answers to another one, if its pod was sent nothing of the call: another pod may be asked then. No
/// webhook server answers so.
pub(super) const NOT_REACHED: StatusCode = StatusCode::MISDIRECTED_REQUEST;

/// Why a call was not answered.
#[derive(Debug, Error)]
pub(super) enum Unanswered {
    /// Nothing of the call was sent.
    #[error("the webhook server is not reached: {0}")]
    Connect(#[source] io::Error),
    /// Perhaps it was carried out.
    #[error("the webhook server has not answered: {0}")]
    Broken(#[source] hyper::Error),
    #[error("the webhook server has not answered in time")]
    Late,
    #[error("no replica owns the object now")]
    Unowned,
    #[error("no replica of shard {shard:?}, which owns the object, has answered")]
    Away { shard: String },
    #[error("the review is too large to be read, or there is no memory for it")]
    Unread,
}

impl Unanswered {
    /// What the caller is told.
    pub(super) fn response<B>(&self, is_peer: bool) -> Response<Either<B, Full<Bytes>>> {
        debug!(error = self as &dyn std::error::Error, "webhook not answered");
        let mut response = Response::new(Either::Right(format!("ctrlmesh-proxy: {self}\n").into()));
        *response.status_mut() = match self {
            Self::Connect(_) if is_peer => NOT_REACHED,
            Self::Late => StatusCode::GATEWAY_TIMEOUT,
            Self::Connect(_) | Self::Broken(_) | Self::Unowned | Self::Away { .. } | Self::Unread => {
                StatusCode::BAD_GATEWAY
            }
        };
        let text = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, text);
        response
    }
}

/// What a webhook server has answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) response: Response<Incoming>,
    /// From the sending of the call, over a connection that was open, to the head of the answer.
    pub(super) took: Duration,
}

pub(super) type Sender = http1::SendRequest<Body>;

/// A connection to a webhook server.
pub(super) type Upstream = IdleConnection<Body>;

impl From<NotAnswered<io::Error>> for Unanswered {
    fn from(not_answered: NotAnswered<io::Error>) -> Self {
        match not_answered {
            NotAnswered::Open(error) => Self::Connect(error),
            NotAnswered::Unsent(error) => Self::Connect(io::Error::other(error)),
            NotAnswered::Sent(error) => Self::Broken(error),
        }
    }
}

/// Sends a call over the connection that is idle, or one that it opens.
pub(super) async fn send(
    upstream: &Upstream,
    call: Request<Body>,
    open: impl AsyncFn() -> io::Result<Sender>,
) -> Result<Answer, Unanswered> {
    let sent = Cell::new(Instant::now());
    let open = async || {
        let opened = open().await;
        sent.set(Instant::now());
        opened
    };
    let response = upstream.send(call, open).await?;
    Ok(Answer { response, took: sent.get().elapsed() })
}

/// Begins TLS and HTTP/1.1. The end of the connection notifies `ended`.
///
/// # Errors
/// If the server does not present what `config` asks for, or not in time.
pub(super) async fn open(
    stream: TcpStream,
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    server: &Rc<Server>,
    ended: &Rc<Notify>,
) -> io::Result<Sender> {
    accept::set_socket_options(&stream)?;
    let handshake = TlsConnector::from(config).connect(name, stream);
    let stream = time::timeout(server.dialer.deadline, Box::pin(handshake)).await.map_err(io::Error::from).flatten()?;
    let mut builder = http1::Builder::new();
    let begun = builder.preserve_header_case(true).handshake(TokioIo::new(stream)).await;
    let (sender, connection) = begun.map_err(io::Error::other)?;
    let (open, ended) = (server.metrics.upstream_connection(), ended.clone());
    server.drain.spawn_part(async move {
        if let Err(error) = connection.await {
            debug!(error = &error as &dyn std::error::Error, "connection to a webhook server broke");
        }
        drop(open);
        ended.notify_one();
    });
    Ok(sender)
}
