//! The smallest proxy there is: bytes both ways to the original destination, so that anyone can see redirection work.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener as AsyncListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::{signal, time};

use super::cgroup::Hierarchy;
use super::event::Events;
use super::original::Originals;
use super::pin::Pins;
use super::status::{Attachment, Status};
use super::{Error, map, status};

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 256;

/// How often the relay beats, looks for new attachments and reads events.
const TICK: Duration = Duration::from_millis(250);

/// How long a target may take to answer a SYN.
const CONNECT: Duration = Duration::from_secs(10);

/// How the relay listens and what it reads.
#[derive(Clone, Debug)]
pub(super) struct Relay {
    pub(super) pins: PathBuf,
    pub(super) port: u16,
}

// === impl Relay ===

impl Relay {
    /// Relays until the process is told to stop.
    pub(super) async fn run(self) -> Result<(), Error> {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port));
        let failed = |source| Error::Listen { address, source };
        let listener = listen(address).and_then(AsyncListener::from_std).map_err(failed)?;
        tracing::info!(port = self.port, "relay listens");
        tokio::select! {
            // Ends only on an error that will not pass.
            result = accept(&listener, &self.pins) => result.map_err(failed),
            // Ends if going on would mean talking to itself.
            result = tick(&self.pins, self.port) => result,
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
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = room.clone().acquire_owned().await else {
            return Ok(());
        };
        let (client, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) if transient(&error) => continue,
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
    let Some(original) = original.filter(|_| loopback(local.ip())) else {
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

fn loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Beats for every attachment that leads here, and shows events to whoever debugs. Ends when this process gets
/// intercepted itself.
async fn tick(pins: &Path, port: u16) -> Result<(), Error> {
    let mut ticks = time::interval(TICK);
    let mut events = None;
    loop {
        ticks.tick().await;
        match outside(pins) {
            Err(error @ Error::Inside(_)) => return Err(error),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "attachments unknown");
            }
            Ok(()) => {}
        }
        if let Err(error) = beat(pins, port) {
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

fn beat(root: &Path, port: u16) -> Result<(), Error> {
    let pins = Pins::at(root);
    if !pins.exist()? {
        return Ok(());
    }
    let mut maps = map::Maps::open(&pins)?;
    for record in pins.records()? {
        let pod = maps.pods.get(&record.slot.index(), 0).map_err(Error::map("PODS"))?;
        if pod.port == port.to_be() {
            maps.heartbeats
                .set(pod.heartbeat, status::now(), 0)
                .map_err(Error::map("HEARTBEATS"))?;
        }
    }
    Ok(())
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
