//! Responses that the proxy makes itself.

use std::io;

use ctrlmesh_request::rewrite::status;
use ctrlmesh_request::rewrite::status::Status;
use ctrlmesh_request::rewrite::watch;
use http::{HeaderValue, Response, StatusCode, header};
use hyper::body::Body as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::net::body::Relay;

/// For a client without TLS: the answer of Go's servers, and the reason.
const NOT_TLS: &[u8] = b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n\
ctrlmesh-proxy: this pod's share of the objects is limited, so it speaks TLS to the API server\n";

pub(super) async fn not_tls(mut stream: TcpStream) -> io::Result<()> {
    // Unread bytes would reset the connection before the client reads the answer.
    let mut unread = [0; 1024];
    let _bytes = stream.read(&mut unread).await?;
    stream.write_all(NOT_TLS).await?;
    stream.shutdown().await
}

/// A `metav1.Status` in a content type that the client accepts.
pub(super) fn response(status: &Status, accept: Option<&HeaderValue>) -> Response<Relay> {
    let accept = accept.and_then(|accept| accept.to_str().ok());
    let (kind, body) = status::encode(status, accept);
    // RFC 9110 (15.3.5, 15.4.5): these have no content.
    let mut response = if matches!(status.code, 204 | 304) { Response::new(Relay::Empty) } else { of(kind, body) };
    *response.status_mut() = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    if let Some(seconds) = status.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// The same as the answer to a HEAD request (RFC 9110, 9.3.2): with the length of a body that does not come.
pub(super) fn without_body(mut response: Response<Relay>) -> Response<Relay> {
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    response.map(|_body| Relay::Empty)
}

/// A watch that ends at once with `status` as an ERROR event. The API server answers so whatever is wrong with the
/// version of a watch (apiserver's `Cacher.Watch`), and some clients list again for nothing else.
pub(super) fn ended_watch(status: &Status, accept: Option<&HeaderValue>) -> Response<Relay> {
    let accept = accept.and_then(|accept| accept.to_str().ok());
    let (kind, body) = watch::error_stream(accept, status);
    of(kind, body)
}

fn of(kind: &'static str, body: Vec<u8>) -> Response<Relay> {
    let mut response = Response::new(Relay::full(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    response
}
