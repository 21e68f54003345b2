//! Prepares a request for the API server, as the policy lets it pass.

use std::mem;

use ctrlmesh_request::decide;
use ctrlmesh_request::decide::{LockPlan, Plan, Refusal};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite;
use http::uri::PathAndQuery;
use http::{Request, Uri};
use hyper::body::Body as _;

use crate::net::body::Relay;
use crate::policy::Reading;
use crate::serve::admission::AdmittedRequest;
use crate::serve::explain;
use crate::serve::failure::Failure;
use crate::serve::headers;
use crate::serve::lock;
use crate::serve::lock::LockedError;
use crate::serve::pending::{Pending, Reads};
use crate::serve::target::with_target;
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::session::policy_view::BegunRequest;
use crate::traffic::{CountedRequest, LEASES};
use crate::watch::WatchRequest;
use crate::watch::splice;
use crate::watch::splice::RequestTemplate;

impl Session {
    /// Applies the policy to a request.
    pub(super) async fn prepare(
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
        let long_running = info.is_long_running();
        let reads = if info.verb() == "list" { Reads::List } else { Reads::Other };
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
            reads,
            is_body_renamed: false,
            takes_lock: false,
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
            LockedError::Fenced(refused) => self.refuse(Refusal::Fenced(refused)),
            error => Failure::Lock(error),
        })?;
        if plan.is_for_lock().is_none() {
            self.admit_late(&renamed.request, info, target, renamed.holds_lock, pending).await?;
        }
        pending.is_body_renamed = renamed.holds_lock;
        let is_for_lock = plan.is_for_lock() == Some(true) || renamed.holds_lock;
        let is_lease = is_for_lock && info.resource() == LEASES;
        let held = renamed.held.filter(|_| is_lease);
        if let Some(held) = held.as_ref().filter(|held| !held.holder.is_empty()) {
            self.lock.writes(&held.holder);
            pending.takes_lock = true;
        }
        if is_lease && info.verb() == "get" {
            pending.reads = Reads::Lease;
        }
        if let Some(counted) = pending.counted.as_mut().filter(|_| is_for_lock) {
            counted.is_for_lock(held);
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
            let refused = |refused| self.refuse(Refusal::Guarded(Box::new(refused)));
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
        let template = RequestTemplate::new(request, target.clone(), info).reserved(self.resources.unread.budget());
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
        let template = || RequestTemplate::new(request, target.clone(), info);
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
    pub(super) async fn late(&self, template: &RequestTemplate) -> Failure {
        Box::pin(splice::clear(self, template)).await;
        Failure::Late
    }
}

fn rewritten(uri: &Uri, info: &RequestInfo<'_>, plan: &Plan) -> Result<Uri, Failure> {
    with_target(uri, rewrite::target(info, plan)).ok_or(Failure::Target)
}
