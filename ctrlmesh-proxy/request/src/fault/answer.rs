//! The answers that faults give instead of the API server.

use ctrlmesh_common::policy::Fault;
use ctrlmesh_common::policy::fault::ApiFaultKind;

use crate::request::RequestInfo;
use crate::rewrite::status::Status;

pub(super) fn aborted(fault: &Fault, code: u16, verb: &str) -> Status {
    Status { code, reason: reason(code, verb), message: by(fault), retry_after: None }
}

/// `None` where the API server answers.
pub(super) fn of_api(fault: &Fault, kind: ApiFaultKind, info: &RequestInfo<'_>) -> Option<Status> {
    let by = by(fault);
    Some(match kind {
        ApiFaultKind::ExpireWatch => Status {
            code: 410,
            reason: "Expired",
            message: format!("too old resource version ({by})"),
            retry_after: None,
        },
        ApiFaultKind::Conflict => {
            let (resource, group, name) = (info.resource(), info.api_group(), info.name());
            let dot = if group.is_empty() { "" } else { "." };
            let message = format!(
                "Operation cannot be fulfilled on {resource}{dot}{group} {name:?}: the object has been modified; please apply your changes to the latest version and try again ({by})"
            );
            Status { code: 409, reason: "Conflict", message, retry_after: None }
        }
        ApiFaultKind::TooManyRequests { retry_after_seconds } => {
            let message = format!("too many requests, please try again later ({by})");
            Status { code: 429, reason: "TooManyRequests", message, retry_after: Some(retry_after_seconds) }
        }
        ApiFaultKind::AnswerLost
        | ApiFaultKind::CutWatch { .. }
        | ApiFaultKind::DelayEvents { .. }
        | ApiFaultKind::SlowBody { .. }
        | ApiFaultKind::Stale { .. }
        | ApiFaultKind::GoAway => return None,
    })
}

fn by(fault: &Fault) -> String {
    format!("ctrlmesh: fault {:?} of FaultInjection {}", fault.fault, fault.injection)
}

/// As `NewGenericServerResponse` has it (k8s.io/apimachinery/pkg/api/errors), but for 408 and 410, which API servers
/// send with these reasons.
fn reason(code: u16, verb: &str) -> &'static str {
    match code {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        406 => "NotAcceptable",
        408 | 504 => "Timeout",
        409 if verb == "create" => "AlreadyExists",
        409 => "Conflict",
        410 => "Expired",
        413 => "RequestEntityTooLarge",
        415 => "UnsupportedMediaType",
        422 => "Invalid",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        500.. => "InternalError",
        _ => "",
    }
}
