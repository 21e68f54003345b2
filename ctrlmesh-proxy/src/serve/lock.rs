//! How does a leader-election lock pass whose name the policy changes?
//!
//! Its request and response are read whole, which nothing else is, and only up to [`lock::MAX_BODY_BYTES`].

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use thiserror::Error;

use crate::body::Relay;
use crate::decide::Rename;
use crate::rewrite::Encoding;
use crate::rewrite::lock;
use crate::rewrite::lock::LockError;

/// Why a lock could not be passed on.
#[derive(Debug, Error)]
pub(super) enum LockedError {
    /// It is larger than any lock is.
    #[error("read a body of at most {} bytes", lock::MAX_BODY_BYTES)]
    TooLarge,
    /// It broke off.
    #[error("read a body whole")]
    Broken,
    /// Its encoding is none that locks come in.
    #[error("read a body of an encoding that is known")]
    Encoding,
    /// What the client sent is not what it says it is.
    #[error("read a lock of the client")]
    Request(#[source] LockError),
    /// What the API server sent is not what it says it is.
    #[error("read a lock of the API server")]
    Response(#[source] LockError),
}

/// Renames in a request; its target is not touched here.
pub(super) async fn request(
    request: Request<Relay>,
    rename: &Rename,
    read_body: bool,
) -> Result<Request<Relay>, LockedError> {
    let (mut head, body) = request.into_parts();
    // A compressed response could not be renamed in.
    head.headers.remove(header::ACCEPT_ENCODING);
    if !read_body {
        return Ok(Request::from_parts(head, body));
    }
    let bytes = collect(body).await?;
    let encoding = sent_encoding(&head.headers, &bytes)?;
    let renamed = lock::request(&bytes, encoding, rename).map_err(LockedError::Request)?;
    let body = replace(&mut head.headers, renamed, &bytes);
    Ok(Request::from_parts(head, body))
}

/// Renames in a response.
pub(super) async fn response(
    response: Response<Relay>,
    rename: &Rename,
) -> Result<Response<Relay>, LockedError> {
    let (mut head, body) = response.into_parts();
    let bytes = collect(body).await?;
    if bytes.is_empty() {
        return Ok(Response::from_parts(head, Relay::Empty));
    }
    let encoding = encoding(&head.headers)?;
    let renamed = lock::response(&bytes, encoding, rename).map_err(LockedError::Response)?;
    let body = replace(&mut head.headers, renamed, &bytes);
    Ok(Response::from_parts(head, body))
}

fn encoding(headers: &HeaderMap) -> Result<Encoding, LockedError> {
    if headers.contains_key(header::CONTENT_ENCODING) {
        return Err(LockedError::Encoding);
    }
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(Encoding::Json) };
    kind.to_str().ok().and_then(Encoding::of).ok_or(LockedError::Encoding)
}

/// The same of what a client sends, which may call its JSON YAML.
fn sent_encoding(headers: &HeaderMap, body: &[u8]) -> Result<Encoding, LockedError> {
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::to_str).transpose();
    let kind = kind.map_err(|_unfit| LockedError::Encoding)?.unwrap_or_default();
    if headers.contains_key(header::CONTENT_ENCODING) {
        return Err(LockedError::Encoding);
    }
    Encoding::of_body(kind, body).ok_or(LockedError::Encoding)
}

async fn collect(body: Relay) -> Result<Bytes, LockedError> {
    match Limited::new(body, lock::MAX_BODY_BYTES).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(LockedError::TooLarge),
        Err(_) => Err(LockedError::Broken),
    }
}

/// The renamed body, and its length where one was given.
fn replace(headers: &mut HeaderMap, renamed: Cow<'_, [u8]>, bytes: &Bytes) -> Relay {
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
