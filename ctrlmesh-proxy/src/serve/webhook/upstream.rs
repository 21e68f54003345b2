//! A connection to a webhook server, used for one call after the other.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

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
use tokio::time;
use tokio_rustls::TlsConnector;
use tracing::debug;

use super::body::Body;
use crate::net::accept;
use crate::session::Server;

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
    pub(super) fn response<B>(&self) -> Response<Either<B, Full<Bytes>>> {
        debug!(error = self as &dyn std::error::Error, "webhook not answered");
        let mut response = Response::new(Either::Right(format!("ctrlmesh-proxy: {self}\n").into()));
        let is_late = matches!(self, Self::Late);
        *response.status_mut() = if is_late { StatusCode::GATEWAY_TIMEOUT } else { StatusCode::BAD_GATEWAY };
        let text = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, text);
        response
    }
}

pub(super) type Sender = http1::SendRequest<Body>;

/// The idle connection to one server, if there is one.
#[derive(Debug, Default)]
pub(super) struct Upstream(RefCell<Option<Sender>>);

impl Upstream {
    /// Sends a request over the idle connection or one that it opens, once.
    pub(super) async fn send(
        &self,
        mut request: Request<Body>,
        open: impl AsyncFn() -> io::Result<Sender>,
    ) -> Result<Response<Incoming>, Unanswered> {
        let idle = self.0.take();
        if let Some(mut sender) = idle
            && sender.ready().await.is_ok()
        {
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(self.keep(sender, response)),
                Err(mut error) => match error.take_message() {
                    // Closed while it was idle: nothing of the request was sent.
                    Some(unsent) => request = unsent,
                    None => return Err(Unanswered::Broken(error.into_error())),
                },
            }
        }
        let mut sender = open().await.map_err(Unanswered::Connect)?;
        match sender.try_send_request(request).await {
            Ok(response) => Ok(self.keep(sender, response)),
            Err(mut error) => Err(match error.take_message() {
                Some(_unsent) => Unanswered::Connect(io::Error::other(error.into_error())),
                None => Unanswered::Broken(error.into_error()),
            }),
        }
    }

    /// The connection is used again once the response was read.
    fn keep(&self, sender: Sender, response: Response<Incoming>) -> Response<Incoming> {
        self.0.replace(Some(sender));
        response
    }
}

/// Begins TLS and HTTP/1.1.
///
/// # Errors
/// If the server does not present what `config` asks for, or not in time.
pub(super) async fn open(
    stream: TcpStream,
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    server: &Rc<Server>,
) -> io::Result<Sender> {
    accept::set_socket_options(&stream)?;
    let handshake = TlsConnector::from(config).connect(name, stream);
    let stream = time::timeout(server.dialer.deadline, Box::pin(handshake)).await.map_err(io::Error::from).flatten()?;
    let mut builder = http1::Builder::new();
    let begun = builder.preserve_header_case(true).handshake(TokioIo::new(stream)).await;
    let (sender, connection) = begun.map_err(io::Error::other)?;
    let open = server.metrics.upstream_connection();
    server.drain.spawn_part(async move {
        if let Err(error) = connection.await {
            debug!(error = &error as &dyn std::error::Error, "connection to a webhook server broke");
        }
        drop(open);
    });
    Ok(sender)
}
