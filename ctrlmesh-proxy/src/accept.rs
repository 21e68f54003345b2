//! Who connects, and which thread serves them?
//!
//! One task accepts on each listener and hands each connection to the thread that has the fewest: an operator opens
//! few connections and keeps them, so the kernel's own spreading over listeners would leave threads idle.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::socket;
use nix::sys::socket::sockopt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time;
use tracing::warn;

use crate::drain::Drain;
use crate::metrics::{ClientError, Metrics};

/// How long to wait when the process has no file descriptor or memory left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// After how much silence a peer is asked whether it is still there; exec sessions idle for hours are kept alive.
const KEEPALIVE_IDLE_SECONDS: u32 = 30;

/// How often it is asked again.
const KEEPALIVE_INTERVAL_SECONDS: u32 = 10;

/// How often it may be silent before the connection counts as dead.
const KEEPALIVE_PROBES: u32 = 3;

/// How long sent bytes may stay unacknowledged before the connection counts as dead.
const UNACKNOWLEDGED_MILLISECONDS: u32 = 60_000;

/// The pod that the kernel says a connection comes from: an index into the node's enrolled pods.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PodSlot(pub u16);

/// Whose connection it is, and where it wanted to go.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Origin {
    /// The pod, where the kernel told; a sidecar knows only its own.
    pub pod: Option<PodSlot>,
    /// The destination before the kernel redirected the connection.
    pub destination: Option<SocketAddr>,
}

/// A connection that nobody serves yet.
#[derive(Debug)]
pub struct Accepted {
    /// The connection, non-blocking.
    pub stream: TcpStream,
    /// Who connected.
    pub client: SocketAddr,
    /// Whose it is.
    pub origin: Origin,
    /// Gives the place in its thread's count back.
    pub place: Place,
}

/// The way to one serving thread.
#[derive(Clone, Debug)]
pub struct Thread {
    queue: mpsc::UnboundedSender<Accepted>,
    open: Arc<AtomicUsize>,
}

/// One connection's place in the count of its thread.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

/// Accepts connections and hands them out.
#[derive(Clone, Debug)]
pub struct Acceptor {
    /// All serving threads.
    pub threads: Vec<Thread>,
    /// How many connections may be open at once, over all threads.
    pub max_connections: usize,
    /// Where they are counted.
    pub metrics: Arc<Metrics>,
}

// === impl Thread ===

impl Thread {
    /// A new thread's way in, and what it takes its connections from.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Accepted>) {
        let (queue, connections) = mpsc::unbounded_channel();
        (Self { queue, open: Arc::default() }, connections)
    }
}

// === impl Place ===

impl Place {
    fn of(thread: &Thread) -> Self {
        thread.open.fetch_add(1, Ordering::Relaxed);
        Self(thread.open.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl Acceptor ===

impl Acceptor {
    /// Accepts until shutdown; `origin` says of a connection's own address and its client's whose it is, and nothing
    /// where it is unknown.
    pub async fn run(
        self,
        listener: TcpListener,
        origin: impl Fn(SocketAddr, SocketAddr) -> Option<Origin> + Send,
        drain: Drain,
    ) {
        loop {
            tokio::select! {
                biased;
                // Shutdown: new connections go elsewhere.
                () = drain.started() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, client)) => self.place(stream, client, &origin),
                    Err(error) if is_exhausted(&error) => {
                        warn!(error = &error as &dyn std::error::Error, "cannot accept");
                        time::sleep(EXHAUSTED_PAUSE).await;
                    }
                    // The client was gone before we looked.
                    Err(_) => {}
                },
            }
        }
    }

    fn place(
        &self,
        stream: tokio::net::TcpStream,
        client: SocketAddr,
        origin: &impl Fn(SocketAddr, SocketAddr) -> Option<Origin>,
    ) {
        self.metrics.accepted.inc();
        let open: usize =
            self.threads.iter().map(|thread| thread.open.load(Ordering::Relaxed)).sum();
        if open >= self.max_connections {
            self.metrics.client_error(ClientError::TooMany);
            return;
        }
        let Some(thread) =
            self.threads.iter().min_by_key(|thread| thread.open.load(Ordering::Relaxed))
        else {
            return;
        };
        let Some(origin) = stream.local_addr().ok().and_then(|own| origin(own, client)) else {
            self.metrics.client_error(ClientError::NoDestination);
            return;
        };
        let place = Place::of(thread);
        if prepare(&stream).is_err() {
            return;
        }
        let Ok(stream) = stream.into_std() else {
            return;
        };
        // A thread that is gone has drained: so have we.
        let _gone = thread.queue.send(Accepted { stream, client, origin, place });
    }
}

/// Small writes leave at once, and a peer that is gone is noticed.
///
/// # Errors
///
/// Fails when the socket is no longer connected.
pub fn prepare(stream: &tokio::net::TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = stream.as_fd();
    socket::setsockopt(&socket, sockopt::KeepAlive, &true)?;
    socket::setsockopt(&socket, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_SECONDS)?;
    socket::setsockopt(&socket, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_SECONDS)?;
    socket::setsockopt(&socket, sockopt::TcpKeepCount, &KEEPALIVE_PROBES)?;
    socket::setsockopt(&socket, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MILLISECONDS)?;
    Ok(())
}

fn is_exhausted(error: &io::Error) -> bool {
    use nix::errno::Errno;

    let exhausted = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|code| exhausted.contains(&Errno::from_raw(code)))
}
