//! What happens to one request?

use std::rc::Rc;

use h2::Reason;
use http::{Request, Response, StatusCode};
use thiserror::Error;
use tokio::time::Instant;
use tracing::debug;

use crate::body::Relay;
use crate::serve::Session;
use crate::upstream::SendError;

/// The body of a response.
pub(super) type Reply = Relay;

/// The request gets no answer: its stream is reset for this reason, or its connection closed.
#[derive(Debug, Error)]
#[error("give a request up: {0}")]
pub(super) struct Abort(pub(super) Reason);

impl Session {
    /// Asks the API server and returns what it answers.
    pub(super) async fn exchange(
        self: Rc<Self>,
        request: Request<Relay>,
        informed: impl FnMut(Response<()>),
    ) -> Result<Response<Reply>, Abort> {
        let _begun = Instant::now();
        let _open = self.server.metrics.stream();
        match self.upstream.send(request, informed).await {
            Ok(response) => Ok(response),
            Err(error) => Self::failed(&error),
        }
    }

    fn failed(error: &SendError) -> Result<Response<Reply>, Abort> {
        debug!(error = error as &dyn std::error::Error, "API server did not answer");
        match error {
            SendError::Http2(error) if error.is_reset() => {
                Err(Abort(error.reason().unwrap_or(Reason::INTERNAL_ERROR)))
            }
            SendError::Http2(error) if error.is_go_away() => Err(Abort(Reason::REFUSED_STREAM)),
            SendError::Http1 { reused: true, .. } => Err(Abort(Reason::REFUSED_STREAM)),
            _ => {
                let mut response = Response::new(Relay::full(&b"{}"[..]));
                *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                Ok(response)
            }
        }
    }
}
