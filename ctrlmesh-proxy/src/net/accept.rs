//! Who connects, and which thread serves them?
//!
//! One task accepts on each listener and hands each connection to the thread that has the fewest: an operator opens
//! few connections and keeps them, so the kernel's own spreading over listeners would leave threads idle.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use nix::sys::socket;
use nix::sys::socket::sockopt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time;
use tracing::warn;

use crate::drain::Drain;
use crate::metrics::{ClientError, Metrics};
use crate::net::memory_budget::Backlog;

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

/// One connection's place in the counts of its thread and of its pod.
#[derive(Debug)]
pub struct Place {
    thread: Arc<AtomicUsize>,
    backlog: Arc<Backlog>,
    _pod: Option<PodPlace>,
}

/// What each pod has of the process, and may have: so much that no pod takes all that there is.
#[derive(Clone, Debug)]
pub struct PerPod {
    limit: usize,
    backlog: Arc<Backlog>,
    pods: Arc<Mutex<HashMap<PodSlot, Pod>>>,
}

/// What a pod has.
#[derive(Debug)]
struct Pod {
    open: usize,
    backlog: Arc<Backlog>,
}

/// One connection's place in the count of its pod.
#[derive(Debug)]
struct PodPlace {
    pods: PerPod,
    pod: PodSlot,
}

/// Accepts connections and hands them out.
#[derive(Clone, Debug)]
pub struct Acceptor {
    /// All serving threads.
    pub threads: Vec<Thread>,
    /// How many connections may be open at once, over all threads.
    pub max_connections: usize,
    /// How many of them may be of one pod, where the pod is known.
    pub per_pod: PerPod,
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
    fn of(thread: &Thread, backlog: Arc<Backlog>, pod: Option<PodPlace>) -> Self {
        thread.open.fetch_add(1, Ordering::Relaxed);
        Self { thread: thread.open.clone(), backlog, _pod: pod }
    }

    /// Where it counts what waits on the connection.
    pub fn backlog(&self) -> &Arc<Backlog> {
        &self.backlog
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.thread.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl PerPod ===

impl PerPod {
    /// At most so many connections each, and a part of what may wait in all.
    pub fn at_most(limit: usize, backlog: Arc<Backlog>) -> Self {
        Self { limit, backlog, pods: Arc::default() }
    }

    /// One place more, where there is one, and where it counts what waits.
    fn place(&self, slot: PodSlot) -> Option<(PodPlace, Arc<Backlog>)> {
        let mut all = lock(&self.pods);
        let pod =
            all.entry(slot).or_insert_with(|| Pod { open: 0, backlog: self.backlog.of_pod() });
        if pod.open >= self.limit {
            return None;
        }
        pod.open += 1;
        let backlog = pod.backlog.clone();
        drop(all);
        Some((PodPlace { pods: self.clone(), pod: slot }, backlog))
    }
}

impl Drop for PodPlace {
    fn drop(&mut self) {
        let mut all = lock(&self.pods.pods);
        if let Entry::Occupied(mut pod) = all.entry(self.pod) {
            pod.get_mut().open -= 1;
            // What still waits counts for the pod's next connection.
            if pod.get().open == 0 && pod.get().backlog.is_empty() {
                pod.remove();
            }
        }
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
        let place = match origin.pod.map(|pod| self.per_pod.place(pod)) {
            None => Place::of(thread, self.per_pod.backlog.clone(), None),
            Some(Some((pod, backlog))) => Place::of(thread, backlog, Some(pod)),
            Some(None) => return self.metrics.client_error(ClientError::TooMany),
        };
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpStream;

    use super::*;
    use crate::net::memory_budget::Memory;

    /// A listener of a pod, and where it listens.
    async fn listen(acceptor: &Acceptor, pod: Option<PodSlot>, drain: &Drain) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let origin = move |_, _| Some(Origin { pod, destination: None });
        drain.spawn(acceptor.clone().run(listener, origin, drain.clone()));
        address
    }

    #[tokio::test]
    async fn no_pod_takes_the_places_of_the_others() {
        let (thread, mut queue) = Thread::new();
        let (metrics, drain) = (Metrics::new(), Drain::default());
        let backlog = Backlog::of_process(Memory(64 << 20), &metrics);
        let per_pod = PerPod::at_most(2, backlog);
        let acceptor = Acceptor { threads: vec![thread], max_connections: 5, per_pod, metrics };
        let one = listen(&acceptor, Some(PodSlot(1)), &drain).await;
        let other = listen(&acceptor, Some(PodSlot(2)), &drain).await;
        let mut held = Vec::new();
        for address in [one, one, other] {
            let client = TcpStream::connect(address).await.unwrap();
            held.push((client, queue.recv().await.unwrap()));
        }
        let mut refused = TcpStream::connect(one).await.unwrap();
        assert_eq!(refused.read(&mut [0]).await.unwrap_or_default(), 0);
        let page = acceptor.metrics.render().unwrap();
        assert!(
            page.contains("ctrlmesh_proxy_client_errors_total{reason=\"too_many\"} 1"),
            "{page}"
        );
        // What waits for one waits for both of its connections, and most of what there is stays for the others.
        let waits = |number: usize| held[number].1.place.backlog().wait(8 << 20);
        let (theirs, other) = (waits(0), waits(2));
        assert!(theirs.is_some() && waits(1).is_none() && other.is_some());
        drop((theirs, other));
        // One leaves, another may come.
        drop(held.remove(0));
        let _client = TcpStream::connect(one).await.unwrap();
        let accepted = queue.recv().await.unwrap();
        assert_eq!(accepted.origin.pod, Some(PodSlot(1)));
        drop((accepted, held));
        assert!(acceptor.per_pod.pods.lock().unwrap().is_empty());
        drain.finish(Duration::from_secs(30)).await;
    }
}
