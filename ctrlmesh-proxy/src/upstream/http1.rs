//! Connections that carry one request at a time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use http::{Request, Response};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tracing::debug;

use crate::net::body::{Relay, Share};
use crate::upstream;
use crate::upstream::{Dialer, SendError, Target};

/// The size of a response's head that the proxy still takes: what clients in Go take.
const MAX_HEAD_BYTES: usize = 1 << 20;

/// Connections of one client connection.
#[derive(Debug)]
pub struct Pool {
    dialer: Rc<Dialer>,
    target: Target,
    idle: RefCell<Vec<Lane>>,
}

/// One connection.
#[derive(Debug)]
struct Lane {
    send: http1::SendRequest<Relay>,
    /// How many responses are still being read from it: none or one.
    used: Rc<Cell<usize>>,
}

impl Pool {
    /// No connection yet.
    pub fn new(dialer: Rc<Dialer>, target: Target) -> Self {
        Self { dialer, target, idle: RefCell::default() }
    }

    /// Sends a request on an idle connection, or on a new one.
    pub async fn send(&self, mut request: Request<Relay>) -> Result<Response<Relay>, SendError> {
        loop {
            let (mut lane, reused) = match self.take_idle().await {
                Some(lane) => (lane, true),
                None => (Box::pin(self.open()).await?, false),
            };
            match lane.send.try_send_request(request).await {
                Ok(response) => {
                    let share = Share::of(&lane.used);
                    self.idle.borrow_mut().push(lane);
                    return Ok(response.map(|body| Relay::http1(body, Some(share))));
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
    async fn take_idle(&self) -> Option<Lane> {
        loop {
            let mut lane = {
                let mut idle = self.idle.borrow_mut();
                idle.retain(|lane| !lane.send.is_closed());
                let at = idle.iter().position(|lane| lane.used.get() == 0)?;
                idle.swap_remove(at)
            };
            if lane.send.ready().await.is_ok() {
                return Some(lane);
            }
        }
    }

    async fn open(&self) -> Result<Lane, SendError> {
        let until = Instant::now() + self.dialer.deadline;
        let stream = self.dialer.dial(&self.target, false, until).await?;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD_BYTES).preserve_header_case(true);
        let (send, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|source| SendError::Http1 { source, reused: false })?;
        let open = upstream::count(&self.dialer);
        self.dialer.drain.spawn_part(async move {
            if let Err(error) = connection.with_upgrades().await {
                debug!(error = &error as &dyn std::error::Error, "upstream connection broke");
            }
            drop(open);
        });
        Ok(Lane { send, used: Rc::default() })
    }
}
