//! Where do the redirected connections of a pod arrive?
//!
//! At one socket in each network namespace: pods that share the host's share its socket. A connection names its pod by
//! an address that any process of the namespace can dial, so a socket takes only the pods of its own namespace.

use std::collections::{HashMap, HashSet};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::accept::{Acceptor, Origin, PodSlot};
use crate::drain::Drain;
use crate::intercept::cgroup;
use crate::intercept::cgroup::Namespaces;
use crate::intercept::listener::{self, Namespace};
use crate::intercept::{Error, Originals, Slot};

/// A network namespace, whatever it is called.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct NetworkId {
    device: u64,
    inode: u64,
}

/// The sockets in the pods' network namespaces.
pub(super) struct Networks {
    pub(super) acceptor: Acceptor,
    pub(super) originals: Arc<Originals>,
    pub(super) port: u16,
    pub(super) drain: Drain,
    pub(super) open: HashMap<NetworkId, Network>,
}

/// One network namespace's socket; it closes when this is dropped.
pub(super) struct Network {
    listener: TcpListener,
    pods: Arc<RwLock<HashSet<Slot>>>,
    stop: CancellationToken,
}

// === impl NetworkId ===

impl NetworkId {
    /// Of `/proc/PID/ns/net`, or of a namespace that has a name.
    pub(super) fn of(file: &Path) -> Result<Self, Error> {
        listener::identity(file).map(|(device, inode)| Self { device, inode })
    }
}

/// The network namespaces of the processes of a pod, other than the node's: a process that is only being started is
/// still in that. And why there may be others.
pub(super) fn of_processes(cgroup: &Path) -> (Vec<(NetworkId, PathBuf)>, Option<Error>) {
    let nodes: Vec<NetworkId> =
        ["self", "1"].iter().filter_map(|one| NetworkId::of(&namespace(one)).ok()).collect();
    let Namespaces { found, unseen } = cgroup::namespaces(cgroup);
    let found = found.into_values().filter_map(|file| Some((NetworkId::of(&file).ok()?, file)));
    (found.filter(|(network, _)| !nodes.contains(network)).collect(), unseen)
}

fn namespace(process: &str) -> PathBuf {
    Path::new("/proc").join(process).join("ns/net")
}

// === impl Networks ===

impl Networks {
    /// The socket that takes the connections of the pod in `slot`, which is in the network namespace `id` at `file`.
    pub(super) fn join(
        &mut self,
        id: NetworkId,
        file: &Path,
        slot: Slot,
    ) -> Result<&TcpListener, Error> {
        if !self.open.contains_key(&id) {
            let network = self.listen(file)?;
            self.open.insert(id, network);
        }
        let network = &self.open[&id];
        network.pods.write().unwrap_or_else(PoisonError::into_inner).insert(slot);
        Ok(&network.listener)
    }

    /// Takes no more connections of a pod; a socket without pods closes.
    pub(super) fn leave(&mut self, id: NetworkId, slot: Slot) {
        let Some(network) = self.open.get(&id) else { return };
        let mut pods = network.pods.write().unwrap_or_else(PoisonError::into_inner);
        pods.remove(&slot);
        let last = pods.is_empty();
        drop(pods);
        if last {
            self.open.remove(&id);
        }
    }

    fn listen(&self, file: &Path) -> Result<Network, Error> {
        let listener = listener::outbound(&Namespace::open(file)?, self.port)?;
        let failed = |source| Error::Listen {
            address: listener.local_addr().unwrap_or(SocketAddr::from(([0; 4], self.port))),
            source,
        };
        let accepting = listener.try_clone().and_then(tokio::net::TcpListener::from_std);
        let accepting = accepting.map_err(failed)?;
        let (pods, stop) = (Arc::<RwLock<HashSet<Slot>>>::default(), CancellationToken::new());
        let (originals, here) = (self.originals.clone(), pods.clone());
        let origin = move |own, client| origin(&originals, &here, own, client);
        let accepting = self.acceptor.clone().run(accepting, origin, self.drain.clone());
        let stopped = stop.clone();
        self.drain.spawn(async move {
            stopped.run_until_cancelled(accepting).await;
        });
        Ok(Network { listener, pods, stop })
    }
}

// === impl Network ===

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
    let known = here.read().unwrap_or_else(PoisonError::into_inner).contains(&original.slot);
    known.then(|| Origin {
        pod: Some(PodSlot(original.slot.get())),
        destination: Some(original.target),
    })
}
