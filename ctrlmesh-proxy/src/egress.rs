//! What one pod may talk to beside the API server: the rules in force, and the way out.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::policy::egress::AccessRule;
use ctrlmesh_intercept::listener::{self, Namespace};
use ctrlmesh_request::egress::{Rules, Visible};
use ctrlmesh_runtime::sync::lock;
use tokio::net::{TcpSocket, TcpStream};
use tokio::{task, time};
use tracing::{debug, warn};

use crate::metrics::Metrics;
use crate::net::accept;
use crate::policy::{Current, FollowedPolicy};

/// What one pod may talk to beside the API server. Its connections share it.
#[derive(Debug)]
pub struct PodEgress {
    state: Mutex<State>,
    /// The network namespace from which its connections go on. `None`: this process's own.
    network: Option<Arc<Namespace>>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct State {
    policy: FollowedPolicy,
    rules: Arc<Rules>,
}

/// A rule that does not let something pass.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct RefusingRule {
    /// `NAMESPACE/BREAKER/RULE`.
    pub(crate) name: String,
}

impl PodEgress {
    /// Follows the rules of `current`.
    pub fn new(current: Current, network: Option<Namespace>, metrics: &Arc<Metrics>) -> Arc<Self> {
        let state = State { policy: FollowedPolicy::new(current), rules: Arc::default() };
        Arc::new(Self { state: Mutex::new(state), network: network.map(Arc::new), metrics: metrics.clone() })
    }

    /// Whether the rules let it pass to `address`; counts it where they do not. Without rules everything passes.
    pub(crate) fn admit(&self, visible: &Visible<'_>, address: IpAddr) -> Result<(), RefusingRule> {
        self.decide(visible, address).inspect_err(|refusing| {
            debug!(rule = refusing.name, host = visible.host, port = visible.port, "egress refused");
            self.metrics.egress.refused(&refusing.name);
        })
    }

    /// Whether the rules would let it pass.
    pub(crate) fn admits(&self, visible: &Visible<'_>, address: IpAddr) -> bool {
        self.decide(visible, address).is_ok()
    }

    /// Completes once the rules no longer let it pass.
    pub(crate) async fn refused(&self, visible: &Visible<'_>, address: IpAddr) -> RefusingRule {
        let mut changes = lock(&self.state).policy.changes();
        loop {
            if let Err(refusing) = self.admit(visible, address) {
                return refusing;
            }
            if changes.changed().await.is_err() {
                // The policy's source has ended.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Connects from the pod's network namespace, as the pod itself would; counts a failure.
    ///
    /// # Errors
    /// If there is no way there, nobody listens, or it takes too long.
    pub(crate) async fn connect(&self, address: SocketAddr, deadline: Duration) -> io::Result<TcpStream> {
        let connected = time::timeout(deadline, self.dial(address)).await;
        connected.map_err(io::Error::from).and_then(|connected| connected).inspect_err(|error| {
            debug!(upstream.addr = %address, error = error as &dyn std::error::Error, "egress failed");
            self.metrics.egress.failed();
        })
    }

    async fn dial(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let stream = match self.network.clone() {
            None => TcpStream::connect(address).await?,
            Some(network) => {
                // A thread has to enter the namespace.
                let made = task::spawn_blocking(move || listener::outgoing(&network, address.ip())).await;
                let socket = made.map_err(io::Error::other)?.map_err(io::Error::other)?;
                TcpSocket::from_std_stream(socket).connect(address).await?
            }
        };
        accept::set_socket_options(&stream)?;
        Ok(stream)
    }

    /// A rule that denies an address denies it under any name.
    fn decide(&self, visible: &Visible<'_>, address: IpAddr) -> Result<(), RefusingRule> {
        let name = |AccessRule { breaker, rule, .. }: &AccessRule| RefusingRule { name: format!("{breaker}/{rule}") };
        let (rules, address) = (self.latest(), host(address));
        rules.decide(visible).and_then(|()| rules.denied(&Visible { host: &address, ..*visible })).map_err(name)
    }

    /// The rules that are in force.
    fn latest(&self) -> Arc<Rules> {
        let mut state = lock(&self.state);
        let State { policy, rules } = &mut *state;
        policy.latest(|before, latest| {
            if before.and_then(Policy::egress) != latest.egress() {
                *rules = Arc::new(compiled(latest));
            }
        });
        let rules = rules.clone();
        drop(state);
        rules
    }
}

/// An address in the place of a host's name.
pub(crate) fn host(address: IpAddr) -> String {
    address.to_canonical().to_string()
}

fn compiled(policy: &Policy) -> Rules {
    let rules = policy.egress().map(Rules::new).transpose().unwrap_or_else(|error| {
        // A policy is checked before it is in force.
        warn!(error = &error as &dyn std::error::Error, "no rule on egress is applied");
        None
    });
    rules.unwrap_or_default()
}
