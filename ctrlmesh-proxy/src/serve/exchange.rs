//! Forwards one request to the API server, as the policy lets it.

use std::error::Error;
use std::mem;
use std::rc::Rc;

use ctrlmesh_common::policy::fault::ApiFaultKind;
use ctrlmesh_request::decide;
use ctrlmesh_request::decide::{LockPlan, Plan, Refusal};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri, header};
use hyper::body::Body as _;
use tokio::time;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::metrics::Outcome;
use crate::net::body::Relay;
use crate::policy::{Reading, Validity, Write};
use crate::serve::admission::AdmittedRequest;
use crate::serve::explain;
use crate::serve::failure::{Abort, Failure};
use crate::serve::headers;
use crate::serve::lock;
use crate::serve::lock::{LockedError, ResponseRenaming};
use crate::serve::pending::Pending;
use crate::serve::refuse;
use crate::serve::reply::{Content, Reply, RequestMetrics};
use crate::serve::shaping::Shaped;
use crate::serve::target::with_target;
use crate::serve::wait_time::WaitTime;
use crate::serve::websocket::Handshake;
use crate::session::Session;
use crate::session::policy_view::BegunRequest;
use crate::traffic::{CountedRequest, LEASES};
use crate::upstream::UsedConnection;
use crate::watch::splice;
use crate::watch::splice::RequestTemplate;
use crate::watch::upgraded::UpgradedWatch;
use crate::watch::{UnreadableFrames, Watch, WatchRequest};

impl Session {
    pub(super) async fn exchange(
        self: Rc<Self>,
        request: Request<Relay>,
        on_informational: impl FnMut(Response<()>),
    ) -> Result<Response<Reply>, Abort> {
        let start = Instant::now();
        let accept = request.headers().get(header::ACCEPT).cloned();
        let (handshake, is_upgrade) = (Handshake::of(request.headers()), headers::upgrade(request.headers()).is_some());
        let method = request.method().clone();
        let target = target(request.uri());
        let info = RequestInfo::parse(method.as_str(), target.as_str());
        let verb = info.as_ref().map_or("other", RequestInfo::verb);
        let is_watch = info.as_ref().is_ok_and(RequestInfo::is_watch);
        let is_long_running = info.as_ref().is_ok_and(RequestInfo::is_long_running);
        let mut metrics_guard = RequestMetrics::begin(self.clone(), info.as_ref().ok());
        let answered = match &info {
            Ok(info) => self.relay(request, info, &target, start, on_informational).await,
            Err(error) => Err(Failure::BadRequest(*error)),
        };
        let response = match answered {
            Ok(response) => {
                metrics_guard.answer_began(outcome(response.status()), start, is_long_running);
                response
            }
            Err(error) => {
                debug!(error = &error as &dyn Error, "request failed");
                let status = self.failed(&error, method.is_safe())?;
                metrics_guard.refused();
                let ends_watch = is_watch && status.code == StatusCode::GONE;
                let answer = match handshake.filter(|_| ends_watch) {
                    Some(handshake) => handshake.end_with(&status),
                    None if ends_watch && !is_upgrade => refuse::ended_watch(&status, accept.as_ref()),
                    None => refuse::response(&status, accept.as_ref()),
                };
                answer.map(Content::Plain)
            }
        };
        info!(target: "access", %method, path = target.path(), verb, status = response.status().as_u16());
        Ok(response.map(|content| Reply { content, metrics_guard }))
    }

    async fn relay(
        self: &Rc<Self>,
        request: Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        start: Instant,
        on_informational: impl FnMut(Response<()>),
    ) -> Result<Response<Content>, Failure> {
        let (request, mut pending) = self.prepare(request, info, target).await?;
        let sent = pending.sent();
        let took = start.elapsed().saturating_sub(pending.waits.total());
        let long_running = pending.long_running;
        let response = match &pending.write {
            None => {
                match pending.faults.as_deref().zip(pending.reading.as_ref()).filter(|(met, _)| met.is_stale_list()) {
                    None => self.send(&UsedConnection::default(), request, long_running, on_informational).await,
                    Some((met, reading)) => {
                        Box::pin(self.send_stale(request, info, target, reading.policy(), met)).await
                    }
                }
            }
            Some(write) => {
                // Much time may have passed since it was looked at first.
                self.check_confirmed(pending.validity.as_ref(), info, target)?;
                let used = UsedConnection::default();
                let sending = self.send(&used, request, long_running, on_informational);
                // Boxed, so that other requests hold no memory for it.
                let answered = Box::pin(unless_forbidden(sending, write, pending.validity.as_ref())).await;
                if let Err(Failure::Cut | Failure::Lapsed) = answered {
                    // The network may be down, and would deliver it later.
                    self.upstream.reset(&used);
                }
                answered
            }
        }?;
        pending.answered(response.status(), start, sent, &self.traffic);
        let faults = pending.faults.take();
        for fault in faults.iter().flat_map(|met| met.on_answer()) {
            match fault {
                ApiFaultKind::AnswerLost => return Err(Failure::AnswerLost),
                ApiFaultKind::GoAway => self.leaving.notify_one(),
                _ => {}
            }
        }
        let answered = Instant::now();
        let reading = pending.reading.as_ref().or(pending.watch.as_ref().map(|watch| &watch.in_force));
        if let Some(reading) = reading.filter(|_| may_be_read(response.status())) {
            self.policy.answered(reading, info);
        }
        let waits = WaitTime::default();
        let response = self.finish(response, pending, &waits).await;
        let took = took + answered.elapsed();
        self.server.metrics.added(took.saturating_sub(waits.total()));
        let Some(faults) = faults else { return response };
        response.map(|response| {
            let is_ok = response.status() == StatusCode::OK;
            response.map(|content| Shaped::of(content, is_ok, *faults, self))
        })
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

    /// Applies the policy to a request.
    async fn prepare(
        &self,
        mut request: Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
    ) -> Result<(Request<Relay>, Pending), Failure> {
        let waits = WaitTime::default();
        let AdmittedRequest { begun, plan, probe, faults } = self.admitted(&request, info, target, &waits).await?;
        let counted = CountedRequest::of(&begun.policy, plan.as_ref(), info).map(Box::new);
        let is_shadow = begun.policy.is_shadow();
        let BegunRequest { mut reading, write, validity, .. } = begun;
        // Before the template of a watch is taken, so that later requests have it too.
        if plan.as_ref().is_some_and(|plan| plan.lock.is_some()) {
            lock::accept_editable(request.headers_mut());
        }
        let watch = match reading.take_if(|_| info.is_watch()) {
            Some(reading) => Some(self.watch(&request, info, target, reading).await?),
            None => self.page(&request, info, target, reading.as_ref(), &waits).await?,
        };
        let (long_running, is_list) = (info.is_long_running(), info.verb() == "list");
        let mut pending = Pending {
            rename: None,
            reading,
            watch,
            write,
            validity,
            probe,
            counted,
            dry_run: None,
            faults,
            is_list,
            long_running,
            waits,
        };
        let mut is_for_lock = false;
        if let Some(plan) = plan {
            *request.uri_mut() = rewritten(request.uri(), info, &plan)?;
            let sent = request.uri().path_and_query().map_or("", PathAndQuery::as_str);
            explain::rewritten(info.verb(), target.as_str(), sent);
            if plan.selector.is_some() {
                self.server.metrics.injected.inc();
            }
            if let Some(plan) = plan.lock {
                is_for_lock = Box::pin(self.renamed(&mut request, info, target, plan, &mut pending)).await?;
            }
        }
        if is_shadow && !is_for_lock {
            pending.dry_run = Box::pin(self.dry_run(&mut request, info, &pending.waits)).await?;
        }
        Ok((request, pending))
    }

    /// Renames the leader-election lock, and tells whether the request is for it. Where only the body tells, the
    /// request is put to faults and guards then.
    async fn renamed(
        &self,
        request: &mut Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        plan: LockPlan,
        pending: &mut Pending,
    ) -> Result<bool, Failure> {
        let taken = mem::replace(request, Request::new(Relay::Empty));
        let renamed = lock::request(self, taken, info, &plan, &pending.waits).await;
        let renamed = renamed.map_err(|error| match error {
            LockedError::Fenced(refused) => self.refuse(info, target, Refusal::Fenced(refused)),
            error => Failure::Lock(error),
        })?;
        if plan.is_for_lock().is_none() {
            self.admit_late(&renamed.request, info, target, renamed.holds_lock, pending).await?;
        }
        let is_for_lock = plan.is_for_lock() == Some(true) || renamed.holds_lock;
        if let Some(counted) = pending.counted.as_mut().filter(|_| is_for_lock) {
            counted.is_for_lock(renamed.held.filter(|_| info.resource() == LEASES));
        }
        pending.rename = Some(Box::new(plan.rename));
        *request = renamed.request;
        Ok(is_for_lock)
    }

    /// Asks faults and guards about a request of which only the body told whether it is for the lock.
    async fn admit_late(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        is_for_lock: bool,
        pending: &mut Pending,
    ) -> Result<(), Failure> {
        let mut met = self.faults.met(request, info, target.path(), is_for_lock);
        if met.is_delayed() {
            let bytes = request.body().size_hint().lower().try_into().unwrap_or(usize::MAX);
            let _held = self.resources.unread.budget().reserve(bytes).ok_or(Failure::Busy)?;
            // Its body is read, so it is under way.
            let waiting = pending.waits.measure(met.wait(&self.server.drain));
            match &pending.write {
                Some(write) => write.unless_cut(waiting).await.ok_or(Failure::Cut)?,
                None => waiting.await,
            }
        }
        met.answer().map_or(Ok(()), |answer| Err(Failure::Injected(answer)))?;
        pending.faults = Some(Box::new(met));
        if !is_for_lock {
            let refused = |refused| self.refuse(info, target, Refusal::Guarded(Box::new(refused)));
            pending.probe = self.guards.admit(info, false).map_err(refused)?;
        }
        Ok(())
    }

    /// Prepares a watch to follow the policy.
    async fn watch(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        in_force: Reading,
    ) -> Result<WatchRequest, Failure> {
        let template = RequestTemplate::new(request, target.clone()).reserved(self.resources.unread.budget());
        let template = template.ok_or(Failure::Busy)?;
        match self.policy.suspects(in_force.policy(), info) {
            // The proxy cannot splice an upgraded watch.
            Ok(suspects) if suspects.is_empty() || headers::upgrade(request.headers()).is_none() => {
                Ok(WatchRequest { template, in_force, suspects })
            }
            _ => Err(self.late(&template).await),
        }
    }

    /// Refuses a further page that may continue under another policy. Before a first page, the proxy asks for a version
    /// that is newer than all earlier reads, so that the page's token is newer, too.
    async fn page(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        in_force: Option<&Reading>,
        waits: &WaitTime,
    ) -> Result<Option<WatchRequest>, Failure> {
        let Some(in_force) = in_force else { return Ok(None) };
        let template = || RequestTemplate::new(request, target.clone());
        if decide::goes_on_from(info).is_some() {
            return match self.policy.suspects(in_force.policy(), info) {
                Ok(suspects) if suspects.is_empty() => Ok(None),
                _ => Err(self.late(&template()).await),
            };
        }
        if info.is_paged() && !self.policy.unread(in_force.policy(), info).is_empty() {
            waits.measure(Box::pin(splice::clear(self, &template()))).await;
        }
        Ok(None)
    }

    /// For a client whose watch or list cannot continue. It lists next; that list is newer than the version asked for
    /// here.
    async fn late(&self, template: &RequestTemplate) -> Failure {
        Box::pin(splice::clear(self, template)).await;
        Failure::Late
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
                let renaming = ResponseRenaming { rename: &rename, is_list: pending.is_list, reader };
                let renaming = Box::pin(lock::response(response, renaming, room, waits));
                let renamed = time::timeout(deadline, renaming).await;
                renamed.map_err(|_elapsed| Failure::Timeout { deadline })?.map_err(Failure::Lock)
            }
            (_, None) => Ok(response.map(Content::Plain)),
        }
    }
}

/// Sends a write, as long as nothing forbids it.
async fn unless_forbidden(
    sending: impl Future<Output = Result<Response<Relay>, Failure>>,
    write: &Write,
    validity: Option<&Validity>,
) -> Result<Response<Relay>, Failure> {
    let answered = write.unless_cut(sending);
    let answered = match validity {
        None => answered.await,
        Some(validity) => tokio::select! {
            biased;
            answered = answered => answered,
            () = validity.over() => return Err(Failure::Lapsed),
        },
    };
    answered.ok_or(Failure::Cut)?
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

fn rewritten(uri: &Uri, info: &RequestInfo<'_>, plan: &Plan) -> Result<Uri, Failure> {
    with_target(uri, rewrite::target(info, plan)).ok_or(Failure::Target)
}
