//! What does a client hear whose request cannot be read?
//!
//! hyper answers it, with a status line and nothing else. On its way out that becomes what the proxy says of everything
//! else that it refuses: a `metav1.Status`.

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use ctrlmesh_request::rewrite::status;
use ctrlmesh_request::rewrite::status::Status;
use http::{HeaderMap, StatusCode, header};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What hyper answers by itself, and how the API server calls it.
const ANSWERS: [(StatusCode, &str, &str); 3] = [
    (StatusCode::BAD_REQUEST, "BadRequest", "the head of the request is malformed"),
    (StatusCode::URI_TOO_LONG, "RequestEntityTooLarge", "the target of the request is too long"),
    (
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        "RequestEntityTooLarge",
        "the request has too many headers, or too long ones",
    ),
];

/// A stream on which hyper's own answers become ours.
#[derive(Debug)]
pub(super) struct Unread<S> {
    stream: S,
    theirs: Arc<Theirs>,
    /// What is still to be written in the place of hyper's words.
    instead: Bytes,
}

/// Whether the API server has answered as hyper does, so that they cannot be told apart any more.
#[derive(Debug, Default)]
pub(super) struct Theirs(AtomicBool);

// === impl Unread ===

impl<S> Unread<S> {
    /// A stream, and what it is told of the API server's answers.
    pub(super) fn new(stream: S) -> (Self, Arc<Theirs>) {
        let theirs = Arc::<Theirs>::default();
        (Self { stream, theirs: theirs.clone(), instead: Bytes::new() }, theirs)
    }
}

impl<S: AsyncWrite + Unpin> Unread<S> {
    /// Takes what hyper says by itself; how much that is.
    fn replace(&mut self, bytes: &[u8]) -> Option<usize> {
        // Nothing else begins so, and nearly everything ends there.
        if !bytes.starts_with(b"HTTP/1.1 4") || self.theirs.0.load(Ordering::Relaxed) {
            return None;
        }
        self.instead = instead(bytes)?;
        Some(bytes.len())
    }

    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.instead))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.instead.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Unread<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, out)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Unread<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match this.replace(bytes) {
            Some(taken) => Poll::Ready(Ok(taken)),
            None => Pin::new(&mut this.stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let [piece] = pieces
            && let Some(taken) = this.replace(piece)
        {
            return Poll::Ready(Ok(taken));
        }
        Pin::new(&mut this.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_instead(cx))?;
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_instead(cx))?;
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

// === impl Theirs ===

impl Theirs {
    /// Takes notice of an answer of the API server, or of the proxy.
    pub(super) fn see(&self, status: StatusCode, headers: &HeaderMap) {
        let alike = ANSWERS.iter().any(|(code, ..)| *code == status);
        if alike && !headers.contains_key(header::CONTENT_TYPE) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// What the client gets in the place of a whole answer of hyper's.
fn instead(bytes: &[u8]) -> Option<Bytes> {
    let text = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let mut lines = text.split("\r\n");
    let code = lines.next()?.strip_prefix("HTTP/1.1 ")?;
    let (status, reason, message) =
        ANSWERS.into_iter().find(|(status, ..)| code.starts_with(status.as_str()))?;
    if !lines.all(|line| matches!(line, "connection: close" | "content-length: 0")) {
        return None;
    }
    let message = format!("ctrlmesh-proxy could not understand the request: {message}");
    let status = Status { code: status.as_u16(), reason, message, retry_after: None };
    let (kind, body) = status::encode(&status, None);
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {code}\r\ncontent-type: {kind}\r\ncache-control: no-cache, private\r\n\
         connection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    Some([head.as_bytes(), &body].concat().into())
}
