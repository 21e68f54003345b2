//! The admission webhook of one pod: its certificate, its own server, and who else may be asked.

mod certificate;
mod cache;
mod report;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_intercept::{INBOUND_SOURCE, INBOUND_SOURCE_V6};
use rustls::ServerConfig;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time;
use tokio::time::Instant;

use self::cache::FollowedPolicy;
use self::certificate::Certificate;
use crate::egress::PodFiles;
use crate::net::accept;
use crate::net::pod_socket::pod_socket;
use crate::policy::{Current, History};

pub(crate) use self::certificate::PEER_NAME;
pub(crate) use self::report::PortState;

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
    followed: FollowedPolicy,
    port: watch::Sender<PortState>,
}

impl PodWebhook {
    pub fn new(pod: String, policy: Current, namespace: Option<Namespace>, files: PodFiles) -> Arc<Self> {
        let (certificate, followed) = (Certificate::default(), FollowedPolicy::default());
        let (namespace, port) = (namespace.map(Arc::new), watch::Sender::default());
        Arc::new(Self { pod, policy, namespace, files, certificate, followed, port })
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

    /// Waits until the operator's cache has what `policy` gives it, but not beyond `until`.
    pub(crate) async fn cached(&self, policy: &Arc<Policy>, history: &History, until: Instant) {
        self.followed.wait(policy, history, until).await;
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
