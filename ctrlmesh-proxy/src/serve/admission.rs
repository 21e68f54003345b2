//! Begins a request that policy, confirmation, faults and guards let pass.

use ctrlmesh_request::decide::{Decision, LockPlan, Plan, Refusal};
use ctrlmesh_request::guard::Refused;
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::boot_clock;
use http::uri::PathAndQuery;
use http::{Request, header};
use hyper::body::Body as _;
use tracing::debug;

use crate::fault::MetFaults;
use crate::guard::{Hold, Probe};
use crate::net::body::Relay;
use crate::policy::Validity;
use crate::serve::explain;
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
    /// `None` where only the body tells.
    pub(super) is_for_lock: Option<bool>,
    pub(super) probe: Option<Probe>,
    /// `None` where there are none, or only the body tells whether they hit.
    pub(super) faults: Option<MetFaults>,
}

impl Session {
    /// Begins a request that policy, faults and guards let pass. While it is delayed or held, nothing of it is under way.
    pub(super) async fn admitted(
        &self,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        waits: &WaitTime,
    ) -> Result<AdmittedRequest, Failure> {
        let (mut hold, mut may_be_held) = (None::<Box<Hold>>, is_small(request));
        let mut faults = None::<MetFaults>;
        loop {
            let begun = self.policy.begin(info);
            self.check_confirmed(begun.validity.as_ref(), info, target)?;
            let plan = match self.decide(&begun.policy, request, info, target, waits).await {
                Decision::Pass => None,
                Decision::Rewrite(plan) => Some(plan),
                Decision::Refuse(refusal) => return Err(self.refuse(info, target, refusal)),
            };
            let lock = plan.as_ref().and_then(|plan| plan.lock.as_ref());
            // Where only the body tells whether the request is for the lock, the guards wait for it.
            let is_for_lock = lock.map_or(Some(false), LockPlan::is_for_lock);
            if let Some(is_for_lock) = is_for_lock.filter(|_| !begun.policy.faults().is_empty()) {
                let met = faults.get_or_insert_with(|| self.faults.met(request, info, target.path(), is_for_lock));
                if met.is_delayed() {
                    drop((begun, plan));
                    waits.measure(Box::pin(met.wait(&self.server.drain))).await;
                    continue;
                }
                met.answer().map_or(Ok(()), |answer| Err(Failure::Injected(answer)))?;
            }
            if is_for_lock != Some(false) || begun.policy.guards().is_empty() {
                return Ok(AdmittedRequest { begun, plan, is_for_lock, probe: None, faults });
            }
            // Once shutdown has begun, the policy is followed no more.
            may_be_held &= !self.server.drain.has_started() && hold.as_deref_mut().is_none_or(Hold::goes_on);
            match (self.guards.admit(info, may_be_held), &mut hold) {
                (Ok(probe), _) => return Ok(AdmittedRequest { begun, plan, is_for_lock, probe, faults }),
                // Asks once more, so that no change is missed.
                (Err(refused), None) if may_be_held && refused.holds => {
                    hold = self.guards.hold().map(Box::new);
                    may_be_held = hold.is_some();
                }
                (Err(refused), Some(hold)) if may_be_held && refused.holds => {
                    drop((begun, plan));
                    waits.measure(Box::pin(self.held(hold, &refused))).await;
                }
                (Err(refused), _) => return Err(self.refuse(info, target, Refusal::Guarded(Box::new(refused)))),
            }
        }
    }

    async fn held(&self, hold: &mut Hold, refused: &Refused) {
        tokio::select! {
            () = hold.wait(refused) => {}
            () = self.server.drain.started() => {}
        }
    }

    pub(super) fn check_confirmed(
        &self,
        validity: Option<&Validity>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
    ) -> Result<(), Failure> {
        match validity {
            Some(validity) if !validity.holds(boot_clock::now()) => {
                Err(self.refuse(info, target, Refusal::Unconfirmed))
            }
            _ => Ok(()),
        }
    }

    /// Counts and logs a refusal.
    pub(super) fn refuse(&self, info: &RequestInfo<'_>, target: &PathAndQuery, refusal: Refusal) -> Failure {
        self.server.metrics.refused.inc();
        match &refusal {
            Refusal::Fenced(write) => {
                self.server.metrics.writes_refused.inc();
                debug!(verb = info.verb(), path = target.path(), reason = %write, "write refused");
            }
            Refusal::Unconfirmed => drop(self.server.metrics.writes_unconfirmed.inc()),
            _ => {}
        }
        explain::refused(info.verb(), target.as_str(), &refusal);
        Failure::Refused(refusal)
    }
}

/// Whether its body is known to be small.
fn is_small(request: &Request<Relay>) -> bool {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    request.body().is_end_stream() || length.is_some_and(|length: u64| length <= MAX_HELD_BODY_BYTES)
}
