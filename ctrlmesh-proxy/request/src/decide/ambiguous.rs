//! Can a target be read in two ways?
//!
//! The API server neither cleans paths nor decodes them twice, but its parts do not agree about all of them, and a
//! load balancer before it may clean. What is behind `/proxy` is somebody else's path and is left alone, as long as it
//! stays behind it.

use super::Refusal;
use crate::request::RequestInfo;

/// Refuses what can be read in two ways.
pub(super) fn check(request: &RequestInfo<'_>) -> Result<(), Refusal> {
    let path = judged(request);
    let refuse = |what| Err(Refusal::AmbiguousPath { what });
    if path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return refuse("it has a segment `.` or `..`");
    }
    if climbs(&request.path()[path.len()..]) {
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

/// The part of the path that says which object is meant.
fn judged<'r>(request: &'r RequestInfo<'_>) -> &'r str {
    let proxied = request.subresource() == "proxy" && !request.name_in_path().is_empty();
    if proxied { &request.path()[..request.subresource_range().end] } else { request.path() }
}

/// Whether a path leads above where it begins, were it cleaned.
fn climbs(path: &str) -> bool {
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

/// Whether one of the first `segments` spells a slash.
fn has_escaped_slash(raw_path: &[u8], segments: usize) -> bool {
    let mut judged = raw_path.split(|byte| *byte == b'/').take(segments);
    judged.any(|segment| segment.windows(3).any(|three| three.eq_ignore_ascii_case(b"%2f")))
}
