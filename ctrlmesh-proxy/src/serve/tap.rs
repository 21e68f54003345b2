//! Who looks at what a client sends, before it is understood?

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ctrlmesh_request::request::fragment::Look;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::memory_budget::{Backlog, Waiting};

/// No longer head is taken: what came without end is something else.
const MOST_BYTES: usize = 1 << 20;

/// Up to what length the head of a request is not counted: nearly all are shorter.
const UNCOUNTED_BYTES: usize = 64 << 10;

/// A stream whose bytes are looked at as they are read. Long heads that do not end count as what waits.
#[derive(Debug)]
pub(super) struct Looked<S, L> {
    stream: S,
    look: L,
    head: Waiting,
}

impl<S, L> Looked<S, L> {
    /// The stream, and who looks.
    pub(super) fn new(stream: S, look: L, backlog: &Arc<Backlog>) -> Self {
        Self { stream, look, head: backlog.nothing() }
    }
}

impl<S, L: Look> Looked<S, L> {
    /// Counts the head that is not whole; whether there is room for it.
    fn count(&mut self) -> bool {
        let unfinished = self.look.unfinished().min(MOST_BYTES);
        self.head.set(if unfinished > UNCOUNTED_BYTES { unfinished } else { 0 })
    }

    /// Counts a head no longer that is whole by now, which is so once it is answered.
    fn settle(&mut self) {
        if !self.head.is_nothing() {
            // Less always fits.
            let _fits = self.count();
        }
    }
}

impl<S: AsyncRead + Unpin, L: Look + Unpin> AsyncRead for Looked<S, L> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, out);
        let read = &out.filled()[before..];
        if !read.is_empty() {
            this.look.look(read);
            if !this.count() {
                return Poll::Ready(Err(io::ErrorKind::OutOfMemory.into()));
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin, L: Look + Unpin> AsyncWrite for Looked<S, L> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.settle();
        Pin::new(&mut this.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.settle();
        Pin::new(&mut this.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
