//! Relays redirected connections to their original destination, to show redirection at work.
//!
//! With webhook addresses, it relays webhook calls to the pod's own server, too.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::listen::ipv4_fallback;
use tokio::net::{TcpListener as AsyncListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::{signal, time};

use crate::Error;
use crate::INBOUND_SOURCE;
use crate::INBOUND_SOURCE_V6;
use crate::command::heartbeat::{LastError, RelayAddress, RelayHeartbeat};
use crate::host::cgroup::{Cgroup, Hierarchy};
use crate::host::namespaces;
use crate::interceptor::Interceptor;
use crate::interceptor::attach::Options;
use crate::network::listener;
use crate::network::listener::Namespace;
use crate::pins::Pins;
use crate::pins::record::State;
use crate::programs::event::Events;
use crate::programs::original::Originals;

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 256;

/// How often the relay sends heartbeats, looks for new attachments and reads events.
const TICK: Duration = Duration::from_millis(250);

/// How long the relay waits when the system has no room for another connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// How long a target may take to answer a SYN.
const CONNECT: Duration = Duration::from_secs(10);

/// How the relay listens and what it reads.
#[derive(Clone, Debug)]
pub(crate) struct Relay {
    pub(crate) options: Options,
    pub(crate) port: u16,
    /// Cgroup of the pod whose webhook calls it takes, too.
    pub(crate) pod: Option<PathBuf>,
    /// Addresses of those.
    pub(crate) webhooks: Vec<SocketAddr>,
}

/// What a listener takes.
#[derive(Clone)]
enum ListenerUse {
    /// Connections to targets, which these tables explain.
    Outbound(PathBuf),
    /// Webhook calls to these addresses.
    Inbound(Vec<SocketAddr>),
}

impl Relay {
    /// Relays until the process is told to stop.
    pub(crate) async fn run(self) -> Result<(), Error> {
        if let Err(error) = Interceptor::adopt(&self.options) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "programs of another version are not replaced");
        }
        let own = Namespace::own()?;
        // Before anybody can be sent there.
        let prefix = listener::make_prefix_local(&own);
        if let Err(error) = &prefix {
            let error = error as &dyn std::error::Error;
            tracing::info!(error, "no IPv6 of our own, native IPv6 goes over IPv4");
        }
        let address = RelayAddress { port: self.port, namespace: own.inode()?, ipv6: prefix.is_ok() };
        let mut heartbeat = RelayHeartbeat::at(address, &self.options.owner);
        let pins = self.options.pins.clone();
        let relayed = self.relay(&own, &mut heartbeat).await;
        // The prefix stays local: other proxies of this namespace may count on it.
        relayed.and(heartbeat.end(&pins))
    }

    async fn relay(self, own: &Namespace, heartbeat: &mut RelayHeartbeat) -> Result<(), Error> {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port));
        let failed = |source| Error::Listen { address, source };
        let pins = &self.options.pins;
        let listener = listen(address).and_then(AsyncListener::from_std).map_err(failed)?;
        let mut listeners = vec![(listener, ListenerUse::Outbound(pins.clone()))];
        listeners.extend(self.take_webhooks(own)?);
        tracing::info!(port = self.port, "relay listens");
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let mut accepting = JoinSet::new();
        for (listener, taken) in listeners {
            accepting.spawn(accept(listener, room.clone(), taken));
        }
        tokio::select! {
            // Ends only on an error that will not pass.
            Some(ended) = accepting.join_next() => {
                ended.unwrap_or_else(|panicked| Err(io::Error::other(panicked))).map_err(failed)
            }
            // Ends if going on would mean talking to itself.
            result = tick(pins, heartbeat) => result,
            // CompiledPolicy to stop.
            () = stopped() => Ok(()),
        }
    }

    /// Takes the webhook calls that it was told of, by a socket for each family.
    fn take_webhooks(&self, own: &Namespace) -> Result<Vec<(AsyncListener, ListenerUse)>, Error> {
        let Some(pod) = &self.pod else { return Ok(Vec::new()) };
        let mut interceptor = Interceptor::open(self.options.clone())?;
        let slot = interceptor.attached(pod)?;
        among(own, &Hierarchy::find()?.cgroup(pod)?)?;
        let mut listeners = Vec::new();
        for ipv6 in [false, true] {
            let addresses = self.webhooks.iter().copied();
            let addresses: Vec<_> = addresses.filter(|address| address.is_ipv6() == ipv6).collect();
            let Some(first) = addresses.first().copied() else { continue };
            let listener = listener::inbound(own, first.ip())?;
            for address in &addresses {
                interceptor.take_inbound(slot, own, *address, &listener)?;
                tracing::info!(local.addr = %address, "takes webhook calls");
            }
            let failed = |source| Error::Listen { address: first, source };
            let listener = AsyncListener::from_std(listener).map_err(failed)?;
            listeners.push((listener, ListenerUse::Inbound(addresses)));
        }
        // Those that a relay before us took, and that nobody takes any more.
        interceptor.keep_inbound(slot, &self.webhooks)?;
        Ok(listeners)
    }
}

/// Fails if a network namespace is none of those that the processes of a pod are in. One without processes may get some
/// that are.
fn among(own: &Namespace, pod: &Cgroup) -> Result<(), Error> {
    let inode = own.inode()?;
    let namespaces = namespaces::of(&pod.path);
    if namespaces.has(inode) || namespaces.found.is_empty() && namespaces.unseen.is_none() {
        return Ok(());
    }
    Err(namespaces.unseen.unwrap_or_else(|| Error::NoSuchNamespace { inode, cgroup: pod.path.clone() }))
}

/// Fails if this process is itself intercepted: it would be its own client.
fn outside(pins: &Path) -> Result<(), Error> {
    let pins = Pins::at(pins);
    if !pins.exist()? {
        return Ok(());
    }
    let mut below = Vec::new();
    for cgroup in Hierarchy::find()?.around()? {
        below.push(cgroup.id);
        if let Some(record) = pins.find(&cgroup)?
            && record.state != State::Claimed
            && !record.except.iter().any(|passing| below.contains(&passing.id))
        {
            return Err(Error::Inside(cgroup.path));
        }
    }
    Ok(())
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    // Where there is no IPv6, redirected connections come over IPv4 anyway.
    let listener = TcpListener::bind(address).or_else(|error| {
        let v4 = ipv4_fallback(address, &error).ok_or(error)?;
        TcpListener::bind(v4)
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn accept(listener: AsyncListener, room: Arc<Semaphore>, taken: ListenerUse) -> io::Result<()> {
    let mut connections = JoinSet::new();
    let mut originals = None;
    let mut refused = 0_u64;
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = room.clone().acquire_owned().await else {
            return Ok(());
        };
        let (client, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) if transient(&error) => continue,
            // Connections wait where they are until others have ended.
            Err(error) if no_room(&error) => {
                refused += 1;
                tracing::warn!(refused, error = &error as &dyn std::error::Error, "no room for another connection");
                time::sleep(NO_ROOM).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        match &taken {
            ListenerUse::Outbound(pins) => {
                // The tables exist once something is attached, which may be after the relay has started.
                originals = originals.or_else(|| Originals::open(pins).map(Arc::new).ok());
                let originals = originals.clone();
                connections.spawn(async move {
                    let _permit = permit;
                    outbound(client, peer, originals.as_deref()).await;
                });
            }
            ListenerUse::Inbound(addresses) => {
                let local = client.local_addr().ok().filter(|local| addresses.contains(local));
                connections.spawn(async move {
                    let _permit = permit;
                    inbound(client, peer, local).await;
                });
            }
        }
    }
}

/// Errors of one connection rather than of the listener.
fn transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

/// Errors of a system that has too much of something.
fn no_room(error: &io::Error) -> bool {
    use nix::libc::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    [EMFILE, ENFILE, ENOBUFS, ENOMEM].map(Some).contains(&error.raw_os_error())
}

async fn outbound(client: TcpStream, peer: SocketAddr, originals: Option<&Originals>) {
    let Ok(local) = client.local_addr() else {
        return;
    };
    let original = match originals.map(|originals| originals.find(local, peer)).transpose() {
        Ok(original) => original.flatten(),
        Err(error) => {
            return tracing::warn!(client.addr = %peer, error = &error as &dyn std::error::Error, "original destination unknown");
        }
    };
    // Whoever dials the port itself, from inside or outside, gets nothing.
    let Some(original) = original.filter(|_| inside(peer.ip())) else {
        return tracing::debug!(client.addr = %peer, local.addr = %local, "not a redirected connection");
    };
    let target = original.target;
    let Some(server) = dial(peer, target, TcpStream::connect(target)).await else { return };
    tracing::info!(client.addr = %peer, slot = %original.slot, upstream.addr = %target, "relaying");
    copy(client, peer, server, target).await;
}

/// Relays a webhook call to the server that listens at the address for which it was meant.
async fn inbound(client: TcpStream, peer: SocketAddr, local: Option<SocketAddr>) {
    // Whoever dials the socket's own port is none.
    let Some(target) = local else {
        return tracing::debug!(client.addr = %peer, "not a webhook call");
    };
    let from_loopback = async {
        let (socket, source) = match target.ip() {
            IpAddr::V4(_) => (TcpSocket::new_v4()?, IpAddr::from(INBOUND_SOURCE)),
            IpAddr::V6(_) => (TcpSocket::new_v6()?, IpAddr::from(INBOUND_SOURCE_V6)),
        };
        socket.bind((source, 0).into())?;
        socket.connect(target).await
    };
    let Some(server) = dial(peer, target, from_loopback).await else { return };
    tracing::info!(client.addr = %peer, upstream.addr = %target, "relaying a webhook call");
    copy(client, peer, server, target).await;
}

async fn dial(
    peer: SocketAddr,
    target: SocketAddr,
    connect: impl Future<Output = io::Result<TcpStream>>,
) -> Option<TcpStream> {
    match time::timeout(CONNECT, connect).await {
        Ok(Ok(server)) => return Some(server),
        Ok(Err(error)) => {
            tracing::info!(client.addr = %peer, upstream.addr = %target, error = &error as &dyn std::error::Error, "target refused");
        }
        Err(_) => {
            tracing::info!(client.addr = %peer, upstream.addr = %target, "target did not answer");
        }
    }
    None
}

async fn copy(mut client: TcpStream, peer: SocketAddr, mut server: TcpStream, target: SocketAddr) {
    if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut server).await {
        tracing::debug!(client.addr = %peer, upstream.addr = %target, error = &error as &dyn std::error::Error, "connection broke");
    }
}

/// Whether this is one of our own addresses. From outside nobody can send to 127/8, but to our IPv6 prefix; then the
/// sender's address is not ours, or it never gets an answer.
fn inside(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// Sends a heartbeat for every attachment that leads here, says whether native IPv6 does, and shows events to whoever
/// debugs. Ends when this process gets intercepted itself.
async fn tick(pins: &Path, heartbeat: &mut RelayHeartbeat) -> Result<(), Error> {
    let mut ticks = time::interval(TICK);
    let mut events = None;
    let (mut unknown, mut silent) = (LastError::default(), LastError::default());
    loop {
        ticks.tick().await;
        let outside = outside(pins);
        if let Err(Error::Inside(_)) = outside {
            return outside;
        }
        if let Some(error) = unknown.if_changed(outside) {
            tracing::warn!(error, "attachments unknown");
        }
        if let Some(error) = silent.if_changed(heartbeat.beat(pins)) {
            tracing::warn!(error, "heartbeat failed");
        }
        if tracing::enabled!(tracing::Level::DEBUG) {
            events = events.or_else(|| Events::open(pins).ok());
            for event in events.iter_mut().flatten() {
                tracing::debug!(outcome = event.outcome, slot = %event.slot, pid = event.pid, upstream.addr = %event.target, "kernel event");
            }
        }
    }
}

/// Waits until this process is told to stop.
pub(crate) async fn stopped() {
    let terminated = async {
        match signal::unix::signal(signal::unix::SignalKind::terminate()) {
            Ok(mut signals) => drop(signals.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        // Ctrl-C in a terminal.
        _ = signal::ctrl_c() => {}
        // An orderly stop by whoever started us.
        () = terminated => {}
    }
}
