//! Refuses targets that two readers could understand differently.
//!
//! The API server neither cleans paths nor decodes them twice. But its parts disagree about some of them, and a load
//! balancer in front of it may clean them. The path behind `/proxy` belongs to the proxied server, and passes unless it
//! climbs above `/proxy`.

use super::Refusal;
use crate::request::RequestInfo;

/// Refuses what can be read in two ways.
pub(super) fn check(request: &RequestInfo<'_>) -> Result<(), Refusal> {
    let path = object_path(request);
    let refuse = |what| Err(Refusal::AmbiguousPath { what });
    if path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return refuse("it has a segment `.` or `..`");
    }
    if climbs_out(&request.path()[path.len()..]) {
        return refuse("it climbs above what is proxied to");
    }
    if !request.is_resource_request() {
        return Ok(());
    }
    if !request.is_origin_form() {
        return refuse("it is not the whole target");
    }
    if path.contains("//") {
        return refuse("it has an empty segment");
    }
    if has_escaped_slash(request.raw_path(), path.matches('/').count() + 1) {
        return refuse("it has an escaped slash");
    }
    if request.query().is_too_long() { Err(Refusal::AmbiguousQuery) } else { Ok(()) }
}

/// The part of the path that names the object.
fn object_path<'r>(request: &'r RequestInfo<'_>) -> &'r str {
    let proxied = request.subresource() == "proxy" && !request.name_in_path().is_empty();
    if proxied { &request.path()[..request.subresource_range().end] } else { request.path() }
}

/// Whether a path leads above where it begins, were it cleaned.
fn climbs_out(path: &str) -> bool {
    let mut depth = 0_usize;
    path.split('/').any(|segment| {
        match segment {
            "" | "." => {}
            ".." => match depth.checked_sub(1) {
                Some(above) => depth = above,
                None => return true,
            },
            _ => depth += 1,
        }
        false
    })
}

/// Whether one of the first `count` segments spells a slash.
fn has_escaped_slash(raw_path: &[u8], count: usize) -> bool {
    let mut segments = raw_path.split(|byte| *byte == b'/').take(count);
    segments.any(|segment| segment.windows(3).any(|three| three.eq_ignore_ascii_case(b"%2f")))
}
