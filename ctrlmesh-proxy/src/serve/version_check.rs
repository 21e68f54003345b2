//! What does the policy make of a request, where that follows from when it changed?

use ctrlmesh_common::policy::Policy;
use ctrlmesh_request::decide;
use ctrlmesh_request::decide::Decision;
use ctrlmesh_request::request::RequestInfo;
use http::Request;
use http::uri::PathAndQuery;
use tracing::debug;

use crate::net::body::Relay;
use crate::serve::wait_time::Waits;
use crate::session::Session;
use crate::watch::splice;
use crate::watch::splice::Kept;

impl Session {
    /// Decides about one request. What follows from the version at which the policy changed holds only where the
    /// versions of the resource compare with it, for which the API server is asked once.
    pub(super) async fn decide(
        &self,
        policy: &Policy,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        waits: &Waits,
    ) -> Decision {
        let decision = decide::decide(policy, info);
        let Some(changed_at) = decision.dated() else { return decision };
        let compare = if let Some(compare) = self.policy.compare(info, changed_at) {
            compare
        } else {
            let kept = Kept::of(request, target.clone());
            waits.on(Box::pin(self.find_out(&kept, info, changed_at))).await
        };
        if compare { decision } else { decide::decide_undated(policy, info) }
    }

    /// Whether the newest version of a resource is one from after the change, as it is where they compare. Where the API
    /// server does not say, what the policy says holds.
    async fn find_out(&self, kept: &Kept, info: &RequestInfo<'_>, changed_at: u64) -> bool {
        let Ok(newest) = Box::pin(splice::version(self, kept, info)).await else {
            debug!("the API server does not say of which version it is");
            return true;
        };
        let compare = self.policy.found(info, changed_at, newest);
        if !compare {
            debug!(
                group = info.api_group(),
                resource = info.resource(),
                newest,
                changed_at,
                "versions of the resource do not compare with the policy's"
            );
        }
        compare
    }
}
