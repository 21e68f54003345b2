//! Forwards one request to the API server, as the policy lets it.

use std::error::Error;
use std::rc::Rc;

use ctrlmesh_common::policy::fault::ApiFaultKind;
use ctrlmesh_request::decide::Refusal;
use ctrlmesh_request::request::{RequestInfo, TargetError};
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode, Uri, header};
use tokio::time;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::fault::MetFaults;
use crate::metrics::Outcome;
use crate::net::body::Relay;
use crate::serve::explain;
use crate::serve::failure::{Abort, Failure};
use crate::serve::headers;
use crate::serve::lock;
use crate::serve::lock::ResponseRenaming;
use crate::serve::observer::Observer;
use crate::serve::pending::{Pending, Reads};
use crate::serve::refuse;
use crate::serve::reply::{Content, Reply, RequestMetrics};
use crate::serve::shaping::Shaped;
use crate::serve::wait_time::WaitTime;
use crate::serve::websocket::Handshake;
use crate::session::Session;
use crate::spans::LoggedTrace;
use crate::upstream::UsedConnection;
use crate::watch::upgraded::UpgradedWatch;
use crate::watch::{UnreadableFrames, Watch};

impl Session {
    pub(super) async fn exchange(
        self: Rc<Self>,
        request: Request<Relay>,
        on_informational: impl FnMut(Response<()>) + 'static,
    ) -> Result<Response<Reply>, Abort> {
        let start = Instant::now();
        let accept = request.headers().get(header::ACCEPT).cloned();
        let (handshake, is_upgrade) = (Handshake::of(request.headers()), headers::upgrade(request.headers()).is_some());
        let method = request.method().clone();
        let target = target(request.uri());
        let info = self.read_target(&method, &target);
        let verb = info.as_ref().map_or("other", RequestInfo::verb);
        let is_watch = info.as_ref().is_ok_and(RequestInfo::is_watch);
        let is_long_running = info.as_ref().is_ok_and(RequestInfo::is_long_running);
        let mut observer = self.observe(request.headers(), method.as_str(), &target, info.as_ref().ok());
        let mut metrics_guard = RequestMetrics::begin(self.clone(), info.as_ref().ok());
        metrics_guard.set_trace(observer.as_deref().and_then(Observer::recorded_trace));
        let answered = match &info {
            Ok(info) => self.relay(request, info, &target, start, observer.as_deref_mut(), on_informational).await,
            Err(error) => Err(Failure::BadRequest(*error)),
        };
        let trace = Observer::logged(observer.as_deref());
        let (response, outcome) = match answered {
            Ok(response) => {
                let outcome = outcome(response.status());
                metrics_guard.answer_began(outcome, start, is_long_running);
                (response, outcome)
            }
            Err(error) => {
                log_failure(&error, verb, &target, trace);
                if let Some(observer) = &mut observer {
                    observer.failed(&error);
                }
                let status = self.failed(&error, method.is_safe())?;
                metrics_guard.refused();
                let ends_watch = is_watch && status.code == StatusCode::GONE;
                let answer = match handshake.filter(|_| ends_watch) {
                    Some(handshake) => handshake.end_with(&status),
                    None if ends_watch && !is_upgrade => refuse::ended_watch(&status, accept.as_ref()),
                    None => refuse::response(&status, accept.as_ref()),
                };
                let answer = if method == Method::HEAD { refuse::without_body(answer) } else { answer };
                (answer.map(Content::Plain), Outcome::Refused)
            }
        };
        let status = response.status();
        if let Some(observer) = observer {
            observer.answered(status, outcome);
        }
        let (trace_id, span_id) = (trace.trace_id(), trace.span_id());
        info!(target: "access", %method, path = target.path(), verb, status = status.as_u16(), trace_id, span_id);
        Ok(response.map(|content| Reply { content, metrics_guard }))
    }

    /// What a target says, by the paths that lead to member clusters now.
    fn read_target<'t>(&self, method: &'t Method, target: &'t PathAndQuery) -> Result<RequestInfo<'t>, TargetError> {
        RequestInfo::parse(method.as_str(), target.as_str())?.behind(self.policy.current().member_paths())
    }

    async fn relay(
        self: &Rc<Self>,
        request: Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        start: Instant,
        mut observer: Option<&mut Observer>,
        on_informational: impl FnMut(Response<()>) + 'static,
    ) -> Result<Response<Content>, Failure> {
        let (request, mut pending) = self.prepare(request, info, target).await?;
        if pending.write.is_some() {
            // Much time may have passed since it was looked at first.
            self.check_confirmed(pending.validity.as_ref())?;
        }
        let request = Observer::sent(observer.as_deref_mut(), request, target, pending.is_body_renamed);
        let sent = pending.sent();
        let took = start.elapsed().saturating_sub(pending.waits.total());
        let answered = match pending.write.take() {
            None if pending.stale_list().is_none() => {
                self.send(&UsedConnection::default(), request, pending.long_running, on_informational).await
            }
            None => Box::pin(self.send_stale(request, info, target, &pending)).await,
            // Boxed, so that other requests hold no memory for it.
            Some(write) => Box::pin(self.send_write(request, write, &pending, on_informational)).await,
        };
        let response = Observer::received(observer.as_deref_mut(), answered)?;
        pending.answered(response.status(), start, sent, self);
        let faults = pending.faults.take();
        self.meet_on_answer(faults.as_deref())?;
        let answered = Instant::now();
        let reading = pending.reading.as_ref().or(pending.watch.as_ref().map(|watch| &watch.in_force));
        if let Some(reading) = reading.filter(|_| may_be_read(response.status())) {
            self.policy.answered(reading, info);
        }
        let waits = WaitTime::default();
        let response = self.finish(response, pending, &waits).await;
        let took = took + answered.elapsed();
        let trace = observer.as_deref().and_then(Observer::recorded_trace);
        self.server.metrics.added(took.saturating_sub(waits.total()), trace);
        let Some(faults) = faults else { return response };
        response.map(|response| {
            let is_ok = response.status() == StatusCode::OK;
            response.map(|content| Shaped::of(content, is_ok, *faults, self))
        })
    }

    /// Does what faults do once the API server has answered.
    fn meet_on_answer(&self, faults: Option<&MetFaults>) -> Result<(), Failure> {
        for fault in faults.iter().flat_map(|met| met.on_answer()) {
            match fault {
                ApiFaultKind::AnswerLost => return Err(Failure::AnswerLost),
                ApiFaultKind::GoAway => self.leaving.notify_one(),
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) async fn send(
        &self,
        used: &UsedConnection,
        request: Request<Relay>,
        long_running: bool,
        on_informational: impl FnMut(Response<()>),
    ) -> Result<Response<Relay>, Failure> {
        let answered = if long_running {
            self.upstream.send(used, request, on_informational).await
        } else {
            self.upstream.send_within(used, request, self.server.response_timeout, on_informational).await
        };
        Ok(answered?)
    }

    async fn finish(
        self: &Rc<Self>,
        mut response: Response<Relay>,
        mut pending: Pending,
        waits: &WaitTime,
    ) -> Result<Response<Content>, Failure> {
        if let Some(run) = pending.dry_run.take() {
            Box::pin(self.dry_run_answered(run, &mut response, waits)).await?;
        }
        match (pending.watch, pending.rename) {
            (Some(asked), rename) if response.status() == StatusCode::OK => {
                match Watch::new(self.clone(), asked, response, rename.map(|rename| *rename)) {
                    Ok(watch) => Ok(watch.map(Content::Watch)),
                    Err(UnreadableFrames(template)) => Err(self.late(&template).await),
                }
            }
            (Some(asked), _) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                response.extensions_mut().insert(UpgradedWatch::new(self, asked));
                Ok(response.map(Content::Plain))
            }
            (_, Some(rename)) => {
                let deadline = self.server.response_timeout;
                let room = &self.resources.collect;
                let reads_lock = pending.counted.as_ref().is_some_and(|counted| counted.reads_lock);
                let reader = reads_lock.then_some(&self.traffic.lock);
                let connection = (pending.reads == Reads::Lease).then_some(&self.lock);
                let renaming =
                    ResponseRenaming { rename: &rename, is_list: pending.reads == Reads::List, reader, connection };
                let renaming = Box::pin(lock::response(response, renaming, room, waits));
                let renamed = time::timeout(deadline, renaming).await;
                renamed.map_err(|_elapsed| Failure::Timeout { deadline })?.map_err(Failure::Lock)
            }
            (_, None) => Ok(response.map(Content::Plain)),
        }
    }
}

fn log_failure(failure: &Failure, verb: &str, target: &PathAndQuery, trace: LoggedTrace) {
    let (trace_id, span_id) = (trace.trace_id(), trace.span_id());
    if let Failure::Refused(refusal) = failure {
        explain::refused(verb, target.as_str(), refusal);
        if let Refusal::Fenced(write) = refusal {
            debug!(verb, path = target.path(), reason = %write, trace_id, span_id, "write refused");
        }
    }
    debug!(error = failure as &dyn Error, trace_id, span_id, "request failed");
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

/// Whether an answer may hold objects.
fn may_be_read(status: StatusCode) -> bool {
    status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS
}

fn target(uri: &Uri) -> PathAndQuery {
    uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"))
}
