//! Why a request fails, and what its client is told.

use std::error::Error as _;
use std::time::Duration;

use ctrlmesh_request::decide::Refusal;
use ctrlmesh_request::request::TargetError;
use ctrlmesh_request::rewrite::status::{RETRY_AFTER_SECONDS, Status};
use ctrlmesh_request::shadow::UnreadableOptions;
use h2::Reason;
use thiserror::Error;

use crate::metrics::{ClientError, UpstreamError};
use crate::serve::lock::LockedError;
use crate::session::Session;
use crate::spans::Decision;
use crate::upstream::SendError;

/// The request gets no answer: the proxy resets its stream, or closes its connection.
#[derive(Debug, Error)]
#[error("give a request up: {0}")]
pub(super) struct Abort(pub(super) Reason);

#[derive(Debug, Error)]
pub(super) enum Failure {
    #[error("understand the request")]
    BadRequest(#[source] TargetError),
    #[error("let the request pass")]
    Refused(#[source] Refusal),
    #[error("let the request reach the API server: {}", .0.message)]
    Injected(Box<Status>),
    #[error("give the API server's answer to the client: a fault loses it")]
    AnswerLost,
    #[error("write the target of the request")]
    Target,
    #[error("rename the leader-election lock")]
    Lock(#[source] LockedError),
    #[error("make a dry run of a deletion")]
    Options(#[source] UnreadableOptions),
    #[error("read the answer to a dry run")]
    DryRun(#[source] LockedError),
    #[error("go on from what was read under an earlier policy: list again")]
    Late,
    #[error("tell the API server's own paths from those of member clusters, which have just changed: ask again")]
    OtherPaths,
    #[error("hold the request: too much waits for this pod's clients already")]
    Busy,
    #[error("ask the API server")]
    Upstream(#[source] SendError),
    #[error("ask the API server within {deadline:?}")]
    Timeout { deadline: Duration },
    #[error(
        "wait for the API server: the object was taken away from this pod's shard, and may have been written or not"
    )]
    Cut,
    #[error(
        "wait for the API server: the manager has not confirmed this pod's policy, and the object may have been written or not"
    )]
    Lapsed,
}

impl Session {
    /// The status that the client gets. The request is aborted where a client would see a broken connection and retry
    /// by itself. Only safe requests, and those that were surely not carried out, get a `Retry-After`.
    pub(super) fn failed(&self, failure: &Failure, is_safe: bool) -> Result<Status, Abort> {
        Ok(match failure {
            Failure::Refused(refusal) => Status::from(refusal),
            Failure::Injected(status) => Status::clone(status),
            Failure::AnswerLost => return Err(Abort(Reason::INTERNAL_ERROR)),
            Failure::BadRequest(error) => Status::from(*error),
            Failure::Target => status(400, "BadRequest", failure),
            // By which fabric8's client watches without a WebSocket (`BaseOperation.submitWatch`).
            Failure::Lock(LockedError::Upgraded) => status(503, "ServiceUnavailable", failure),
            Failure::Lock(LockedError::Request(error)) => Status::from(error),
            Failure::Lock(LockedError::Fenced(_)) => status(403, "Forbidden", failure),
            Failure::Late => status(410, "Expired", failure),
            Failure::Lock(LockedError::TooLarge) => status(413, "RequestEntityTooLarge", failure),
            Failure::Options(_) | Failure::Lock(LockedError::Encoding) => status(415, "UnsupportedMediaType", failure),
            Failure::Busy | Failure::Lock(LockedError::Busy) | Failure::DryRun(LockedError::Busy) => {
                Status { retry_after: Some(RETRY_AFTER_SECONDS), ..status(429, "TooManyRequests", failure) }
            }
            Failure::Lock(LockedError::Slow { .. }) => {
                self.server.metrics.client_error(ClientError::Slow);
                status(408, "Timeout", failure)
            }
            Failure::DryRun(_) | Failure::Lock(LockedError::Broken | LockedError::Response(_)) => {
                status(500, "InternalError", failure)
            }
            Failure::Cut | Failure::Lapsed => {
                self.server.metrics.writes_cut.inc();
                status(504, "Timeout", failure)
            }
            Failure::Timeout { .. } => {
                self.server.metrics.upstream_error(UpstreamError::Timeout);
                status(504, "Timeout", failure)
            }
            Failure::Upstream(SendError::Http2(error)) if error.is_reset() => {
                return Err(Abort(error.reason().unwrap_or(Reason::INTERNAL_ERROR)));
            }
            // GOAWAY names the streams that the API server did not process, and this is one of them.
            Failure::Upstream(SendError::Http2(error)) if error.is_go_away() && error.is_remote() => {
                return Err(Abort(Reason::REFUSED_STREAM));
            }
            // The client's own body broke.
            Failure::Upstream(SendError::Http1 { source, .. }) if source.is_user() => {
                status(400, "BadRequest", failure)
            }
            Failure::Upstream(SendError::Http1 { reused: true, .. }) => {
                return Err(Abort(Reason::REFUSED_STREAM));
            }
            Failure::Upstream(SendError::Http1 { .. } | SendError::Http2(_)) => {
                self.server.metrics.upstream_error(UpstreamError::Broken);
                if is_safe { unavailable(failure) } else { status(502, "InternalError", failure) }
            }
            Failure::OtherPaths | Failure::Upstream(_) => unavailable(failure),
        })
    }
}

impl Failure {
    /// What the proxy decided, where the failure tells.
    pub(super) fn decision(&self) -> Option<Decision> {
        match self {
            Self::Refused(Refusal::Guarded(_)) => Some(Decision::Breaker),
            Self::Refused(_) | Self::Late | Self::OtherPaths | Self::Cut | Self::Lapsed => Some(Decision::Refused),
            Self::Injected(_) | Self::AnswerLost => Some(Decision::Fault),
            Self::BadRequest(_)
            | Self::Target
            | Self::Lock(_)
            | Self::Options(_)
            | Self::DryRun(_)
            | Self::Busy
            | Self::Upstream(_)
            | Self::Timeout { .. } => None,
        }
    }
}

impl From<SendError> for Failure {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Timeout { deadline } => Self::Timeout { deadline },
            error => Self::Upstream(error),
        }
    }
}

fn unavailable(failure: &Failure) -> Status {
    Status { retry_after: Some(RETRY_AFTER_SECONDS), ..status(503, "ServiceUnavailable", failure) }
}

/// The message holds the failure and its causes.
fn status(code: u16, reason: &'static str, failure: &Failure) -> Status {
    let mut message = format!("ctrlmesh-proxy could not {failure}");
    let mut cause = failure.source();
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    Status { code, reason, message, retry_after: None }
}
