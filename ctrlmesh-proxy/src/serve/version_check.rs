//! Decides about requests whose answer depends on the version at which the policy changed.

use ctrlmesh_common::policy::Policy;
use ctrlmesh_request::decide;
use ctrlmesh_request::decide::Decision;
use ctrlmesh_request::request::RequestInfo;
use http::Request;
use http::uri::PathAndQuery;
use tracing::debug;

use crate::net::body::Relay;
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::watch::splice;
use crate::watch::splice::RequestTemplate;

impl Session {
    /// A decision by the version at which the policy changed holds only where the resource's versions compare with it.
    /// The proxy asks the API server for that once for each change and resource.
    pub(super) async fn decide(
        &self,
        policy: &Policy,
        request: &Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        waits: &WaitTime,
    ) -> Decision {
        let decision = decide::decide(policy, info);
        let Some(changed_at) = decision.dated() else { return decision };
        let compare = if let Some(compare) = self.policy.compare(info, changed_at) {
            compare
        } else {
            let template = RequestTemplate::new(request, target.clone(), info);
            waits.measure(Box::pin(self.versions_compare(&template, info, changed_at))).await
        };
        if compare { decision } else { decide::decide_undated(policy, info) }
    }

    /// Versions compare where the resource's newest version is from after the change. Where the API server does not
    /// tell, they are taken to.
    async fn versions_compare(&self, template: &RequestTemplate, info: &RequestInfo<'_>, changed_at: u64) -> bool {
        let Ok(newest) = Box::pin(splice::version(self, template, info)).await else {
            debug!("the API server does not tell its version");
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
