//! Tells the client of a watch over a WebSocket to list again.
//!
//! The API server accepts such a watch, sends an ERROR event with a Status of code 410, and closes. To some clients
//! (fabric8) a handshake that is answered by 410 is any failure: they retry it for ever.

use std::rc::Rc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use ctrlmesh_request::rewrite::status::Status;
use ctrlmesh_request::rewrite::watch;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncWriteExt as _, copy, sink};
use tokio::time;
use tracing::debug;

use crate::net::body::Relay;
use crate::serve::headers;
use crate::session::Session;

/// What a server appends to a client's key (RFC 6455, 1.3).
const KEY_SUFFIX: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// The only version that there is.
const VERSION: &[u8] = b"13";

/// For the client to close its side, after ours.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A client's opening handshake.
#[derive(Debug)]
pub(super) struct Handshake {
    key: HeaderValue,
    subprotocol: Option<HeaderValue>,
    accept: Option<HeaderValue>,
}

/// What a connection that switches to a WebSocket is sent, before it is closed.
#[derive(Clone, Debug)]
pub(super) struct LastFrames(Bytes);

impl Handshake {
    /// `None` where the headers ask for no WebSocket, or for one that the API server would refuse.
    pub(super) fn of(headers: &HeaderMap) -> Option<Box<Self>> {
        let is_websocket = headers::upgrade(headers)?.as_bytes().eq_ignore_ascii_case(b"websocket");
        let has_version = headers.get(header::SEC_WEBSOCKET_VERSION).is_some_and(|it| it.as_bytes() == VERSION);
        let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|_| is_websocket && has_version)?;
        let offered = headers.get(header::SEC_WEBSOCKET_PROTOCOL);
        let first = offered.and_then(|offered| offered.as_bytes().split(|byte| *byte == b',').next());
        Some(Box::new(Self {
            key: key.clone(),
            subprotocol: first.and_then(|first| HeaderValue::from_bytes(first.trim_ascii()).ok()),
            accept: headers.get(header::ACCEPT).cloned(),
        }))
    }

    /// Accepts the handshake, to end the watch with `status`.
    pub(super) fn end_with(self, status: &Status) -> Response<Relay> {
        let accept = self.accept.as_ref().and_then(|accept| accept.to_str().ok());
        let frames = LastFrames(watch::error_frames(accept, status).into());
        let mut response = Response::new(Relay::Empty);
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.extensions_mut().insert(frames);
        let headers = response.headers_mut();
        headers::set_upgrade(headers, HeaderValue::from_static("websocket"));
        if let Ok(accepted) = HeaderValue::from_str(&accepted(self.key.as_bytes())) {
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, accepted);
        }
        if let Some(subprotocol) = self.subprotocol {
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, subprotocol);
        }
        response
    }
}

/// The server's answer to a client's key.
fn accepted(key: &[u8]) -> String {
    STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, &[key, KEY_SUFFIX].concat()))
}

/// Sends the frames, and closes.
pub(super) fn close(session: &Rc<Session>, client: OnUpgrade, LastFrames(frames): LastFrames) {
    session.server.drain.spawn_local(async move {
        let closing = async {
            let mut stream = TokioIo::new(client.await.map_err(std::io::Error::other)?);
            stream.write_all(&frames).await?;
            stream.shutdown().await?;
            // Unread bytes would reset the connection before the client reads the frames.
            copy(&mut stream, &mut sink()).await.map(drop)
        };
        if let Ok(Err(error)) = time::timeout(CLOSE_TIMEOUT, closing).await {
            debug!(error = &error as &dyn std::error::Error, "a WebSocket was not closed properly");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_answered_as_in_the_rfc() {
        assert_eq!(accepted(b"dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn what_the_api_server_would_refuse_is_no_handshake() {
        let whole = [
            ("connection", "Upgrade"),
            ("upgrade", "WebSocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "a2V5"),
        ];
        let map = |headers: &[(&'static str, &'static str)]| -> HeaderMap {
            let headers = headers.iter();
            headers.map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
        };
        assert!(Handshake::of(&map(&whole)).is_some());
        for without in 0..whole.len() {
            let mut headers = whole.to_vec();
            headers.remove(without);
            assert!(Handshake::of(&map(&headers)).is_none(), "{headers:?}");
        }
        let mut spdy = whole;
        spdy[1].1 = "SPDY/3.1";
        assert!(Handshake::of(&map(&spdy)).is_none());
    }
}
