//! Rewrites requests, bodies and watch frames, and leaves every byte that no plan names.

use std::borrow::Cow;

use crate::decide::Plan;
use crate::request::{Query, RequestInfo};

mod document;

pub mod list;
pub mod lock;
pub mod selector;
pub mod status;
pub mod watch;

pub use document::{DocumentError, Encoding, editable_accept, with_dry_run};

/// The path and query to send upstream.
pub fn target<'a>(request: &RequestInfo<'a>, plan: &Plan) -> String {
    let mut path: Cow<'a, [u8]> = Cow::Borrowed(request.raw_path());
    let mut query: Cow<'a, [u8]> = Cow::Borrowed(request.query().raw());
    if let Some(lock) = &plan.lock {
        if selector::is_without_objects(request) {
            query = Cow::Owned(selector::with_objects(&query));
        }
        if lock.in_path {
            path = Cow::Owned(selector::renamed_path(request, &lock.rename.on_server));
        }
        if lock.in_fields.is_some() {
            query = Cow::Owned(selector::renamed_fields(&query, &lock.rename.lock.name, &lock.rename.on_server));
        }
    }
    if let Some(not_older_than) = plan.not_older_than {
        query = Cow::Owned(selector::not_older_than(&query, not_older_than));
    }
    if let Some(policy) = &plan.selector {
        query = Cow::Owned(selector::narrowed(&query, policy));
    }
    let mut target = String::from_utf8_lossy(request.prefix()).into_owned();
    target.push_str(&String::from_utf8_lossy(&path));
    if !query.is_empty() {
        target.push('?');
        target.push_str(&String::from_utf8_lossy(&query));
    }
    target
}

/// The path and query of a list, to ask for the state at this version. `None` where the query would be too long for the
/// server, which would then read none of it.
pub fn at_version(list: &str, version: u64) -> Option<String> {
    let (path, query) = list.split_once('?').unwrap_or((list, ""));
    if !Query::new(query.as_bytes()).has_room_for(2) {
        return None;
    }
    let query = selector::exactly(query.as_bytes(), version);
    Some(format!("{path}?{}", String::from_utf8_lossy(&query)))
}

/// The frames of a recorded watch, without their lengths.
#[cfg(test)]
fn watch_frames_for_tests(stream: &[u8], encoding: Encoding) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut rest = stream;
    let mut ends = document::Framer::new(encoding);
    while let Some((frame, whole)) = ends.next(rest).unwrap() {
        frames.push(rest[frame].to_vec());
        rest = &rest[whole..];
    }
    assert!(rest.is_empty());
    frames
}

#[cfg(test)]
mod tests;
