//! Narrows requests for collections to the pod's share, and refuses versions from before it changed.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;

use super::Refusal;
use crate::request::{Query, RequestInfo};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotOlderThan {
    pub version: u64,
    /// Whether the request asks for any version, of which the server gives all objects, whatever the limit.
    pub all: bool,
}

/// The selector that narrows a request for a collection; `None` where the policy does not limit it.
pub(super) fn selector(
    policy: &Policy,
    request: &RequestInfo<'_>,
    changed_at: Option<u64>,
) -> Result<Option<Selector>, Refusal> {
    let (group, resource) = (request.api_group(), request.resource());
    if request.is_collection() {
        if let Some(changed_at) = changed_at {
            check_version(changed_at, request)?;
        }
        return Ok(policy.selector_for(group, resource));
    }
    // No verb: a method such as `get` or `FOO`, of which an aggregated server may think what it likes.
    if request.verb().is_empty() && policy.selector_for(group, resource).is_some() {
        return Err(Refusal::Method);
    }
    Ok(None)
}

/// The oldest version that the answer to a request for a state may have, where the client accepts an older one.
///
/// A watch that continues from a list of before the change is refused as too old, and the client lists again. Where no
/// object of the resource has changed since, the API server may answer that list from its cache. The list then has the
/// same version, and the client is refused for ever.
pub(super) fn not_older_than(changed_at: u64, request: &RequestInfo<'_>) -> Option<NotOlderThan> {
    let takes_state = match request.verb() {
        "list" => continued(request).is_none(),
        "watch" => request.query().is_set("sendInitialEvents"),
        _ => false,
    };
    let asked = minimum(request.query()).filter(|asked| takes_state && *asked < changed_at)?;
    Some(NotOlderThan { version: changed_at, all: asked == 0 })
}

/// The oldest version that a list may be answered from, though it may ask for the newest; 0 is any. `None` where it
/// asks for just one, goes on from one, or is no list.
pub fn oldest_wanted(request: &RequestInfo<'_>) -> Option<u64> {
    let query = request.query();
    if request.verb() != "list" || continued(request).is_some() {
        return None;
    }
    let is_absent = |key| query.text(key).is_none_or(|text| text.is_empty());
    if is_absent("resourceVersion") { is_absent("resourceVersionMatch").then_some(0) } else { minimum(query) }
}

/// The version that a state may not be older than; `None` where the query names none, or just one.
fn minimum(query: Query<'_>) -> Option<u64> {
    let asked: u64 = query.text("resourceVersion")?.parse().ok()?;
    let limited = query.text("limit").is_some_and(|limit| limit != "0");
    // With a limit and a version, and nothing more, exactly that version is meant.
    let takes_later = match query.text("resourceVersionMatch").as_deref() {
        None | Some("") => asked == 0 || !limited,
        Some(text) => text == "NotOlderThan",
    };
    takes_later.then_some(asked)
}

/// The version from which a watch, or a further page of a list, continues; `None` for a first request. A page whose
/// token holds no version counts as continuing from the newest.
pub fn goes_on_from(request: &RequestInfo<'_>) -> Option<u64> {
    let query = request.query();
    if request.is_watch() {
        let version = query.text("resourceVersion").and_then(|version| version.parse().ok());
        return version.filter(|version| *version > 0 && !query.is_set("sendInitialEvents"));
    }
    let token = continued(request)?;
    Some(continued_version(&token).unwrap_or(u64::MAX))
}

/// The token of a list's further page.
fn continued<'a>(request: &RequestInfo<'a>) -> Option<Cow<'a, str>> {
    let token = request.query().text("continue");
    token.filter(|token| !token.is_empty() && !request.is_watch())
}

/// A watch or a further page from before the change would miss objects that joined, and keep objects that left.
fn check_version(changed_at: u64, request: &RequestInfo<'_>) -> Result<(), Refusal> {
    let version = request.query().text("resourceVersion").and_then(|version| version.parse().ok());
    let goes_on = request.is_watch() && !request.query().is_set("sendInitialEvents");
    let asked = if goes_on { version } else { None };
    let token = continued(request);
    let unknown = Refusal::UnknownContinue { changed_at };
    let continued = token.map(|token| continued_version(&token).ok_or(unknown)).transpose()?;
    match asked.or(continued) {
        // Version 0 asks for any state, and is answered with all of it.
        Some(asked) if asked != 0 && asked < changed_at => Err(Refusal::Expired { asked, changed_at }),
        _ => Ok(()),
    }
}

/// The version in a continue token: JSON with a number `rv`, in base64url without padding, as the API server reads it.
fn continued_version(token: &str) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct Token {
        rv: i64,
    }
    let token: Token = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    u64::try_from(token.rv).ok()
}
