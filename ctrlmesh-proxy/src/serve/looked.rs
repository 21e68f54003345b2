//! Who looks at what a client sends, before it is understood?

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::request::fragment::Look;

/// A stream whose bytes are looked at as they are read.
#[derive(Debug)]
pub(super) struct Looked<S, L> {
    stream: S,
    look: L,
}

impl<S, L> Looked<S, L> {
    /// The stream, and who looks.
    pub(super) fn new(stream: S, look: L) -> Self {
        Self { stream, look }
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
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin, L: Unpin> AsyncWrite for Looked<S, L> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, pieces)
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
