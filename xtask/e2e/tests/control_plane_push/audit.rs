//! Reads the managers' requests from the audit log.

use ctrlmesh_testbed::ControlPlane;
use ctrlmesh_testbed::audit_log::AuditEvent;
use jiff::Timestamp;

/// How the managers call themselves in requests: of the log, only what contains this is read.
pub(crate) const PROGRAM: &str = "ctrlmesh-manager";

/// A request that was not refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) verb: String,
    /// With the subresource.
    pub(crate) resource: String,
    pub(crate) name: String,
    /// When it came in.
    pub(crate) at: Timestamp,
}

/// What is in the log about the managers, as it happened.
pub(crate) fn requests(cluster: &ControlPlane) -> Vec<Request> {
    let events = AuditEvent::read(&cluster.audit_log(), PROGRAM).unwrap().into_iter();
    let mut requests: Vec<Request> = events.filter_map(request).collect();
    requests.sort_by_key(|request| request.at);
    requests
}

fn request(event: AuditEvent) -> Option<Request> {
    let is_answered = (1..300).contains(&event.response_status.code);
    let is_ours = event.user_agent.starts_with(PROGRAM) && !event.object.resource.is_empty();
    (is_ours && is_answered).then(|| Request {
        resource: event.object.with_subresource(),
        verb: event.verb,
        name: event.object.name,
        at: event.received,
    })
}
