//! A stream that shows an observer what a client sends, and counts long unfinished heads as waiting bytes.

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::memory_budget::{MemoryBudget, Reservation};

/// No longer head is accepted, so no more counts as one.
const MAX_HEAD_BYTES: usize = 1 << 20;

/// Heads up to this length are not counted: nearly all are shorter.
const UNCOUNTED_BYTES: usize = 64 << 10;

pub(super) trait HeadObserver {
    fn observe(&mut self, bytes: &[u8]);

    /// The length of a head that has begun and not ended.
    fn unfinished_bytes(&self) -> usize;
}

/// A stream whose bytes an observer sees as they are read.
#[derive(Debug)]
pub(super) struct Tap<S, O> {
    stream: S,
    observer: O,
    head: Reservation,
}

impl<S, O> Tap<S, O> {
    pub(super) fn new(stream: S, observer: O, budget: &Arc<MemoryBudget>) -> Self {
        Self { stream, observer, head: budget.empty_reservation() }
    }
}

impl<S, O: HeadObserver> Tap<S, O> {
    /// Counts an unfinished head; returns false where that exceeds the budget.
    fn count(&mut self) -> bool {
        let unfinished = self.observer.unfinished_bytes().min(MAX_HEAD_BYTES);
        self.head.resize(if unfinished > UNCOUNTED_BYTES { unfinished } else { 0 })
    }

    /// Releases a head that has ended, which is so once it is answered.
    fn release(&mut self) {
        if !self.head.is_empty() {
            // A reservation may always shrink.
            let _fits = self.count();
        }
    }
}

impl<S: AsyncRead + Unpin, O: HeadObserver + Unpin> AsyncRead for Tap<S, O> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, out);
        let read = &out.filled()[before..];
        if !read.is_empty() {
            this.observer.observe(read);
            if !this.count() {
                return Poll::Ready(Err(io::ErrorKind::OutOfMemory.into()));
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin, O: HeadObserver + Unpin> AsyncWrite for Tap<S, O> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.release();
        Pin::new(&mut this.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.release();
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
