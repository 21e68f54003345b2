//! What does the proxy say when it answers itself?

use http::{HeaderValue, Response, StatusCode, header};

use crate::body::Relay;
use crate::rewrite::status;
use crate::rewrite::status::Status;

/// A `metav1.Status` in a content type that the client accepts.
pub(super) fn response(status: &Status, accept: Option<&HeaderValue>) -> Response<Relay> {
    let accept = accept.and_then(|accept| accept.to_str().ok());
    let (kind, body) = status::encode(status, accept);
    let mut response = Response::new(Relay::full(body));
    *response.status_mut() =
        StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    if let Some(seconds) = status.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
