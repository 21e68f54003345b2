//! Listens in the network namespaces of pods.
//!
//! At one socket in each network namespace: pods that share the host's share its socket. A connection names its pod by
//! an address that any process of the namespace can dial, so a socket takes only the pods of its own namespace.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use ctrlmesh_runtime::sync::{read, write};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::net::accept::{Acceptor, Origin, PodSlot};
use ctrlmesh_intercept::cgroup;
use ctrlmesh_intercept::cgroup::Namespaces;
use ctrlmesh_intercept::listener::{self, Namespace};
use ctrlmesh_intercept::{Error, Originals, Slot};
use ctrlmesh_runtime::drain::Drain;

/// A network namespace, whatever it is called.
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
    /// What the process before this one listened with, and nobody has asked for yet.
    pub(super) inherited: HashMap<NetworkId, InheritedListener>,
}

/// One network namespace's socket; it closes when this is dropped.
pub(super) struct Network {
    listener: TcpListener,
    /// The same socket, as long as nobody accepts there.
    waiting: Option<tokio::net::TcpListener>,
    pods: Arc<RwLock<HashSet<Slot>>>,
    /// Those whose connections the kernel sends here already, for the process before this one told it to. Until they
    /// have all joined nobody accepts: a connection of one that has not would be nobody's.
    known: HashSet<Slot>,
    stop: CancellationToken,
}

/// A socket that goes from one process to the next.
pub(super) struct InheritedListener {
    pub(super) network: NetworkId,
    pub(super) port: u16,
    /// Pods whose connections the kernel sends there.
    pub(super) slots: Vec<Slot>,
    pub(super) listener: TcpListener,
}

impl NetworkId {
    /// Of `/proc/PID/ns/net`, or of a namespace that has a name.
    pub(super) fn of(file: &Path) -> Result<Self, Error> {
        listener::identity(file).map(|(device, inode)| Self { device, inode })
    }
}

/// The network namespaces of the processes of a pod, that of the oldest first, other than the node's: a process that is
/// only being started is still in that. And why there may be others.
pub(super) fn of_processes(cgroup: &Path) -> (Vec<(NetworkId, PathBuf)>, Option<Error>) {
    let nodes: Vec<NetworkId> =
        ["self", "1"].iter().filter_map(|one| NetworkId::of(&namespace(one)).ok()).collect();
    let Namespaces { found, unseen } = cgroup::namespaces(cgroup);
    let found = found.into_iter().filter_map(|(_, file)| Some((NetworkId::of(&file).ok()?, file)));
    (found.filter(|(network, _)| !nodes.contains(network)).collect(), unseen)
}

fn namespace(process: &str) -> PathBuf {
    Path::new("/proc").join(process).join("ns/net")
}

impl Networks {
    /// Takes the connections of the pod in `slot`, which is in the network namespace `id` at `file`; gives the socket
    /// of which the kernel is to be told, where it does not know of it.
    pub(super) fn join(
        &mut self,
        id: NetworkId,
        file: &Path,
        slot: Slot,
    ) -> Result<Option<&TcpListener>, Error> {
        let network = match self.open.entry(id) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(vacant) => {
                let inherited = self.inherited.remove(&id).filter(|one| one.port == self.port);
                let (listener, known) = match inherited {
                    Some(InheritedListener { listener, slots, .. }) => (listener, slots),
                    None => (listener::outbound(&Namespace::open(file)?, self.port)?, Vec::new()),
                };
                vacant.insert(Network::open(listener, known)?)
            }
        };
        write(&network.pods).insert(slot);
        // Once: it may be told of another one later.
        let known = network.known.remove(&slot);
        if network.known.is_empty() {
            network.accept(self.acceptor.clone(), &self.originals, &self.drain);
        }
        Ok((!known).then_some(&network.listener))
    }

    /// Closes what was inherited and nobody needs, and waits for none of the pods any more that have not joined.
    pub(super) fn settle(&mut self) {
        self.inherited.clear();
        for network in self.open.values_mut() {
            network.accept(self.acceptor.clone(), &self.originals, &self.drain);
        }
    }

    /// What the next process is to listen with.
    pub(super) fn listeners(&self) -> io::Result<Vec<InheritedListener>> {
        let inherited = |(id, network): (&NetworkId, &Network)| {
            let pods = read(&network.pods).clone();
            let (slots, listener) = (pods.into_iter().collect(), network.listener.try_clone()?);
            Ok(InheritedListener { network: *id, port: self.port, slots, listener })
        };
        self.open.iter().map(inherited).collect()
    }

    /// Takes no more connections of a pod; a socket without pods closes.
    pub(super) fn leave(&mut self, id: NetworkId, slot: Slot) {
        let Some(network) = self.open.get(&id) else { return };
        let mut pods = write(&network.pods);
        pods.remove(&slot);
        let last = pods.is_empty();
        drop(pods);
        if last {
            self.open.remove(&id);
        }
    }
}

impl Network {
    fn open(listener: TcpListener, known: Vec<Slot>) -> Result<Self, Error> {
        let failed = |source| Error::Listen {
            address: listener.local_addr().unwrap_or(SocketAddr::from(([0; 4], 0))),
            source,
        };
        let waiting = listener.try_clone().and_then(tokio::net::TcpListener::from_std);
        let waiting = Some(waiting.map_err(failed)?);
        let (pods, known, stop) = (Arc::default(), known.into_iter().collect(), <_>::default());
        Ok(Self { listener, waiting, pods, known, stop })
    }

    /// Accepts from now on, unless it does already.
    fn accept(&mut self, acceptor: Acceptor, originals: &Arc<Originals>, drain: &Drain) {
        let Some(listener) = self.waiting.take() else { return };
        let (originals, here) = (originals.clone(), self.pods.clone());
        let origin = move |own, client| origin(&originals, &here, own, client);
        let (accepting, stopped) =
            (acceptor.run(listener, origin, drain.clone()), self.stop.clone());
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

/// Whose connection it is, if it is one of a pod that is `here`.
fn origin(
    originals: &Originals,
    here: &RwLock<HashSet<Slot>>,
    own: SocketAddr,
    client: SocketAddr,
) -> Option<Origin> {
    let original = match originals.find(own, client) {
        Ok(original) => original?,
        Err(error) => {
            warn!(client.addr = %client, error = &error as &dyn std::error::Error, "original destination unknown");
            return None;
        }
    };
    let known = read(here).contains(&original.slot);
    known.then(|| Origin {
        pod: Some(PodSlot(original.slot.get())),
        destination: Some(original.target),
    })
}
