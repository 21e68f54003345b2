//! Pool of HTTP/1.1 connections to the API server.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use http::{Request, Response};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::net::body::{Relay, StreamPermit};
use crate::upstream::{DialedTarget, SendError, UsedConnection};

/// The largest head of a response: what clients in Go take.
const MAX_HEAD_BYTES: usize = 1 << 20;

/// The HTTP/1.1 connections of one client connection.
#[derive(Debug)]
pub struct Pool {
    api_server: DialedTarget,
    idle: RefCell<Vec<PooledConnection>>,
}

#[derive(Debug)]
struct PooledConnection {
    send: http1::SendRequest<Relay>,
    /// Responses that are still being read: none or one.
    open_streams: Rc<Cell<usize>>,
    reset: CancellationToken,
}

impl Pool {
    pub(super) fn new(api_server: DialedTarget) -> Self {
        Self { api_server, idle: RefCell::default() }
    }

    /// Uses an idle connection, or opens a new one. Resets it where the request is given up without an answer.
    pub async fn send(&self, mut request: Request<Relay>, used: &UsedConnection) -> Result<Response<Relay>, SendError> {
        loop {
            let (mut connection, reused) = match self.take_idle().await {
                Some(connection) => (connection, true),
                None => (Box::pin(self.open()).await?, false),
            };
            used.uses();
            let unanswered = connection.reset.clone().drop_guard();
            match connection.send.try_send_request(request).await {
                Ok(response) => {
                    drop(unanswered.disarm());
                    let permit = StreamPermit::acquire(&connection.open_streams);
                    self.idle.borrow_mut().push(connection);
                    return Ok(response.map(|body| Relay::http1(body, Some(permit))));
                }
                Err(mut error) => match error.take_message() {
                    // Closed while it was idle: nothing of the request was sent.
                    Some(unsent) if reused => request = unsent,
                    _ => {
                        return Err(SendError::Http1 { source: error.into_error(), reused });
                    }
                },
            }
        }
    }

    /// A connection whose last response was read to its end, if it is still open.
    async fn take_idle(&self) -> Option<PooledConnection> {
        loop {
            let mut connection = {
                let mut idle = self.idle.borrow_mut();
                idle.retain(|connection| !connection.send.is_closed());
                let at = idle.iter().position(|connection| connection.open_streams.get() == 0)?;
                idle.swap_remove(at)
            };
            if connection.send.ready().await.is_ok() {
                return Some(connection);
            }
        }
    }

    async fn open(&self) -> Result<PooledConnection, SendError> {
        let dialer = &self.api_server.dialer;
        let (until, reset) = (Instant::now() + dialer.deadline, CancellationToken::new());
        let stream = self.api_server.dial(false, until, &reset).await?;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD_BYTES).preserve_header_case(true);
        let (send, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|source| SendError::Http1 { source, reused: false })?;
        let open = dialer.metrics.upstream_connection();
        let was_reset = reset.clone();
        dialer.drain.spawn_part(async move {
            tokio::select! {
                // First, because the end of a request that is given up closes the connection in order.
                biased;
                () = was_reset.cancelled() => {}
                ended = connection.with_upgrades() => if let Err(error) = ended {
                    debug!(error = &error as &dyn std::error::Error, "upstream connection broke");
                },
            }
            drop(open);
        });
        Ok(PooledConnection { send, open_streams: Rc::default(), reset })
    }
}
