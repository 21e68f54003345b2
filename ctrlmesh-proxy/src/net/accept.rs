//! Accepts connections and hands each to the serving thread that has the fewest.
//!
//! One task accepts on each listener. An operator opens few connections and keeps them, so the kernel's own spreading
//! over listeners (`SO_REUSEPORT`) would leave threads idle.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::names::port;
use ctrlmesh_runtime::sync::lock;
use nix::sys::socket;
use nix::sys::socket::sockopt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time;
use tracing::warn;

use crate::metrics::{ClientError, Metrics};
use crate::net::memory_budget::MemoryBudget;
use ctrlmesh_runtime::drain::Drain;

/// The wait after the process had no file descriptor or memory left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// The silence after which TCP probes a peer. Exec sessions that idle for hours stay open.
const KEEPALIVE_IDLE_SECONDS: u32 = 30;

const KEEPALIVE_INTERVAL_SECONDS: u32 = 10;

const KEEPALIVE_PROBES: u32 = 3;

/// A connection counts as dead when sent bytes stay unacknowledged for longer.
const UNACKNOWLEDGED_MILLISECONDS: u32 = 60_000;

/// Where pods find their forward proxy.
pub const FORWARD_ADDRESSES: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port::PROXY_FORWARD),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), port::PROXY_FORWARD),
];

/// The pod of a connection, as the kernel tells it: an index into the node's enrolled pods.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PodSlot(pub u16);

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Origin {
    /// `None` in a sidecar, which serves one pod only.
    pub pod: Option<PodSlot>,
    /// The destination before the kernel redirected the connection.
    pub destination: Option<SocketAddr>,
    pub purpose: Purpose,
}

/// What a connection is meant for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Purpose {
    #[default]
    ApiServer,
    /// The kernel redirected it for its port alone.
    OtherServer,
    /// It says itself where it goes.
    ForwardProxy,
    /// It comes from outside, for the webhook of the pod.
    Webhook,
}

/// A connection on its way to a serving thread.
#[derive(Debug)]
pub struct AcceptedConnection {
    /// Non-blocking.
    pub stream: TcpStream,
    pub client: SocketAddr,
    pub origin: Origin,
    pub guard: ConnectionGuard,
}

/// The queue of one serving thread, and its open connections.
#[derive(Clone, Debug)]
pub struct ServingThread {
    queue: mpsc::UnboundedSender<AcceptedConnection>,
    open: Arc<AtomicUsize>,
}

/// Keeps one connection in the counts of its thread and of its pod.
#[derive(Debug)]
pub struct ConnectionGuard {
    thread: Arc<AtomicUsize>,
    budget: Arc<MemoryBudget>,
    _pod: Option<PodConnectionGuard>,
}

/// Keeps each pod below its share of the process's connections and memory.
#[derive(Clone, Debug)]
pub struct PodLimits {
    max_connections: usize,
    /// Of all pods together.
    max_in_all: usize,
    budget: Arc<MemoryBudget>,
    pods: Arc<Mutex<HashMap<PodSlot, PodUsage>>>,
}

#[derive(Debug)]
struct PodUsage {
    connections: usize,
    budget: Arc<MemoryBudget>,
}

#[derive(Debug)]
struct PodConnectionGuard {
    limits: PodLimits,
    pod: PodSlot,
}

#[derive(Clone, Debug)]
pub struct Acceptor {
    pub threads: Vec<ServingThread>,
    /// Over all threads.
    pub max_connections: usize,
    pub per_pod: PodLimits,
    pub metrics: Arc<Metrics>,
}

impl ServingThread {
    /// A new thread's queue, and the end that it takes its connections from.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<AcceptedConnection>) {
        let (queue, connections) = mpsc::unbounded_channel();
        (Self { queue, open: Arc::default() }, connections)
    }
}

impl ConnectionGuard {
    fn new(thread: &ServingThread, budget: Arc<MemoryBudget>, pod: Option<PodConnectionGuard>) -> Self {
        thread.open.fetch_add(1, Ordering::Relaxed);
        Self { thread: thread.open.clone(), budget, _pod: pod }
    }

    /// The budget of the connection's pod, or of the process.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.thread.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PodLimits {
    /// `max_connections` are each pod's; `budget` is the process's.
    pub fn new(max_connections: usize, budget: Arc<MemoryBudget>) -> Self {
        Self { max_connections, max_in_all: usize::MAX, budget, pods: Arc::default() }
    }

    /// `None` where the pod has all the connections that it may have.
    fn admit(&self, slot: PodSlot) -> Option<(PodConnectionGuard, Arc<MemoryBudget>)> {
        let mut all = lock(&self.pods);
        if self.max_in_all < usize::MAX && all.values().map(|pod| pod.connections).sum::<usize>() >= self.max_in_all {
            return None;
        }
        let pod = all.entry(slot).or_insert_with(|| PodUsage { connections: 0, budget: self.budget.for_pod() });
        if pod.connections >= self.max_connections {
            return None;
        }
        pod.connections += 1;
        let budget = pod.budget.clone();
        drop(all);
        Some((PodConnectionGuard { limits: self.clone(), pod: slot }, budget))
    }
}

impl Drop for PodConnectionGuard {
    fn drop(&mut self) {
        let mut all = lock(&self.limits.pods);
        if let Entry::Occupied(mut pod) = all.entry(self.pod) {
            pod.get_mut().connections -= 1;
            // Bytes that still wait count for the pod's next connection.
            if pod.get().connections == 0 && pod.get().budget.is_empty() {
                pod.remove();
            }
        }
    }
}

impl Acceptor {
    /// The same for callers from outside, which anybody may be: with a number of their own for each pod, memory of
    /// their own, and no more than a quarter of the process's connections.
    #[must_use]
    pub fn for_callers(&self, max_connections_per_pod: usize) -> Self {
        let per_pod = PodLimits::new(max_connections_per_pod, self.per_pod.budget.for_callers());
        let per_pod = PodLimits { max_in_all: self.max_connections / 4, ..per_pod };
        Self { per_pod, ..self.clone() }
    }

    /// Accepts until shutdown. `origin` gets a connection, its local address and its client's; connections without an
    /// origin are closed.
    pub async fn run(
        self,
        listener: TcpListener,
        origin: impl Fn(&tokio::net::TcpStream, SocketAddr, SocketAddr) -> Option<Origin> + Send,
        drain: Drain,
    ) {
        loop {
            tokio::select! {
                biased;
                // Shutdown: new connections go elsewhere.
                () = drain.started() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, client)) => self.dispatch(stream, client, &origin),
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

    fn dispatch(
        &self,
        stream: tokio::net::TcpStream,
        client: SocketAddr,
        origin: &impl Fn(&tokio::net::TcpStream, SocketAddr, SocketAddr) -> Option<Origin>,
    ) {
        self.metrics.accepted.inc();
        let open: usize = self.threads.iter().map(|thread| thread.open.load(Ordering::Relaxed)).sum();
        if open >= self.max_connections {
            self.metrics.client_error(ClientError::TooMany);
            return;
        }
        let Some(thread) = self.threads.iter().min_by_key(|thread| thread.open.load(Ordering::Relaxed)) else {
            return;
        };
        let Some(origin) = stream.local_addr().ok().and_then(|own| origin(&stream, own, client)) else {
            self.metrics.client_error(ClientError::NoDestination);
            return;
        };
        let guard = match origin.pod.map(|pod| self.per_pod.admit(pod)) {
            None => ConnectionGuard::new(thread, self.per_pod.budget.clone(), None),
            Some(Some((pod, budget))) => ConnectionGuard::new(thread, budget, Some(pod)),
            Some(None) => return self.metrics.client_error(ClientError::TooMany),
        };
        if set_socket_options(&stream).is_err() {
            return;
        }
        let Ok(stream) = stream.into_std() else {
            return;
        };
        // A thread that is gone has drained, as this process has.
        let _gone = thread.queue.send(AcceptedConnection { stream, client, origin, guard });
    }
}

/// Sends small writes at once, and notices a peer that is gone.
pub fn set_socket_options(stream: &tokio::net::TcpStream) -> io::Result<()> {
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
    use crate::net::memory_budget::MemoryLimit;

    async fn listen(acceptor: &Acceptor, pod: Option<PodSlot>, drain: &Drain) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let origin = move |_: &_, _, _| Some(Origin { pod, ..Origin::default() });
        drain.spawn(acceptor.clone().run(listener, origin, drain.clone()));
        address
    }

    #[tokio::test]
    async fn a_pod_is_held_to_its_connections_and_memory() {
        let (thread, mut queue) = ServingThread::new();
        let (metrics, drain) = (Metrics::new(), Drain::default());
        let budget = MemoryBudget::for_process(MemoryLimit(64 << 20), &metrics);
        let per_pod = PodLimits::new(2, budget);
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
        assert!(page.contains("ctrlmesh_proxy_client_errors_total{reason=\"too_many\"} 1"), "{page}");
        // Those who call its webhook take no connection from it, nor its memory.
        let callers = acceptor.for_callers(1);
        let called = listen(&callers, Some(PodSlot(1)), &drain).await;
        let client = TcpStream::connect(called).await.unwrap();
        let call = queue.recv().await.unwrap();
        let taken = call.guard.budget().reserve(2 << 20);
        assert!(taken.is_some() && call.guard.budget().reserve(1).is_none());
        drop(client);
        // The connections of one pod share a budget; the other pod has its own.
        let reserve = |number: usize| held[number].1.guard.budget().reserve(8 << 20);
        let (first, other) = (reserve(0), reserve(2));
        assert!(first.is_some() && reserve(1).is_none() && other.is_some());
        drop((first, other, taken, call));
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
