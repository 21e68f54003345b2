//! The smallest proxy there is: bytes both ways to the original destination, so that anyone can see redirection work.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::kernel::{NATIVE_IPV6, Pod};
use tokio::net::{TcpListener as AsyncListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::{signal, time};

use super::cgroup::Hierarchy;
use super::event::Events;
use super::listener::Namespace;
use super::original::Originals;
use super::pin::{Pins, Slot};
use super::record::{Record, State};
use super::status::{Attachment, Status};
use super::{Error, cgroup, listener, map, status};

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 256;

/// How often the relay beats, looks for new attachments and reads events.
const TICK: Duration = Duration::from_millis(250);

/// How long the relay waits when the system has no room for another connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// How long a target may take to answer a SYN.
const CONNECT: Duration = Duration::from_secs(10);

/// How the relay listens and what it reads.
#[derive(Clone, Debug)]
pub(super) struct Relay {
    pub(super) pins: PathBuf,
    pub(super) port: u16,
}

/// Where a relay takes connections.
struct Place {
    port: u16,
    /// Inode of the network namespace.
    namespace: u64,
    /// Whether our prefix is local.
    ipv6: bool,
}

// === impl Relay ===

impl Relay {
    /// Relays until the process is told to stop.
    pub(super) async fn run(self) -> Result<(), Error> {
        let own = Namespace::own()?;
        // Before anybody can be sent there.
        let prefix = listener::make_prefix_local(&own);
        if let Err(error) = &prefix {
            let error = error as &dyn std::error::Error;
            tracing::info!(error, "no IPv6 of our own, native IPv6 goes over IPv4");
        }
        let place = Place { port: self.port, namespace: own.inode()?, ipv6: prefix.is_ok() };
        let relayed = self.relay(&place).await;
        if let Ok(true) = prefix {
            listener::make_prefix_foreign(&own)?;
        }
        relayed
    }

    async fn relay(self, place: &Place) -> Result<(), Error> {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port));
        let failed = |source| Error::Listen { address, source };
        let listener = listen(address).and_then(AsyncListener::from_std).map_err(failed)?;
        tracing::info!(port = self.port, "relay listens");
        tokio::select! {
            // Ends only on an error that will not pass.
            result = accept(&listener, &self.pins) => result.map_err(failed),
            // Ends if going on would mean talking to itself.
            result = tick(&self.pins, place) => result,
            // Told to stop.
            () = stopped() => Ok(()),
        }
    }
}

/// Fails if this process is itself intercepted: it would be its own client.
fn outside(pins: &Path) -> Result<(), Error> {
    let own = Hierarchy::find()?.own()?;
    let nearest = |attachment: &Attachment| {
        let depth = |path: &PathBuf| own.starts_with(path).then(|| path.components().count());
        (depth(&attachment.cgroup), attachment.except.iter().filter_map(depth).max())
    };
    for attachment in Status::read(pins)?.attachments {
        let (caught, passed) = nearest(&attachment);
        if caught > passed {
            return Err(Error::Inside(attachment.cgroup));
        }
    }
    Ok(())
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address).or_else(|error| {
        // No IPv6 here: redirected connections come over IPv4 anyway.
        let v4 = SocketAddr::from(([0, 0, 0, 0], address.port()));
        if error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) {
            TcpListener::bind(v4)
        } else {
            Err(error)
        }
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn accept(listener: &AsyncListener, pins: &Path) -> io::Result<()> {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
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
                tracing::warn!(
                    refused,
                    error = &error as &dyn std::error::Error,
                    "no room for another connection"
                );
                time::sleep(NO_ROOM).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        // The tables exist once something is attached, which may be after the relay has started.
        originals = originals.or_else(|| Originals::open(pins).map(Arc::new).ok());
        let originals = originals.clone();
        connections.spawn(async move {
            let _permit = permit;
            relay(client, peer, originals.as_deref()).await;
        });
    }
}

/// Errors of one connection rather than of the listener.
fn transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

/// Errors of a system that has too much of something.
fn no_room(error: &io::Error) -> bool {
    use nix::libc::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    [EMFILE, ENFILE, ENOBUFS, ENOMEM].map(Some).contains(&error.raw_os_error())
}

async fn relay(mut client: TcpStream, peer: SocketAddr, originals: Option<&Originals>) {
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
    let mut server = match time::timeout(CONNECT, TcpStream::connect(target)).await {
        Ok(Ok(server)) => server,
        Ok(Err(error)) => {
            return tracing::info!(client.addr = %peer, upstream.addr = %target, error = &error as &dyn std::error::Error, "target refused");
        }
        Err(_) => {
            return tracing::info!(client.addr = %peer, upstream.addr = %target, "target did not answer");
        }
    };
    tracing::info!(client.addr = %peer, slot = %original.slot, upstream.addr = %target, "relaying");
    if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut server).await {
        tracing::debug!(client.addr = %peer, upstream.addr = %target, error = &error as &dyn std::error::Error, "connection broke");
    }
}

/// Whether this is one of our own addresses. From outside nobody can send to 127/8, but to our IPv6 prefix; then the
/// sender's address is not ours, or it never gets an answer.
fn inside(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// Beats for every attachment that leads here, says whether native IPv6 does, and shows events to whoever debugs. Ends when this process gets
/// intercepted itself.
async fn tick(pins: &Path, place: &Place) -> Result<(), Error> {
    let mut ticks = time::interval(TICK);
    let mut events = None;
    let mut unseen = BTreeSet::new();
    loop {
        ticks.tick().await;
        match outside(pins) {
            Err(error @ Error::Inside(_)) => return Err(error),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "attachments unknown");
            }
            Ok(()) => {}
        }
        if let Err(error) = beat(pins, place, &mut unseen) {
            tracing::warn!(error = &error as &dyn std::error::Error, "heartbeat failed");
        }
        if tracing::enabled!(tracing::Level::DEBUG) {
            events = events.or_else(|| Events::open(pins).ok());
            for event in events.iter_mut().flatten() {
                tracing::debug!(outcome = event.outcome, slot = %event.slot, pid = event.pid, upstream.addr = %event.target, "kernel event");
            }
        }
    }
}

/// Beats for the pods that lead here. One whose processes are all in other network namespaces has another proxy at the
/// same port; one without processes may get some that are here. Where processes cannot be looked at we do not know, and
/// do not say that we live: that is said once of each pod that is `unseen`.
fn beat(root: &Path, place: &Place, unseen: &mut BTreeSet<Slot>) -> Result<(), Error> {
    let pins = Pins::at(root);
    if !pins.exist()? {
        return Ok(());
    }
    let mut maps = map::Maps::open(&pins)?;
    let attached = |record: &Record| record.state == State::Attached;
    for Record { slot, cgroup, .. } in pins.records()?.into_iter().filter(attached) {
        let pod = maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
        if pod.port != place.port.to_be() {
            continue;
        }
        let namespaces = cgroup::namespaces(&cgroup.path);
        let here = namespaces.found.contains_key(&place.namespace);
        let only = here && namespaces.found.len() == 1 && namespaces.unseen.is_none();
        if let Some(error) = namespaces.unseen.filter(|_| !here) {
            if unseen.insert(slot) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(%slot, error, "no beat for a pod whose network namespace is unknown");
            }
            continue;
        }
        unseen.remove(&slot);
        if !here && !namespaces.found.is_empty() {
            continue;
        }
        maps.heartbeats.set(pod.heartbeat, status::now(), 0).map_err(Error::map("HEARTBEATS"))?;
        let native = pod.flags & NATIVE_IPV6 != 0;
        if only && native != place.ipv6 {
            say_native(&pins, &mut maps, slot, place.ipv6)?;
        }
    }
    Ok(())
}

/// Says whether native IPv6 reaches us. With the lock, because loaders write the same entry.
fn say_native(pins: &Pins, maps: &mut map::Maps, slot: Slot, native: bool) -> Result<(), Error> {
    let _lock = pins.lock()?;
    let pod = maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
    let flag = if native { NATIVE_IPV6 } else { 0 };
    let pod = Pod { flags: pod.flags & !NATIVE_IPV6 | flag, ..pod };
    maps.pods.set(slot.index(), pod, 0).map_err(Error::map("PODS"))
}

async fn stopped() {
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
