//! Batches the writes of a TLS connection that carries many streams.

use std::cell::RefCell;
use std::io;
use std::io::IoSlice;
use std::ops::DerefMut;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use rustls::{ConnectionCommon, SideData};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Stream;

/// A TLS connection whose writes leave at the end of each poll of its driver.
#[derive(Debug)]
pub struct BatchedStream<C>(Rc<RefCell<Stream<C>>>);

impl<C, S> BatchedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>>,
    S: SideData + 'static,
{
    /// The stream for the HTTP/2 library, and the handle for the task that drives it.
    pub fn new(stream: Stream<C>) -> (Self, Self) {
        let stream = Rc::new(RefCell::new(stream));
        (Self(stream.clone()), Self(stream))
    }

    /// Polls the user of the stream. Its writes leave once it is pending, or when the buffer is full.
    pub fn poll_batched<T>(&self, cx: &mut Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.0.borrow_mut().batching = true;
        let polled = poll(cx);
        let stream = &mut *self.0.borrow_mut();
        stream.batching = false;
        if polled.is_pending()
            && let Poll::Ready(Err(error)) = stream.write_out(cx)
        {
            // The next write returns it.
            stream.write_error = Some(error);
            cx.waker().wake_by_ref();
        }
        polled
    }

    /// Whether bytes arrived since the last call.
    pub fn take_received(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().received)
    }
}

impl<C, S> AsyncRead for BatchedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Unpin,
    S: SideData + 'static,
{
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_read(cx, out)
    }
}

impl<C, S> AsyncWrite for BatchedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Unpin,
    S: SideData + 'static,
{
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_shutdown(cx)
    }
}
