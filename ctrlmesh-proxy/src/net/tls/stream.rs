//! How do bytes cross a TLS connection that stands?
//!
//! A read takes what the socket has, up to 64 KiB, into a buffer that the thread lends; records leave together, up to
//! 64 KiB. So a large body costs a system call for four records, not several for each. Whoever drives a connection
//! with many streams may hold back what it writes until the end of its turn ([`BatchedStream`]); all else leaves at each flush.

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

pub use batched::BatchedStream;

/// How much is read from a socket at once: four records of the largest size.
const READ_BYTES: usize = 64 << 10;

/// How much is gathered before it is written, come what may.
const GATHERED_BYTES: usize = 64 << 10;

/// How much encrypted data a connection may keep: what is gathered, and one more write.
const KEPT_BYTES: usize = 2 * GATHERED_BYTES;

/// How many buffers a thread keeps for its next reads.
const SPARE_BUFFERS: usize = 4;

/// With an operator.
pub type ServerStream = Stream<ServerConnection>;

/// With an API server.
pub type ClientStream = Stream<ClientConnection>;

/// A TLS connection after its handshake.
pub struct Stream<C> {
    tcp: TcpStream,
    tls: C,
    /// What was read and not yet decrypted, because nobody wanted more.
    wire: Option<Wire>,
    /// How much was encrypted and not yet written.
    gathered: usize,
    /// Whether a flush is left to the end of the turn.
    held: bool,
    /// What became of a write at the end of a turn, until somebody asks.
    broken: Option<io::Error>,
    closing: bool,
    /// Whether the peer said something since that was last asked.
    heard: bool,
}

/// Bytes as they came from the socket.
struct Wire {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

thread_local! {
    /// Buffers between two reads: a connection on which nothing happens has none.
    static SPARE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

// === impl Stream ===

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
        tls.set_buffer_limit(Some(KEPT_BYTES));
        Self {
            tcp,
            tls,
            wire: None,
            gathered: 0,
            held: false,
            broken: None,
            closing: false,
            heard: false,
        }
    }

    /// The protocol that was agreed on.
    pub fn protocol(&self) -> Option<&[u8]> {
        self.tls.alpn_protocol()
    }

    /// Moves plaintext to `out` until that is full or no more is there; whether the peer has ended.
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

    /// Decrypts some of what was read from the socket; whether there was any.
    fn decrypt(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let Some(wire) = &mut self.wire else { return Ok(false) };
        wire.start += self.tls.read_tls(&mut &wire.bytes[wire.start..wire.end])?;
        if wire.start == wire.end
            && let Some(wire) = self.wire.take()
        {
            give_back(wire.bytes);
        }
        if let Err(error) = self.tls.process_new_packets() {
            // The peer may still hear why.
            let _unheard = self.write_out(cx);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(true)
    }

    /// Reads what the socket has.
    fn fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut bytes = lend();
        let mut read = ReadBuf::new(&mut bytes);
        let polled = Pin::new(&mut self.tcp).poll_read(cx, &mut read);
        let end = read.filled().len();
        if end > 0 {
            self.heard = true;
            self.wire = Some(Wire { bytes, start: 0, end });
            return polled;
        }
        give_back(bytes);
        if let Poll::Ready(Ok(())) = polled {
            // The end: whether it was a clean one is told by whoever reads next.
            self.tls.read_tls(&mut io::empty())?;
        }
        polled
    }

    /// Writes all that was encrypted.
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
        self.gathered = 0;
        Poll::Ready(Ok(()))
    }

    /// Encrypts what `encrypt` takes, once there is room for it.
    fn write_with(
        &mut self,
        cx: &mut Context<'_>,
        mut encrypt: impl FnMut(&mut rustls::Writer<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Err(error));
        }
        if self.gathered >= GATHERED_BYTES {
            ready!(self.write_out(cx))?;
        }
        let taken = encrypt(&mut self.tls.writer())?;
        self.gathered += taken;
        if self.gathered >= GATHERED_BYTES {
            // What does not leave now leaves before the next write.
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
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        loop {
            let ended = match this.take(out) {
                Err(error) if out.filled().len() == before => return Poll::Ready(Err(error)),
                // What came before the end is told first.
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
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
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
        if let Some(error) = this.broken.take() {
            return Poll::Ready(Err(error));
        }
        if this.held {
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

impl<C> fmt::Debug for Stream<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

fn give_back(bytes: Box<[u8]>) {
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < SPARE_BUFFERS {
            spare.push(bytes);
        }
    });
}

/// A buffer for one read.
fn lend() -> Box<[u8]> {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| vec![0; READ_BYTES].into_boxed_slice())
}

/// A socket as rustls writes to it.
struct Socket<'a, 'b> {
    tcp: &'a mut TcpStream,
    cx: &'a mut Context<'b>,
}

/// What rustls is told of a socket that takes nothing now.
fn now(polled: Poll<io::Result<usize>>) -> io::Result<usize> {
    match polled {
        Poll::Ready(written) => written,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

impl Write for Socket<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        now(Pin::new(&mut *self.tcp).poll_write(self.cx, bytes))
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        now(Pin::new(&mut *self.tcp).poll_write_vectored(self.cx, pieces))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
