//! Begins a request that policy, confirmation, faults and guards let pass.

use ctrlmesh_request::decide::{Decision, LockPlan, Plan, Refusal};
use ctrlmesh_request::guard::Refused;
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::boot_clock;
use http::uri::PathAndQuery;
use http::{Request, header};
use hyper::body::Body as _;

use crate::fault::MetFaults;
use crate::guard::{Hold, Probe};
use crate::net::body::Relay;
use crate::policy::Validity;
use crate::serve::failure::Failure;
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::session::policy_view::BegunRequest;

/// The largest body of a request that is held, in bytes. It is not read meanwhile, and takes its part of the window of
/// the client's connection, over which the leader-election lock is renewed, too.
const MAX_HELD_BODY_BYTES: u64 = 64 << 10;

/// A request that may be sent.
pub(super) struct AdmittedRequest {
    pub(super) begun: BegunRequest,
    pub(super) plan: Option<Plan>,
    pub(super) probe: Option<Probe>,
    /// `None` where there are none, or only the body tells whether they hit.
    pub(super) faults: Option<Box<MetFaults>>,
}

/// Why a request is not begun yet.
struct Waiting {
    /// `None` until the request was put to the faults.
    faults: Option<Box<MetFaults>>,
    hold: Option<Box<Hold>>,
    may_be_held: bool,
    /// Why it is held.
    refused: Option<Box<Refused>>,
}

impl Session {
    /// Begins a request that policy, faults and guards let pass. While it is delayed or held, nothing of it is under
    /// way.
    pub(super) async fn admitted(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        waits: &WaitTime,
    ) -> Result<AdmittedRequest, Failure> {
        let may_be_held = is_small(request);
        let mut waiting = Waiting { faults: None, hold: None, may_be_held, refused: None };
        let admitted = loop {
            let begun = self.begin(request, info, target, waits, &mut waiting);
            if let Some(admitted) = begun.await.transpose() {
                break admitted;
            }
            waits.measure(Box::pin(self.wait(&mut waiting))).await;
        };
        drop(waiting);
        admitted
    }

    /// Begins a request; `None` where it has to wait before.
    async fn begin(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        waits: &WaitTime,
        waiting: &mut Waiting,
    ) -> Result<Option<AdmittedRequest>, Failure> {
        let begun = self.policy.begin(info);
        // It was read by the policy that was in force then.
        if !info.leads_alike(begun.policy.member_paths()) {
            return Err(Failure::OtherPaths);
        }
        self.check_confirmed(begun.validity.as_ref())?;
        let plan = match self.decide(&begun.policy, request, info, target, waits).await {
            Decision::Pass => None,
            Decision::Rewrite(plan) => Some(plan),
            Decision::Refuse(refusal) => return Err(self.refuse(refusal)),
        };
        let lock = plan.as_ref().and_then(|plan| plan.lock.as_ref());
        // Where only the body tells whether the request is for the lock, faults and guards wait for it.
        let is_for_lock = lock.map_or(Some(false), LockPlan::is_for_lock);
        if let Some(is_for_lock) = is_for_lock.filter(|_| !begun.policy.faults().is_empty()) {
            let met = || Box::new(self.faults.met(request, info, target.path(), is_for_lock));
            let met = waiting.faults.get_or_insert_with(met);
            if met.is_delayed() {
                return Ok(None);
            }
            met.answer().map_or(Ok(()), |answer| Err(Failure::Injected(answer)))?;
        }
        let mut probe = None;
        if is_for_lock == Some(false) && !begun.policy.guards().is_empty() {
            match self.ask_guards(info, waiting) {
                Ok(asked) => probe = asked,
                Err(refused) if waiting.may_be_held && refused.holds => {
                    waiting.refused = Some(Box::new(refused));
                    return Ok(None);
                }
                Err(refused) => return Err(self.refuse(Refusal::Guarded(Box::new(refused)))),
            }
        }
        Ok(Some(AdmittedRequest { begun, plan, probe, faults: waiting.faults.take() }))
    }

    /// Asks the guards; where the request may be held, a second time, so that no change is missed.
    fn ask_guards(&self, info: &RequestInfo<'_>, waiting: &mut Waiting) -> Result<Option<Probe>, Refused> {
        let Waiting { hold, may_be_held, .. } = waiting;
        // Once shutdown has begun, the policy is followed no more.
        *may_be_held &= !self.server.drain.has_started() && hold.as_deref_mut().is_none_or(Hold::goes_on);
        let asked = self.guards.admit(info, *may_be_held);
        match &asked {
            Err(refused) if *may_be_held && refused.holds && hold.is_none() => {
                *hold = self.guards.hold().map(Box::new);
                *may_be_held = hold.as_deref_mut().is_some_and(Hold::goes_on);
                self.guards.admit(info, *may_be_held)
            }
            _ => asked,
        }
    }

    /// Waits until the request may be begun anew.
    async fn wait(&self, waiting: &mut Waiting) {
        match (&mut waiting.faults, waiting.refused.take(), &mut waiting.hold) {
            (Some(met), _, _) if met.is_delayed() => met.wait(&self.server.drain).await,
            (_, Some(refused), Some(hold)) => {
                tokio::select! {
                    () = hold.wait(&refused) => {}
                    () = self.server.drain.started() => {}
                }
            }
            _ => {}
        }
    }

    pub(super) fn check_confirmed(&self, validity: Option<&Validity>) -> Result<(), Failure> {
        match validity {
            Some(validity) if !validity.holds(boot_clock::now()) => Err(self.refuse(Refusal::Unconfirmed)),
            _ => Ok(()),
        }
    }

    /// Counts a refusal. It is logged with the failure.
    pub(super) fn refuse(&self, refusal: Refusal) -> Failure {
        self.server.metrics.refused.inc();
        match &refusal {
            Refusal::Fenced(_) => drop(self.server.metrics.writes_refused.inc()),
            Refusal::Unconfirmed => drop(self.server.metrics.writes_unconfirmed.inc()),
            _ => {}
        }
        Failure::Refused(refusal)
    }
}

/// Whether its body is known to be small.
fn is_small(request: &Request<Relay>) -> bool {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    request.body().is_end_stream() || length.is_some_and(|length: u64| length <= MAX_HELD_BODY_BYTES)
}
