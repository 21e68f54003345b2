//! What one pod may talk to beside the API server: the rules in force, and the way out.

mod pod_files;
mod names;
mod roots;
mod api_servers;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::policy::egress::AccessRule;
use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_request::egress::{Rules, ServiceAccountToken, Visible};
use ctrlmesh_runtime::sync::lock;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::{debug, warn};

use self::roots::Roots;
use crate::guard::PodGuards;
use crate::metrics::Metrics;
use crate::net::accept;
use crate::net::pod_socket::pod_socket;
use crate::policy::{Current, FollowedPolicy};
use crate::upstream::Target;

pub use self::api_servers::ApiServers;
pub use self::pod_files::PodFiles;

/// Where containers find the token of their pod's service account.
static TOKEN: [&str; 1] = ["/var/run/secrets/kubernetes.io/serviceaccount/token"];

/// Where this process finds one of its own with the same audience: in the node's proxy, and elsewhere.
static OWN_TOKENS: [&str; 2] = ["/var/run/ctrlmesh/api-token", "/var/run/secrets/kubernetes.io/serviceaccount/token"];

/// A longer file is none, in bytes.
const MAX_TOKEN_BYTES: usize = 32 << 10;

/// For so long, the addresses of a host are not looked for again.
const RESOLVED_FOR: Duration = Duration::from_secs(5);

/// Hosts whose addresses are remembered.
const MAX_RESOLVED: usize = 256;

/// What one pod may talk to beside the API server. Its connections share it.
#[derive(Debug)]
pub struct PodEgress {
    state: Mutex<State>,
    /// The network namespace from which its connections go on. `None`: this process's own.
    namespace: Option<Arc<Namespace>>,
    files: PodFiles,
    api_servers: Option<ApiServers>,
    roots: Roots,
    /// The addresses of hosts, and when they were found.
    resolved: Mutex<HashMap<String, (Instant, Vec<IpAddr>)>>,
    /// They tell the manager what was refused.
    guards: Arc<PodGuards>,
    metrics: Arc<Metrics>,
}

/// How a pod reaches others.
#[derive(Debug)]
pub struct PodNetwork {
    /// `None`: this process's own.
    pub namespace: Option<Namespace>,
    pub files: PodFiles,
    pub api_servers: ApiServers,
}

#[derive(Debug)]
struct State {
    policy: FollowedPolicy,
    rules: Arc<Rules>,
    forwards: bool,
}

/// A rule that does not let something pass.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct RefusingRule {
    /// `NAMESPACE/BREAKER`.
    breaker: String,
    rule: String,
}

impl RefusingRule {
    /// `NAMESPACE/BREAKER/RULE`.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.breaker, self.rule)
    }
}

impl PodEgress {
    /// Follows the rules of `current`. Without a network there is no forward proxy.
    pub fn new(current: Current, network: Option<PodNetwork>, guards: &Arc<PodGuards>) -> Arc<Self> {
        let (namespace, files, api_servers) = match network {
            None => (None, PodFiles::own(), None),
            Some(PodNetwork { namespace, files, api_servers }) => (namespace, files, Some(api_servers)),
        };
        Arc::new(Self {
            state: Mutex::new(State { policy: FollowedPolicy::new(current), rules: Arc::default(), forwards: false }),
            namespace: namespace.map(Arc::new),
            files,
            api_servers,
            roots: Roots::default(),
            resolved: Mutex::default(),
            guards: guards.clone(),
            metrics: guards.metrics().clone(),
        })
    }

    /// Whether the rules let it pass to `address`; counts it where they do not. Without rules everything passes.
    pub(crate) fn admit(&self, visible: &Visible<'_>, address: IpAddr) -> Result<(), RefusingRule> {
        self.decide(visible, address).inspect_err(|refusing| {
            let name = refusing.name();
            debug!(rule = name, host = visible.host, port = visible.port, "egress refused");
            self.metrics.egress.refused(&name);
            self.guards.egress_refused(&refusing.breaker, &refusing.rule, visible);
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

    /// Whether a rule names the host, and allows it.
    pub(crate) fn names(&self, visible: &Visible<'_>) -> bool {
        self.latest().name(visible)
    }

    /// Counts what is never let pass, whatever the rules say.
    pub(crate) fn never(&self, reason: &'static str) {
        self.metrics.egress.refused_without_rule(reason);
    }

    /// Whether the pod has a forward proxy now.
    pub(crate) fn forwards(&self) -> bool {
        self.latest_state().forwards
    }

    /// Where requests go that are for the API server, if `host` with these addresses is it.
    ///
    /// # Errors
    /// If the API server is known by a name that is not resolved.
    pub(crate) async fn api_server(
        &self,
        host: &str,
        port: u16,
        addresses: &[IpAddr],
        deadline: Duration,
    ) -> io::Result<Option<Target>> {
        let Some(servers) = &self.api_servers else { return Ok(None) };
        let own = match servers.name() {
            Some(name) => self.resolve(name, deadline).await?,
            None => Vec::new(),
        };
        Ok(servers.target(host, port, addresses, &own))
    }

    /// The addresses of a host, as the pod's processes would find them.
    ///
    /// # Errors
    /// If it has none, or the name servers do not answer in time.
    pub(crate) async fn resolve(&self, host: &str, deadline: Duration) -> io::Result<Vec<IpAddr>> {
        let known = lock(&self.resolved).get(host).cloned();
        if let Some((_, addresses)) = known.filter(|(at, _)| at.elapsed() < RESOLVED_FOR) {
            return Ok(addresses);
        }
        let resolved = names::resolve(host, &self.files, self.namespace.as_ref());
        let resolved = time::timeout(deadline, resolved).await.map_err(io::Error::from).flatten();
        let addresses = resolved.inspect_err(|error| {
            debug!(host, error = error as &dyn std::error::Error, "name not resolved");
            self.metrics.egress.failed();
        })?;
        let mut all = lock(&self.resolved);
        if all.len() >= MAX_RESOLVED {
            all.clear();
        }
        all.insert(host.to_owned(), (Instant::now(), addresses.clone()));
        drop(all);
        Ok(addresses)
    }

    /// Begins TLS with a server that the pod's image trusts.
    ///
    /// # Errors
    /// If the handshake fails.
    pub(crate) async fn secure(
        &self,
        stream: TcpStream,
        name: ServerName<'static>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let config = self.roots.client(&self.files).await?;
        TlsConnector::from(config).connect(name, stream).await
    }

    /// Tokens that Kubernetes has made for the API server: the pod's, and this process's, which has the same audience.
    ///
    /// # Errors
    /// If the pod's cannot be read in time.
    pub(crate) async fn mounted_tokens(&self) -> io::Result<Vec<ServiceAccountToken>> {
        let mut tokens = Vec::new();
        for (files, paths) in [(&PodFiles::own(), &OWN_TOKENS[..]), (&self.files, &TOKEN[..])] {
            let read = files.read(paths, MAX_TOKEN_BYTES).await?;
            tokens.extend(read.and_then(|read| ServiceAccountToken::read(str::from_utf8(&read).ok()?)));
        }
        Ok(tokens)
    }

    /// Connects from the pod's network namespace, as the pod itself would, to the first of `addresses` that answers;
    /// counts a failure.
    ///
    /// # Errors
    /// If there is no way there, nobody listens, or it takes too long. There is at least one address.
    pub(crate) async fn connect(&self, addresses: &[SocketAddr], deadline: Duration) -> io::Result<TcpStream> {
        let until = Instant::now() + deadline;
        let mut failed = io::Error::from(io::ErrorKind::NotFound);
        for (left, address) in (1..=addresses.len()).rev().zip(addresses) {
            let turn = until.saturating_duration_since(Instant::now()) / u32::try_from(left).unwrap_or(u32::MAX);
            match time::timeout(turn, self.dial(*address)).await.map_err(io::Error::from).flatten() {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    debug!(upstream.addr = %address, error = &error as &dyn std::error::Error, "egress failed");
                    failed = error;
                }
            }
        }
        self.metrics.egress.failed();
        Err(failed)
    }

    async fn dial(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let stream = pod_socket(self.namespace.clone(), address.ip()).await?.connect(address).await?;
        accept::set_socket_options(&stream)?;
        Ok(stream)
    }

    /// A rule that denies an address denies it under any name.
    fn decide(&self, visible: &Visible<'_>, address: IpAddr) -> Result<(), RefusingRule> {
        let name = |AccessRule { breaker, rule, .. }: &AccessRule| RefusingRule {
            breaker: breaker.clone(),
            rule: rule.clone(),
        };
        let (rules, address) = (self.latest(), host(address));
        rules.decide(visible).and_then(|()| rules.denied(&Visible { host: &address, ..*visible })).map_err(name)
    }

    /// The rules that are in force.
    fn latest(&self) -> Arc<Rules> {
        self.latest_state().rules.clone()
    }

    /// The state, once it follows the policy that is in force.
    fn latest_state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        let State { policy, rules, forwards } = &mut *state;
        policy.latest(|before, latest| {
            *forwards = latest.forward_proxy;
            if before.and_then(Policy::egress) != latest.egress() {
                *rules = Arc::new(compiled(latest));
            }
        });
        state
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
