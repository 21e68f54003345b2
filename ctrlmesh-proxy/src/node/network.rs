//! Listens in the network namespaces of pods.
//!
//! Each network namespace has one socket, which all its pods share. A connection names its pod by an address that any
//! process of the namespace can dial, so a socket takes only the pods of its own namespace.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use ctrlmesh_runtime::sync::{read, write};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::net::accept::{Acceptor, FORWARD_ADDRESSES, Origin, PodSlot, Purpose};
use ctrlmesh_intercept::listener::{self, Namespace};
use ctrlmesh_intercept::namespaces::{self, Namespaces};
use ctrlmesh_intercept::{Error, Originals, Slot};
use ctrlmesh_runtime::drain::Drain;

/// Identifies a network namespace, by the device and inode of its file.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct NetworkId {
    pub(super) device: u64,
    pub(super) inode: u64,
}

/// The sockets in the pods' network namespaces.
pub(super) struct Networks {
    pub(super) acceptor: Acceptor,
    pub(super) originals: Arc<Originals>,
    pub(super) port: u16,
    pub(super) drain: Drain,
    pub(super) open: HashMap<NetworkId, Network>,
    /// Listeners of the process before this one that no pod has joined yet.
    pub(super) inherited: HashMap<NetworkId, InheritedListener>,
}

/// One network namespace's socket; it closes when this is dropped.
pub(super) struct Network {
    listener: TcpListener,
    /// The same socket, until accepting begins.
    waiting: Option<tokio::net::TcpListener>,
    pods: Arc<RwLock<HashSet<Slot>>>,
    /// Pods whose connections the kernel sends here already, because of the process before this one. Accepting begins
    /// once all have joined: a connection of one that has not would be closed.
    expected: HashSet<Slot>,
    stop: CancellationToken,
}

/// A socket that goes from one process to the next.
pub(super) struct InheritedListener {
    pub(super) network: NetworkId,
    pub(super) port: u16,
    /// The pods whose connections the kernel sends there.
    pub(super) slots: Vec<Slot>,
    pub(super) listener: TcpListener,
}

impl NetworkId {
    /// Of `/proc/PID/ns/net`, or of a namespace that has a name.
    pub(super) fn of(file: &Path) -> Result<Self, Error> {
        listener::identity(file).map(|(device, inode)| Self { device, inode })
    }
}

/// The network namespaces of a pod's processes, the oldest process first. The node's is left out, in which a process is
/// that has just been started. The error tells why some may be missing.
pub(super) fn of_processes(cgroup: &Path) -> (Vec<(NetworkId, PathBuf)>, Option<Error>) {
    let nodes: Vec<NetworkId> = ["self", "1"].iter().filter_map(|one| NetworkId::of(&namespace(one)).ok()).collect();
    let Namespaces { found, unseen } = namespaces::of(cgroup);
    let found = found.into_iter().filter_map(|(_, file)| Some((NetworkId::of(&file).ok()?, file)));
    (found.filter(|(network, _)| !nodes.contains(network)).collect(), unseen)
}

fn namespace(process: &str) -> PathBuf {
    Path::new("/proc").join(process).join("ns/net")
}

impl Networks {
    /// Takes the connections of the pod in `slot`, which is in the network namespace `id` at `file`. Returns the socket
    /// that the caller has to register in the kernel; `None` where it is registered.
    pub(super) fn join(&mut self, id: NetworkId, file: &Path, slot: Slot) -> Result<Option<&TcpListener>, Error> {
        self.expect_only_in(id, slot);
        let network = match self.open.entry(id) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(vacant) => {
                let inherited = self.inherited.remove(&id).filter(|one| one.port == self.port);
                let (listener, expected) = match inherited {
                    Some(InheritedListener { listener, slots, .. }) => (listener, slots),
                    None => (listener::outbound(&Namespace::open(file)?, self.port)?, Vec::new()),
                };
                vacant.insert(Network::open(listener, expected)?)
            }
        };
        write(&network.pods).insert(slot);
        // Once: a later listener of this pod is not registered.
        let is_registered = network.expected.remove(&slot);
        if network.expected.is_empty() {
            network.accept(self.acceptor.clone(), &self.originals, &self.drain);
        }
        Ok((!is_registered).then_some(&network.listener))
    }

    /// A pod that joins a network namespace is expected in no other: its sandbox may have been made anew.
    fn expect_only_in(&mut self, id: NetworkId, slot: Slot) {
        for (_, other) in self.inherited.iter_mut().filter(|(other, _)| **other != id) {
            other.slots.retain(|expected| *expected != slot);
        }
        for (_, other) in self.open.iter_mut().filter(|(other, _)| **other != id) {
            other.expected.remove(&slot);
        }
    }

    /// The pods whose connections the process before this one took, as far as they have not joined. Their connections
    /// wait.
    pub(super) fn expected(&self) -> impl Iterator<Item = Slot> {
        let inherited = self.inherited.values().flat_map(|one| &one.slots);
        inherited.chain(self.open.values().flat_map(|network| &network.expected)).copied()
    }

    /// Waits for no pod any more: closes inherited listeners that none has joined, and accepts at the others.
    pub(super) fn settle(&mut self) {
        self.inherited.clear();
        self.open.retain(|_, network| !read(&network.pods).is_empty());
        for network in self.open.values_mut() {
            network.expected.clear();
            network.accept(self.acceptor.clone(), &self.originals, &self.drain);
        }
    }

    /// The listeners for the next process.
    pub(super) fn listeners(&self) -> io::Result<Vec<InheritedListener>> {
        let open = self.open.iter().map(|(id, network)| {
            let slots = read(&network.pods).iter().chain(&network.expected).copied().collect();
            (*id, self.port, slots, &network.listener)
        });
        let waiting = self.inherited.values().map(|one| (one.network, one.port, one.slots.clone(), &one.listener));
        let given = |(network, port, slots, listener): (NetworkId, u16, Vec<Slot>, &TcpListener)| {
            Ok(InheritedListener { network, port, slots, listener: listener.try_clone()? })
        };
        open.chain(waiting).map(given).collect()
    }

    /// Closes all listeners.
    pub(super) fn close(&mut self) {
        self.open.clear();
        self.inherited.clear();
    }

    /// Removes a pod; a socket without pods closes, unless it waits for some.
    pub(super) fn leave(&mut self, id: NetworkId, slot: Slot) {
        let Some(network) = self.open.get(&id) else { return };
        let mut pods = write(&network.pods);
        pods.remove(&slot);
        let last = pods.is_empty() && network.expected.is_empty();
        drop(pods);
        if last {
            self.open.remove(&id);
        }
    }
}

impl Network {
    fn open(listener: TcpListener, expected: Vec<Slot>) -> Result<Self, Error> {
        let failed =
            |source| Error::Listen { address: listener.local_addr().unwrap_or(SocketAddr::from(([0; 4], 0))), source };
        let waiting = listener.try_clone().and_then(tokio::net::TcpListener::from_std);
        let waiting = Some(waiting.map_err(failed)?);
        let (pods, expected, stop) = (Arc::default(), expected.into_iter().collect(), <_>::default());
        Ok(Self { listener, waiting, pods, expected, stop })
    }

    /// Accepts from now on, unless it does already.
    fn accept(&mut self, acceptor: Acceptor, originals: &Arc<Originals>, drain: &Drain) {
        let Some(listener) = self.waiting.take() else { return };
        let (originals, pods) = (originals.clone(), self.pods.clone());
        let origin = move |_: &_, own, client| origin(&originals, &pods, own, client);
        let (accepting, stopped) = (acceptor.run(listener, origin, drain.clone()), self.stop.clone());
        drain.spawn(async move {
            stopped.run_until_cancelled(accepting).await;
        });
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The origin of a connection, if it is of one of `pods`.
fn origin(originals: &Originals, pods: &RwLock<HashSet<Slot>>, own: SocketAddr, client: SocketAddr) -> Option<Origin> {
    let original = match originals.find(own, client) {
        Ok(original) => original?,
        Err(error) => {
            warn!(client.addr = %client, error = &error as &dyn std::error::Error, "original destination unknown");
            return None;
        }
    };
    let is_ours = read(pods).contains(&original.slot);
    is_ours.then(|| Origin {
        pod: Some(PodSlot(original.slot.get())),
        destination: Some(original.target),
        purpose: match original.target {
            _ if original.by_port => Purpose::OtherServer,
            target if FORWARD_ADDRESSES.contains(&target) => Purpose::ForwardProxy,
            _ => Purpose::ApiServer,
        },
    })
}
