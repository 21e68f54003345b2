//! What leaves at the end of a turn?

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

/// A connection whose writes leave at the end of each turn of its driver.
#[derive(Debug)]
pub struct BatchedStream<C>(Rc<RefCell<Stream<C>>>);

// === impl BatchedStream ===

impl<C, S> BatchedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>>,
    S: SideData + 'static,
{
    /// A stream, and the handle by which its driver marks its turns.
    pub fn new(stream: Stream<C>) -> (Self, Self) {
        let stream = Rc::new(RefCell::new(stream));
        (Self(stream.clone()), Self(stream))
    }

    /// Does one turn of whoever uses the stream. What it writes leaves when it has nothing more to do, or when much has
    /// gathered.
    pub fn turn<T>(
        &self,
        cx: &mut Context<'_>,
        turn: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        self.0.borrow_mut().held = true;
        let polled = turn(cx);
        let stream = &mut *self.0.borrow_mut();
        stream.held = false;
        if polled.is_pending()
            && let Poll::Ready(Err(error)) = stream.write_out(cx)
        {
            // Whoever writes next hears of it.
            stream.broken = Some(error);
            cx.waker().wake_by_ref();
        }
        polled
    }

    /// Whether the peer said something since this was last asked.
    pub fn was_heard(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().heard)
    }
}

impl<C, S> AsyncRead for BatchedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Unpin,
    S: SideData + 'static,
{
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_read(cx, out)
    }
}

impl<C, S> AsyncWrite for BatchedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Unpin,
    S: SideData + 'static,
{
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
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
