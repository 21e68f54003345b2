//! Refuses what a shadow cannot send as a dry run.

use ctrlmesh_common::policy::fence::VIRTUAL_GROUPS;

use super::Refusal;
use super::fence::{CONNECTS, is_token, is_write};
use crate::request::RequestInfo;

/// Subresources of which the API server knows how to make dry runs. Those of other API servers may do something at once
/// and know of no dry run, as a restart of a virtual machine.
const STORED: [&str; 10] = [
    "approval",
    "binding",
    "bindings",
    "ephemeralcontainers",
    "eviction",
    "finalize",
    "resize",
    "scale",
    "status",
    "token",
];

/// Whether a shadow sends `request` as a dry run: it writes an object, and does not only ask a question.
pub fn becomes_dry_run(request: &RequestInfo<'_>) -> bool {
    let is_question = VIRTUAL_GROUPS.contains(&request.api_group()) || is_token(request);
    is_write(request) && !is_question
}

pub(super) fn check(request: &RequestInfo<'_>) -> Result<(), Refusal> {
    if !request.is_resource_request() {
        let is_safe = matches!(request.method(), b"GET" | b"HEAD" | b"OPTIONS");
        return if is_safe { Ok(()) } else { Err(Refusal::Shadow { what: "what it sends here" }) };
    }
    let subresource = request.subresource();
    if request.api_group().is_empty() && CONNECTS.contains(&subresource) {
        return Err(Refusal::Shadow { what: "a connection to a pod, a service or a node" });
    }
    if becomes_dry_run(request) && !subresource.is_empty() && !STORED.contains(&subresource) {
        return Err(Refusal::Shadow { what: "a write of this subresource" });
    }
    Ok(())
}
