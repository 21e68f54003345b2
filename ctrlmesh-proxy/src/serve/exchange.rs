//! What happens to one request?

use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

use ctrlmesh_request::decide;
use ctrlmesh_request::decide::{Decision, Plan, Refusal, Rename};
use ctrlmesh_request::request::{RequestInfo, TargetError};
use ctrlmesh_request::rewrite;
use ctrlmesh_request::rewrite::status::Status;
use h2::Reason;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri, header};
use thiserror::Error;
use tokio::time;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::metrics::{ClientError, Outcome, UpstreamError};
use crate::net::body::Relay;
use crate::policy::{ReadOf, Reading};
use crate::serve::explain;
use crate::serve::headers;
use crate::serve::lock;
use crate::serve::lock::LockedError;
use crate::serve::refuse;
use crate::serve::reply::{Content, Counted, Reply};
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::upstream::SendError;
use crate::watch::splice;
use crate::watch::splice::RequestTemplate;
use crate::watch::upgraded::UpgradedWatch;
use crate::watch::{UnreadableFrames, Watch, WatchRequest};

/// When to come back after the API server could not be reached.
const RETRY_AFTER_SECONDS: u32 = 1;

/// The request gets no answer: its stream is reset for this reason, or its connection closed.
#[derive(Debug, Error)]
#[error("give a request up: {0}")]
pub(super) struct Abort(pub(super) Reason);

/// Why the API server's answer does not reach the client.
#[derive(Debug, Error)]
enum Failure {
    #[error("understand the request")]
    BadRequest(#[source] TargetError),
    #[error("let the request pass")]
    Refused(#[source] Refusal),
    #[error("write the target of the request")]
    Target,
    #[error("rename the leader-election lock")]
    Lock(#[source] LockedError),
    #[error("go on from what was read under an earlier policy: list again")]
    Late,
    #[error("hold the request: too much waits for this pod's clients already")]
    Busy,
    #[error("ask the API server")]
    Upstream(#[source] SendError),
    #[error("ask the API server within {deadline:?}")]
    Timeout { deadline: Duration },
}

/// What is to be done beside passing a request on.
struct Extra {
    /// The lock's names, if it is renamed.
    rename: Option<Rename>,
    /// Held while a list is read under the policy.
    reading: Option<Reading>,
    /// What an open watch will need when the policy changes.
    watch: Option<WatchRequest>,
    /// Whether it is for a list.
    is_list: bool,
    /// Whether the response may take as long as it likes.
    long_running: bool,
    /// What of its time the proxy did not spend itself.
    waits: WaitTime,
}

impl Session {
    /// Asks the API server, as far as the policy lets, and returns what the client is to get.
    pub(super) async fn exchange(
        self: Rc<Self>,
        request: Request<Relay>,
        informed: impl FnMut(Response<()>),
    ) -> Result<Response<Reply>, Abort> {
        let begun = Instant::now();
        let accept = request.headers().get(header::ACCEPT).cloned();
        let method = request.method().clone();
        let target = target(request.uri());
        let info = RequestInfo::parse(method.as_str(), target.as_str());
        let verb = info.as_ref().map_or("other", RequestInfo::verb);
        let mut counted = Counted::begin(self.clone(), verb);
        let answered = match &info {
            Ok(info) => self.relay(request, info, &target, begun, informed).await,
            Err(error) => Err(Failure::BadRequest(*error)),
        };
        let response = match answered {
            Ok(response) => {
                counted.answered(outcome(response.status()));
                response
            }
            Err(error) => {
                debug!(error = &error as &dyn Error, "request failed");
                let status = self.failed(&error, method.is_safe())?;
                counted.answered(Outcome::Refused);
                refuse::response(&status, accept.as_ref()).map(Content::Plain)
            }
        };
        info!(target: "access", %method, path = target.path(), verb, status = response.status().as_u16());
        Ok(response.map(|content| Reply { content, counted }))
    }

    async fn relay(
        self: &Rc<Self>,
        request: Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        begun: Instant,
        informed: impl FnMut(Response<()>),
    ) -> Result<Response<Content>, Failure> {
        let (request, extra) = self.prepare(request, info, target).await?;
        let took = begun.elapsed();
        let response = if extra.long_running {
            self.upstream.send(request, informed).await
        } else {
            self.upstream.send_within(request, self.server.response_timeout, informed).await
        };
        let response = response?;
        let answered = Instant::now();
        let reading = extra.reading.as_ref().or(extra.watch.as_ref().map(|watch| &watch.in_force));
        if let Some(reading) = reading.filter(|_| may_be_read(response.status())) {
            self.policy.answered(reading, info);
        }
        let waits = WaitTime::default();
        let waited = extra.waits.total();
        let response = self.finish(response, extra, &waits).await;
        let took = took + answered.elapsed();
        self.server.metrics.added(took.saturating_sub(waited + waits.total()));
        response
    }

    /// Makes of a request what the API server is to get.
    async fn prepare(
        &self,
        mut request: Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
    ) -> Result<(Request<Relay>, Extra), Failure> {
        let metrics = &self.server.metrics;
        let waits = WaitTime::default();
        let mut reading = info.is_collection().then(|| {
            let of = ReadOf::resource(info.api_group(), info.resource());
            self.policy.read(of)
        });
        let policy = match &reading {
            Some(reading) => reading.policy().clone(),
            None => self.policy.current(),
        };
        let plan = match self.decide(&policy, &request, info, target, &waits).await {
            Decision::Pass => None,
            Decision::Rewrite(plan) => Some(plan),
            Decision::Refuse(refusal) => {
                metrics.refused.inc();
                explain::refused(info.verb(), target.as_str(), &refusal);
                return Err(Failure::Refused(refusal));
            }
        };
        // What is kept of a watch is asked for again, so this comes first.
        if plan.as_ref().is_some_and(|plan| plan.lock.is_some()) {
            lock::accept_editable(request.headers_mut());
        }
        let watch = match reading.take_if(|_| info.is_watch()) {
            Some(reading) => Some(self.watch(&request, info, target, reading).await?),
            None => self.page(&request, info, target, reading.as_ref(), &waits).await?,
        };
        let long_running = info.is_long_running();
        let is_list = info.verb() == "list";
        let mut extra = Extra { rename: None, reading, watch, is_list, long_running, waits };
        let Some(plan) = plan else { return Ok((request, extra)) };
        *request.uri_mut() = rewritten(request.uri(), info, &plan)?;
        let sent = request.uri().path_and_query().map_or("", PathAndQuery::as_str);
        explain::rewritten(info.verb(), target.as_str(), sent);
        if plan.selector.is_some() {
            metrics.injected.inc();
        }
        if let Some(plan) = plan.lock {
            let renaming = Box::pin(lock::request(self, request, info, &plan, &extra.waits));
            request = renaming.await.map_err(Failure::Lock)?;
            extra.rename = Some(plan.rename);
        }
        Ok((request, extra))
    }

    /// What is needed for a watch to follow the policy.
    async fn watch(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        in_force: Reading,
    ) -> Result<WatchRequest, Failure> {
        let kept =
            RequestTemplate::new(request, target.clone()).reserved(self.resources.unread.budget());
        let kept = kept.ok_or(Failure::Busy)?;
        match self.policy.suspects(in_force.policy(), info) {
            // Nothing could be sent before the first message of an upgraded one.
            Ok(suspects)
                if suspects.is_empty() || headers::upgrade(request.headers()).is_none() =>
            {
                Ok(WatchRequest { template: kept, in_force, suspects })
            }
            _ => Err(self.late(&kept).await),
        }
    }

    /// Looks whether a further page is of the share that the pages before it were of; before a first page it is asked how
    /// far was read before, so that its own token is newer. There is no watch to be led over.
    async fn page(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        in_force: Option<&Reading>,
        waits: &WaitTime,
    ) -> Result<Option<WatchRequest>, Failure> {
        let Some(in_force) = in_force else { return Ok(None) };
        let kept = || RequestTemplate::new(request, target.clone());
        if decide::goes_on_from(info).is_some() {
            return match self.policy.suspects(in_force.policy(), info) {
                Ok(suspects) if suspects.is_empty() => Ok(None),
                _ => Err(self.late(&kept()).await),
            };
        }
        if info.is_paged() && !self.policy.unread(in_force.policy(), info).is_empty() {
            waits.measure(Box::pin(splice::clear(self, &kept()))).await;
        }
        Ok(None)
    }

    /// What a client hears whose watch cannot be led over, or whose list cannot go on. It lists next, and what it goes on from then is not suspected
    /// once it is newer than what is asked for here.
    async fn late(&self, kept: &RequestTemplate) -> Failure {
        Box::pin(splice::clear(self, kept)).await;
        Failure::Late
    }

    /// Makes of a response what the client is to get.
    async fn finish(
        self: &Rc<Self>,
        mut response: Response<Relay>,
        extra: Extra,
        waits: &WaitTime,
    ) -> Result<Response<Content>, Failure> {
        match (extra.watch, extra.rename) {
            (Some(asked), rename) if response.status() == StatusCode::OK => {
                match Watch::new(self.clone(), asked, response, rename) {
                    Ok(watch) => Ok(watch.map(Content::Watch)),
                    Err(UnreadableFrames(kept)) => Err(self.late(&kept).await),
                }
            }
            (Some(asked), _) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                response.extensions_mut().insert(UpgradedWatch::new(asked));
                Ok(response.map(Content::Plain))
            }
            (_, Some(rename)) => {
                let deadline = self.server.response_timeout;
                let room = &self.resources.collect;
                let renaming =
                    Box::pin(lock::response(response, &rename, extra.is_list, room, waits));
                let renamed = time::timeout(deadline, renaming).await;
                renamed.map_err(|_elapsed| Failure::Timeout { deadline })?.map_err(Failure::Lock)
            }
            (_, None) => Ok(response.map(Content::Plain)),
        }
    }

    /// What to tell the client; nothing where it would, by itself, find its connection broken and try again. Only what
    /// changes nothing, and what was surely not carried out, is said to be worth repeating.
    fn failed(&self, failure: &Failure, is_safe: bool) -> Result<Status, Abort> {
        Ok(match failure {
            Failure::Refused(refusal) => Status::from(refusal),
            Failure::BadRequest(_) | Failure::Target | Failure::Lock(LockedError::Upgraded) => {
                status(400, "BadRequest", failure)
            }
            Failure::Lock(LockedError::Request(error)) => Status::from(error),
            Failure::Late => status(410, "Expired", failure),
            Failure::Lock(LockedError::TooLarge) => status(413, "RequestEntityTooLarge", failure),
            Failure::Lock(LockedError::Encoding) => status(415, "UnsupportedMediaType", failure),
            Failure::Busy | Failure::Lock(LockedError::Busy) => Status {
                retry_after: Some(RETRY_AFTER_SECONDS),
                ..status(429, "TooManyRequests", failure)
            },
            Failure::Lock(LockedError::Slow { .. }) => {
                self.server.metrics.client_error(ClientError::Slow);
                status(408, "Timeout", failure)
            }
            Failure::Lock(LockedError::Broken | LockedError::Response(_)) => {
                status(500, "InternalError", failure)
            }
            Failure::Timeout { .. } => {
                self.server.metrics.upstream_error(UpstreamError::Timeout);
                status(504, "Timeout", failure)
            }
            Failure::Upstream(SendError::Http2(error)) if error.is_reset() => {
                return Err(Abort(error.reason().unwrap_or(Reason::INTERNAL_ERROR)));
            }
            // It says which streams it did not look at, and this is one of them.
            Failure::Upstream(SendError::Http2(error))
                if error.is_go_away() && error.is_remote() =>
            {
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
            Failure::Upstream(_) => unavailable(failure),
        })
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

fn outcome(status: StatusCode) -> Outcome {
    if status.is_server_error() {
        Outcome::ServerError
    } else if status.is_client_error() {
        Outcome::ClientError
    } else {
        Outcome::Ok
    }
}

/// Whether an answer may hold what was asked for.
fn may_be_read(status: StatusCode) -> bool {
    status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS
}

/// Path and query of a request, as they came.
fn target(uri: &Uri) -> PathAndQuery {
    uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"))
}

fn rewritten(uri: &Uri, info: &RequestInfo<'_>, plan: &Plan) -> Result<Uri, Failure> {
    let target = rewrite::target(info, plan);
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target.try_into().map_err(|_unfit| Failure::Target)?);
    Uri::from_parts(parts).map_err(|_unfit| Failure::Target)
}

/// The API server is not there; it may be, soon.
fn unavailable(failure: &Failure) -> Status {
    Status { retry_after: Some(RETRY_AFTER_SECONDS), ..status(503, "ServiceUnavailable", failure) }
}

/// A failure and its causes, as a status.
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
