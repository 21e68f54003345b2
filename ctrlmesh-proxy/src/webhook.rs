//! The admission webhook of one pod: its certificate, its own server, and who else may be asked.

mod certificate;
mod cached_table;
mod report;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_intercept::{INBOUND_SOURCE, INBOUND_SOURCE_V6};
use ctrlmesh_runtime::sync::lock;
use rustls::ServerConfig;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time;
use tokio::time::Instant;

use self::cached_table::{CachedTable, gives_the_same};
use self::certificate::Certificate;
use crate::egress::PodFiles;
use crate::net::accept;
use crate::net::pod_socket::pod_socket;
use crate::policy::{Current, History};

pub(crate) use self::certificate::PEER_NAME;
pub(crate) use self::report::PortState;

/// A move that takes longer may take much longer: reviews of the same table do not wait for it any more.
const LONG_MOVE: Duration = Duration::from_secs(2);

/// The webhook of one pod. Its connections share it.
#[derive(Debug)]
pub struct PodWebhook {
    /// `NAMESPACE/NAME`.
    pod: String,
    policy: Current,
    /// The network namespace of the pod. `None`: this process's own.
    namespace: Option<Arc<Namespace>>,
    files: PodFiles,
    certificate: Certificate,
    cached_table: CachedTable,
    /// Under this one, a review has waited in vain for the owner of what moves.
    long_move: Mutex<Option<Arc<Policy>>>,
    port: watch::Sender<PortState>,
}

impl PodWebhook {
    pub fn new(pod: String, policy: Current, namespace: Option<Namespace>, files: PodFiles) -> Arc<Self> {
        let (certificate, cached_table, long_move) = <(Certificate, CachedTable, _)>::default();
        let (namespace, port) = (namespace.map(Arc::new), watch::Sender::default());
        Arc::new(Self { pod, policy, namespace, files, certificate, cached_table, long_move, port })
    }

    /// The network namespace of the pod, where it is not this process's own.
    pub(crate) fn namespace(&self) -> Option<&Namespace> {
        self.namespace.as_deref()
    }

    /// The policy in force.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.policy.borrow().clone()
    }

    /// The policy in force, and its changes.
    pub(crate) fn policies(&self) -> Current {
        self.policy.clone()
    }

    /// Whether waiting for the owner of what moves has been in vain under this table. Some moves wait for a pod to end.
    pub(crate) fn waits_in_vain(&self, policy: &Arc<Policy>) -> bool {
        lock(&self.long_move).as_ref().is_some_and(|last| gives_the_same(last, policy))
    }

    /// A review has waited for so long in vain.
    pub(crate) fn record_wait(&self, policy: &Arc<Policy>, waited: Duration) {
        if waited >= LONG_MOVE {
            *lock(&self.long_move) = Some(policy.clone());
        }
    }

    /// Waits until the operator's cache has what `policy` gives it, but not beyond `until`.
    pub(crate) async fn cached(&self, policy: &Arc<Policy>, history: &History, until: Instant) {
        self.cached_table.wait(policy, history, until).await;
    }

    /// TLS with the certificate that the operator itself presents, and with `mesh` where another proxy calls. `None`
    /// where the operator has none that can be used.
    pub(crate) async fn tls(&self, mesh: &Arc<dyn ResolvesServerCert>) -> Option<Arc<ServerConfig>> {
        let policy = self.policy();
        self.certificate.latest(&self.pod, policy.webhook.as_ref()?, &self.files, mesh).await
    }

    /// Connects to the operator's own server at `address`, which is the pod's. The kernel lets connections from
    /// loopback addresses reach it.
    ///
    /// # Errors
    /// If it does not listen, or does not answer in time.
    pub(crate) async fn connect(&self, address: SocketAddr, deadline: Duration) -> io::Result<TcpStream> {
        time::timeout(deadline, self.dial(address)).await.map_err(io::Error::from).flatten()
    }

    async fn dial(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = pod_socket(self.namespace.clone(), address.ip()).await?;
        let source = match address {
            SocketAddr::V4(_) => IpAddr::from(INBOUND_SOURCE),
            SocketAddr::V6(_) => IpAddr::from(INBOUND_SOURCE_V6),
        };
        socket.bind((source, 0).into())?;
        let stream = socket.connect(address).await?;
        accept::set_socket_options(&stream)?;
        Ok(stream)
    }
}
