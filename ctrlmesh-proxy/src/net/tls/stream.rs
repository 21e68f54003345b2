//! A TLS connection that reads and writes several records for each system call.
//!
//! A read takes up to 64 KiB from the socket into a buffer of the thread; records leave together, up to 64 KiB. So a
//! large body costs one system call for four records, not several for each. [`BatchedStream`] keeps writes back until
//! the end of its driver's poll; all other writes leave at each flush.

mod batched;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::io::{BufRead as _, IoSlice, Write};
use std::ops::DerefMut;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustls::{ClientConnection, ConnectionCommon, ServerConnection, SideData};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

pub use batched::BatchedStream;

/// Of one read: four records of the largest size.
const READ_BYTES: usize = 64 << 10;

/// Encrypted bytes that are written at the latest, flushed or not.
const WRITE_BYTES: usize = 64 << 10;

/// Encrypted bytes that a connection may buffer: those that wait, and one more write.
const BUFFER_LIMIT_BYTES: usize = 2 * WRITE_BYTES;

/// Read buffers that a thread keeps for its next reads.
const SPARE_BUFFERS: usize = 4;

/// With an operator.
pub type ServerStream = Stream<ServerConnection>;

/// With an API server.
pub type ClientStream = Stream<ClientConnection>;

/// A TLS connection after its handshake.
pub struct Stream<C> {
    tcp: TcpStream,
    tls: C,
    /// Bytes that were read and not yet decrypted, because nobody wanted more.
    encrypted: Option<EncryptedBytes>,
    /// Bytes that were encrypted and not yet written.
    buffered: usize,
    /// Whether flushes wait for the end of the driver's poll.
    batching: bool,
    /// The error of a write at the end of a poll; the next write returns it.
    write_error: Option<io::Error>,
    closing: bool,
    /// Whether bytes arrived since that was last asked.
    received: bool,
    reset: Option<CancellationToken>,
}

struct EncryptedBytes {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

thread_local! {
    /// Read buffers that no connection uses now: an idle connection has none.
    static SPARE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

impl From<tokio_rustls::server::TlsStream<TcpStream>> for ServerStream {
    fn from(stream: tokio_rustls::server::TlsStream<TcpStream>) -> Self {
        let (tcp, tls) = stream.into_inner();
        Self::new(tcp, tls)
    }
}

impl From<tokio_rustls::client::TlsStream<TcpStream>> for ClientStream {
    fn from(stream: tokio_rustls::client::TlsStream<TcpStream>) -> Self {
        let (tcp, tls) = stream.into_inner();
        Self::new(tcp, tls)
    }
}

impl<C, S> Stream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>>,
    S: SideData + 'static,
{
    fn new(tcp: TcpStream, mut tls: C) -> Self {
        tls.set_buffer_limit(Some(BUFFER_LIMIT_BYTES));
        Self {
            tcp,
            tls,
            encrypted: None,
            buffered: 0,
            batching: false,
            write_error: None,
            closing: false,
            received: false,
            reset: None,
        }
    }

    /// Once `reset` is cancelled, the drop of this stream resets the connection: the kernel discards what the peer has
    /// not acknowledged (`SO_LINGER` in socket(7)), and sends nothing of it later.
    pub fn reset_when(&mut self, reset: CancellationToken) {
        self.reset = Some(reset);
    }

    /// The ALPN protocol that was negotiated.
    pub fn protocol(&self) -> Option<&[u8]> {
        self.tls.alpn_protocol()
    }

    /// Moves plaintext to `out` until that is full or no more is there. Returns whether the peer has ended.
    fn take(&mut self, out: &mut ReadBuf<'_>) -> io::Result<bool> {
        while out.remaining() > 0 {
            let taken = match self.tls.reader().into_first_chunk() {
                Ok([]) => return Ok(true),
                Ok(chunk) => {
                    let taken = chunk.len().min(out.remaining());
                    out.put_slice(&chunk[..taken]);
                    taken
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            };
            self.tls.reader().consume(taken);
        }
        Ok(false)
    }

    /// Decrypts some of the bytes that were read. Returns whether there were any.
    fn decrypt(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let Some(encrypted) = &mut self.encrypted else { return Ok(false) };
        let mut bytes = &encrypted.bytes[encrypted.start..encrypted.end];
        encrypted.start += self.tls.read_tls(&mut bytes)?;
        if encrypted.start == encrypted.end
            && let Some(encrypted) = self.encrypted.take()
        {
            return_buffer(encrypted.bytes);
        }
        if let Err(error) = self.tls.process_new_packets() {
            // Send the alert that rustls has queued.
            let _sent = self.write_out(cx);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(true)
    }

    /// Reads from the socket.
    fn fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut bytes = take_buffer();
        let mut read = ReadBuf::new(&mut bytes);
        let polled = Pin::new(&mut self.tcp).poll_read(cx, &mut read);
        let end = read.filled().len();
        if end > 0 {
            self.received = true;
            self.encrypted = Some(EncryptedBytes { bytes, start: 0, end });
            return polled;
        }
        return_buffer(bytes);
        if let Poll::Ready(Ok(())) = polled {
            // End of file: the next read tells whether it was a clean one.
            self.tls.read_tls(&mut io::empty())?;
        }
        polled
    }

    /// Writes all encrypted bytes.
    fn write_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.tls.wants_write() {
            let written = self.tls.write_tls(&mut Socket { tcp: &mut self.tcp, cx });
            match written {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        self.buffered = 0;
        Poll::Ready(Ok(()))
    }

    /// Encrypts what `encrypt` writes, once the buffer has room.
    fn write_with(
        &mut self,
        cx: &mut Context<'_>,
        mut encrypt: impl FnMut(&mut rustls::Writer<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.write_error.take() {
            return Poll::Ready(Err(error));
        }
        if self.buffered >= WRITE_BYTES {
            ready!(self.write_out(cx))?;
        }
        let taken = encrypt(&mut self.tls.writer())?;
        self.buffered += taken;
        if self.buffered >= WRITE_BYTES {
            // What the socket does not take now leaves before the next write.
            if let Poll::Ready(Err(error)) = self.write_out(cx) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(taken))
    }
}

impl<C, S> AsyncRead for Stream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Unpin,
    S: SideData + 'static,
{
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        loop {
            let ended = match this.take(out) {
                Err(error) if out.filled().len() == before => return Poll::Ready(Err(error)),
                // Plaintext before the end is returned first.
                ended => ended.unwrap_or(true),
            };
            if ended || out.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if this.decrypt(cx)? {
                continue;
            }
            if out.filled().len() > before {
                return Poll::Ready(Ok(()));
            }
            ready!(this.fill(cx))?;
        }
    }
}

impl<C, S> AsyncWrite for Stream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Unpin,
    S: SideData + 'static,
{
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().write_with(cx, |writer| writer.write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().write_with(cx, |writer| writer.write_vectored(pieces))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(error) = this.write_error.take() {
            return Poll::Ready(Err(error));
        }
        if this.batching {
            return Poll::Ready(Ok(()));
        }
        this.write_out(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.closing {
            this.closing = true;
            this.tls.send_close_notify();
        }
        ready!(this.write_out(cx))?;
        Pin::new(&mut this.tcp).poll_shutdown(cx)
    }
}

impl<C> Drop for Stream<C> {
    fn drop(&mut self) {
        if self.reset.as_ref().is_some_and(CancellationToken::is_cancelled) {
            // Fails where the connection is over already.
            let _over = self.tcp.set_zero_linger();
        }
    }
}

impl<C> fmt::Debug for Stream<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

fn return_buffer(bytes: Box<[u8]>) {
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < SPARE_BUFFERS {
            spare.push(bytes);
        }
    });
}

fn take_buffer() -> Box<[u8]> {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| vec![0; READ_BYTES].into_boxed_slice())
}

/// The socket as an [`io::Write`] for rustls.
struct Socket<'a, 'b> {
    tcp: &'a mut TcpStream,
    cx: &'a mut Context<'b>,
}

/// Turns pending into [`io::ErrorKind::WouldBlock`].
fn non_blocking(polled: Poll<io::Result<usize>>) -> io::Result<usize> {
    match polled {
        Poll::Ready(written) => written,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

impl Write for Socket<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        non_blocking(Pin::new(&mut *self.tcp).poll_write(self.cx, bytes))
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        non_blocking(Pin::new(&mut *self.tcp).poll_write_vectored(self.cx, pieces))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
