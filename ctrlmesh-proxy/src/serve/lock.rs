//! Renames the leader-election lock in requests and responses.
//!
//! Bodies with a lock are read whole, up to [`lock::MAX_BODY_BYTES`]; no other bodies are. Longer lists pass item by
//! item.

use std::borrow::Cow;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use ctrlmesh_request::decide::{FencedWrite, LockPlan, Rename};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite;
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::lock;
use ctrlmesh_request::rewrite::lock::{Holder, LockError};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use thiserror::Error;
use tokio::time;
use tracing::debug;

use crate::net::body::Relay;
use crate::serve::explain;
use crate::serve::headers;
use crate::serve::lock_list::LockList;
use crate::serve::reply::Content;
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::session::collect_budget::CollectBudget;
use crate::session::own_lock::LockConnection;
use crate::traffic::{HeldLock, LockHolder};

/// A longer list passes item by item.
const SHORT_LIST_BYTES: usize = 128 << 10;

/// For a client's body. The client is local, and an unfinished body holds memory.
const BODY_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Error)]
pub(super) enum LockedError {
    #[error("look into an upgraded connection")]
    Upgraded,
    #[error("read a body of at most {} bytes", lock::MAX_BODY_BYTES)]
    TooLarge,
    #[error("hold one more body")]
    Busy,
    /// The client did not send it in time.
    #[error("read a body within {deadline:?}")]
    Slow { deadline: Duration },
    #[error("read a body whole")]
    Broken,
    #[error("read a body of an encoding that is known")]
    Encoding,
    /// The body does not hold the lock, and the pod may write nothing else there.
    #[error("{0}")]
    Fenced(Box<FencedWrite>),
    /// The client's body does not match its content type.
    #[error("read a lock of the client")]
    Request(#[source] LockError),
    /// The API server's body does not match its content type.
    #[error("read a lock of the API server")]
    Response(#[source] LockError),
}

/// A request in which the lock is renamed, where it holds the lock.
#[derive(Debug)]
pub(super) struct RenamedRequest {
    pub(super) request: Request<Relay>,
    /// Whether its body is known to hold the lock.
    pub(super) holds_lock: bool,
    /// What its body says of the lock's holder.
    pub(super) held: Option<HeldLock>,
}

/// How the lock is renamed in a response.
#[derive(Debug)]
pub(super) struct ResponseRenaming<'a> {
    pub(super) rename: &'a Rename,
    pub(super) is_list: bool,
    /// Is told whom the response has as the lock's holder.
    pub(super) reader: Option<&'a LockHolder>,
    /// Of a Lease that is the lock: who asks. If an ended process of the pod holds it, nobody does.
    pub(super) connection: Option<&'a LockConnection>,
}

/// Asks for a response in which the lock can be renamed.
pub(super) fn accept_editable(headers: &mut HeaderMap) {
    // A compressed response could not be edited either.
    headers.remove(header::ACCEPT_ENCODING);
    let editable = headers::accept(headers).and_then(|accept| rewrite::editable_accept(&accept));
    if let Some(editable) = editable.and_then(|accept| HeaderValue::try_from(accept).ok()) {
        headers.insert(header::ACCEPT, editable);
    }
}

/// Renames in a request's body. The target is rewritten elsewhere.
pub(super) async fn request(
    session: &Session,
    request: Request<Relay>,
    info: &RequestInfo<'_>,
    plan: &LockPlan,
    waits: &WaitTime,
) -> Result<RenamedRequest, LockedError> {
    if info.is_watch() && headers::upgrade(request.headers()).is_some() {
        return Err(LockedError::Upgraded);
    }
    session.server.metrics.renamed.inc();
    if !plan.in_body {
        return Ok(RenamedRequest { request, holds_lock: false, held: None });
    }
    let (budget, deadline) = (&session.resources.collect, session.server.response_timeout);
    rename_body(request, info.verb(), plan, deadline, budget, waits).await
}

/// Renames in a body that the client sends within `deadline`.
async fn rename_body(
    request: Request<Relay>,
    verb: &str,
    plan: &LockPlan,
    deadline: Duration,
    budget: &CollectBudget,
    waits: &WaitTime,
) -> Result<RenamedRequest, LockedError> {
    let (mut head, body) = request.into_parts();
    let bytes = collect_within(body, deadline, budget, waits).await?;
    let rename = &plan.rename;
    let encoding = request_encoding(&head.headers, &bytes)?;
    let renamed = lock::request(&bytes, encoding, rename).map_err(LockedError::Request)?;
    if let (Cow::Borrowed(_), Some(refused)) = (&renamed, &plan.unless_lock) {
        return Err(LockedError::Fenced(refused.clone()));
    }
    let holds_lock = matches!(renamed, Cow::Owned(_));
    let said = lock::holder(&bytes, encoding).filter(|holder| verb != "patch" || *holder != Holder::Unsaid);
    let lock = said.map(|holder| held_lock(holder, rename));
    if holds_lock {
        let target = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
        explain::renamed(verb, target, &rename.lock.name, &rename.on_server);
    }
    let body = replace(&mut head.headers, renamed, &bytes);
    Ok(RenamedRequest { request: Request::from_parts(head, body), holds_lock, held: lock })
}

pub(super) async fn response(
    response: Response<Relay>,
    renaming: ResponseRenaming<'_>,
    budget: &CollectBudget,
    waits: &WaitTime,
) -> Result<Response<Content>, LockedError> {
    let ResponseRenaming { rename, is_list, reader, connection } = renaming;
    let (mut head, body) = response.into_parts();
    let encoding = match encoding(&head.headers) {
        Ok(encoding) => encoding,
        // An error in an unknown encoding does not hold the lock.
        Err(_) if !head.status.is_success() || body.is_end_stream() => {
            return Ok(Response::from_parts(head, Content::Plain(body)));
        }
        Err(error) => return Err(error),
    };
    if is_list
        && head.status == StatusCode::OK
        && !is_short(&head.headers)
        && !body.is_end_stream()
        && let Some(items) = lock::Items::new(encoding, rename.clone())
    {
        head.headers.remove(header::CONTENT_LENGTH);
        return Ok(Response::from_parts(head, Content::LockList(Box::new(LockList::new(items, body)))));
    }
    let bytes = waits.measure(collect(body, budget)).await?;
    if bytes.is_empty() {
        return Ok(Response::from_parts(head, Content::Plain(Relay::Empty)));
    }
    let is_read = head.status == StatusCode::OK && (reader.is_some() || connection.is_some());
    let holder = is_read.then(|| lock::holder(&bytes, encoding)).flatten();
    let is_left_behind = |holder: &Holder| match (holder, connection) {
        (Holder::Somebody(holder), Some(connection)) => connection.is_left_behind(holder),
        _ => false,
    };
    let is_left_behind = holder.as_ref().is_some_and(is_left_behind);
    if let (Some(Holder::Somebody(holder)), Some(connection), false) = (&holder, connection, is_left_behind) {
        connection.reads(holder);
    }
    if let Some((reader, holder)) = reader.zip(holder) {
        reader.read(&held_lock(holder, rename));
    }
    let renamed = if is_left_behind {
        debug!(lock = rename.on_server, "an ended process of the pod holds the lock; the pod is told that nobody does");
        lock::vacated(&bytes, encoding, rename)
    } else {
        lock::response(&bytes, encoding, rename)
    };
    let renamed = match renamed {
        Ok(renamed) => renamed,
        Err(_) if !head.status.is_success() => Cow::Borrowed(&*bytes),
        Err(error) => return Err(LockedError::Response(error)),
    };
    let body = replace(&mut head.headers, renamed, &bytes);
    Ok(Response::from_parts(head, Content::Plain(body)))
}

/// By its `Content-Length`.
fn is_short(headers: &HeaderMap) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    length.and_then(|length| length.parse::<usize>().ok()).is_some_and(|it| it <= SHORT_LIST_BYTES)
}

fn encoding(headers: &HeaderMap) -> Result<Encoding, LockedError> {
    if headers.contains_key(header::CONTENT_ENCODING) {
        return Err(LockedError::Encoding);
    }
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(Encoding::Json) };
    kind.to_str().ok().and_then(Encoding::of).ok_or(LockedError::Encoding)
}

/// Of a body that the client sent.
fn request_encoding(headers: &HeaderMap, body: &[u8]) -> Result<Encoding, LockedError> {
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::to_str).transpose();
    let kind = kind.map_err(|_unfit| LockedError::Encoding)?.unwrap_or_default();
    if headers.contains_key(header::CONTENT_ENCODING) {
        return Err(LockedError::Encoding);
    }
    Encoding::of_editable(kind, body).ok_or(LockedError::Encoding)
}

fn held_lock(holder: Holder, rename: &Rename) -> HeldLock {
    let holder = match holder {
        Holder::Unsaid | Holder::Nobody => String::new(),
        Holder::Somebody(holder) => holder,
    };
    HeldLock { name: rename.on_server.clone(), holder }
}

/// Reads a whole body, which its sender sends within `deadline`.
pub(super) async fn collect_within(
    body: Relay,
    deadline: Duration,
    budget: &CollectBudget,
    waits: &WaitTime,
) -> Result<Bytes, LockedError> {
    let deadline = deadline.min(BODY_TIMEOUT);
    let collected = waits.measure(time::timeout(deadline, collect(body, budget))).await;
    collected.map_err(|_elapsed| LockedError::Slow { deadline })?
}

/// Reads a whole body. The caller sets the deadline.
pub(super) async fn collect(mut body: Relay, budget: &CollectBudget) -> Result<Bytes, LockedError> {
    let mut held = budget.start();
    let mut pieces = BytesMut::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(|_broken| LockedError::Broken)?.into_data() {
            if pieces.len() + data.len() > lock::MAX_BODY_BYTES {
                return Err(LockedError::TooLarge);
            }
            if !held.grow(data.len()) {
                return Err(LockedError::Busy);
            }
            pieces.extend_from_slice(&data);
        }
    }
    Ok(pieces.freeze())
}

/// The renamed body; adapts `Content-Length`.
pub(super) fn replace(headers: &mut HeaderMap, renamed: Cow<'_, [u8]>, bytes: &Bytes) -> Relay {
    let body = match renamed {
        Cow::Borrowed(_) => bytes.clone(),
        Cow::Owned(renamed) => Bytes::from(renamed),
    };
    if headers.contains_key(header::CONTENT_LENGTH) {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    headers.remove(header::TRANSFER_ENCODING);
    Relay::full(body)
}

#[cfg(test)]
mod tests;
