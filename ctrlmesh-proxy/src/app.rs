//! Builds the processes `sidecar` and `node` from their parts.

mod threads;
mod life;
mod forward_proxy;
mod redirected;

use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ctrlmesh_runtime::listen::{ListenError, listen};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use thiserror::Error;
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio::time;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::life::{Leave, Process, RunningParts};
use crate::config::{ConfigError, NodeArgs, SidecarArgs, Upstream};
use crate::egress::{ApiServers, PodEgress, PodFiles, PodNetwork};
use crate::guard::{GuardFile, PodGuards};
use crate::manager_client::Endpoint;
use crate::manager_client::certificate::SignedCertificate;
use crate::net::accept::{Acceptor, Origin, PodLimits};
use crate::net::memory_budget::MemoryBudget;
use crate::net::tls;
use crate::net::tls::TlsError;
use crate::net::tls::issue::{ServingCertificate, Source};
use crate::net::tls::trust::Trust;
use crate::node::{self, Announcement, ApiClient, Handover, Node, NodeError, Removal, RemovalCheck, Settings};
use crate::policy;
use crate::policy::subscription;
use crate::policy::subscription::{PodSubscription, Publications};
use crate::policy::{History, HistoryFile, LoadError, StoreError, Validity};
use crate::session::own_lock::OwnLock;
use crate::session::{Policies, ServedPod, WebhookTls};
use crate::spans::{SpanError, Tracer};
use crate::trace;
use crate::trace::Listeners;
use crate::upstream::{Address, Target};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::readiness::BlockReady;

pub use self::threads::Parts;

/// For a TLS handshake with the API server at start.
const REACH_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two attempts.
const REACH_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Error)]
pub enum AppError {
    #[error("read the configuration")]
    Config(#[from] ConfigError),
    #[error("prepare TLS")]
    Tls(#[from] TlsError),
    #[error("read the policy")]
    Policy(#[from] LoadError),
    #[error("keep what the manager says")]
    Store(#[from] StoreError),
    #[error("serve the pods of this node")]
    Node(#[from] NodeError),
    #[error("prepare spans")]
    Spans(#[from] SpanError),
    #[error("set up TLS")]
    Library(#[from] rustls::Error),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("listen at {path}")]
    Socket { path: PathBuf, source: io::Error },
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
}

/// Runs `ctrlmesh-proxy sidecar` until SIGTERM or SIGINT; returns whether everything ended in time.
pub fn sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    args.common.check_process(process::id())?;
    args.check_policy()?;
    raise_open_files();
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(run_sidecar(args))
}

/// Runs `ctrlmesh-proxy node` until SIGTERM or SIGINT; returns whether everything ended in time.
pub fn node(args: NodeArgs) -> Result<bool, AppError> {
    args.common.check_process(process::id())?;
    raise_open_files();
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(run_node(args))
}

/// Raises the soft limit of open files to the hard one. Many runtimes begin with 1024, and each connection takes two.
fn raise_open_files() {
    let limit = Resource::RLIMIT_NOFILE;
    let raised = getrlimit(limit).and_then(|(_, most)| setrlimit(limit, most, most));
    if let Err(error) = raised {
        warn!(%error, "not more files may be open than before");
    }
}

async fn run_sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    let process = Process::new(args.common.clone(), args.spans.clone());
    let starting = process.readiness.block("listeners");
    let begun = begin_sidecar(process.clone(), args, starting);
    process.live(None, Box::pin(begun), async {}).await
}

async fn begin_sidecar(process: Process, args: SidecarArgs, starting: BlockReady) -> Result<RunningParts, AppError> {
    let Process { metrics, drain, .. } = &process;
    let manager = args.manager.manager();
    let Some((first, others)) = first_policy(&args, manager.clone(), &process).await? else {
        return Ok(RunningParts::default());
    };
    let PodSubscription { policy, publish, validity } = first;
    let target = args.target()?;
    let name = match &target.address {
        Address::Socket(address) => address.ip().to_string(),
        Address::Host(host, _) => host.clone(),
    };
    let source = process.certificate(&[name], manager).await?;
    let history = history(&args);
    let state = args.manager.state_dir.as_deref();
    let guards = state.map(|state| GuardFile::of(state, args.policy.pod.as_ref(), ""));
    let guards = PodGuards::new(policy.clone(), metrics, guards);
    let cluster = Upstream::address_of_the_cluster();
    let api_servers = ApiServers::Told { target: target.clone(), cluster, others: others.clone() };
    let network = PodNetwork { namespace: None, files: PodFiles::own(), api_servers };
    let egress = PodEgress::new(policy.clone(), Some(network), &guards);
    let requests = metrics.pods.requests(&args.policy.pod.as_ref().map(ToString::to_string).unwrap_or_default());
    let own_lock = OwnLock::of(args.policy.pod.as_ref().map(|pod| pod.name.as_str()).unwrap_or_default());
    let served = ServedPod::new(policy.clone(), history, guards, None);
    let served = ServedPod { validity, requests, egress, own_lock, ..served };
    served.settle(args.common.write_drain_timeout, publish, drain);
    let reached = target.clone();
    let (acceptor, workers) = process.start(source, Some(target), Policies::One(served), None)?;
    let others = args.manager.manager().map(|_| others);
    drain.spawn(forward_proxy::serve(policy.clone(), others, acceptor.clone(), drain.clone()));
    for address in &args.listen {
        let listener = listen("operators", *address)?;
        let (acceptor, stop) = (acceptor.clone(), drain.clone());
        drain.spawn(acceptor.run(listener, |_: &_, _, _| Some(Origin::default()), stop));
    }
    if let Some(port) = args.redirected {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let listener = listen("redirected connections", address)?;
        let origin = move |stream: &_, own, client| redirected::origin(&policy, stream, own, client);
        drain.spawn(acceptor.run(listener, origin, drain.clone()));
    }
    match args.redirected {
        Some(_) => ready_once_reached(reached, &args.common.upstream_ca, drain, starting)?,
        None => drop(starting),
    }
    Ok(RunningParts { workers, leave: None })
}

/// The pod's first policy, and the API server's other addresses. `None` where shutdown comes first.
async fn first_policy(
    args: &SidecarArgs,
    manager: Option<Endpoint>,
    Process { metrics, drain, .. }: &Process,
) -> Result<Option<(PodSubscription, watch::Receiver<Arc<[SocketAddr]>>)>, AppError> {
    let Some(manager) = manager else {
        let pod = args.policy.pod.as_ref().map(ToString::to_string).unwrap_or_default();
        let policy = policy::enforce(args.policy.source(), pod, metrics, drain, CancellationToken::new())?;
        let first = PodSubscription { policy, publish: Publications::default(), validity: Validity::default() };
        return Ok(Some((first, watch::channel(Arc::default()).1)));
    };
    let pod = args.policy.pod.clone().ok_or(ConfigError::NoPod)?;
    let followed = subscription::follow(manager, subscription::Subscriber::Pod(pod.clone()), metrics, drain)?;
    let servers = followed.servers.clone();
    // Nothing is served before the policy is known.
    let first = subscription::policy_of(pod, followed, metrics, drain).await;
    Ok(first.map(|first| (first, servers)))
}

/// Becomes ready once the proxy's own connections reach the API server.
fn ready_once_reached(target: Target, ca: &Path, drain: &Drain, starting: BlockReady) -> Result<(), AppError> {
    let (trust, stop) = (Trust::load(ca)?, drain.clone());
    drain.spawn(async move {
        tokio::select! {
            () = stop.started() => {}
            () = api_server_reached(&target, &trust) => drop(starting),
        }
    });
    Ok(())
}

/// Waits until the proxy's own connections reach the API server. Until the node's proxy knows this container, the
/// kernel redirects them back to this proxy.
async fn api_server_reached(target: &Target, trust: &Trust) {
    loop {
        let reached = time::timeout(REACH_TIMEOUT, Box::pin(target.reach(trust))).await;
        match reached.map_err(io::Error::from).flatten() {
            Ok(_stream) => return,
            Err(error) => debug!(%error, "the API server is not reached yet"),
        }
        time::sleep(REACH_INTERVAL).await;
    }
}

/// The policies under which the pod's operator may have read. None where everything passes, and always did.
fn history(args: &SidecarArgs) -> Arc<History> {
    match &args.manager.state_dir {
        Some(state) => History::load(HistoryFile::of(state, args.policy.pod.as_ref(), "")),
        None if args.policy.source().is_none() => Arc::default(),
        None => History::unknown(),
    }
}

async fn run_node(args: NodeArgs) -> Result<bool, AppError> {
    let process = Process::new(args.common.clone(), args.spans.clone());
    let api = api_client(&args)?;
    let end = api.clone().zip(args.daemon_set.clone()).map(|(api, set)| RemovalCheck::new(api, set));
    let removal = Removal { pins: args.pin_dir.clone(), end };
    let announced = api.zip(args.node.clone()).filter(|_| args.announce);
    let announcement = announced.map(|(api, node)| Announcement::new(api, node));
    if let Some(end) = &removal.end {
        process.drain.spawn(end.clone().watch(process.drain.clone()));
    }
    let socket = args.probe_socket.clone();
    let starting = process.readiness.block("pods");
    if let Some(announcement) = announcement.clone() {
        process.drain.spawn(announcement.once_ready(process.readiness.clone(), process.drain.clone()));
    }
    let begun = begin_node(process.clone(), args, removal.clone(), starting);
    let begun = async {
        let begun = Box::pin(begun).await;
        if let (Err(AppError::Node(NodeError::Intercept(error))), Some(announcement)) = (&begun, announcement)
            && error.is_of_the_kernel()
        {
            announcement.refused_by_kernel().await;
        }
        begun
    };
    process.live(socket.as_deref(), Box::pin(begun), removal.if_due()).await
}

async fn begin_node(
    process: Process,
    args: NodeArgs,
    removal: Removal,
    starting: BlockReady,
) -> Result<RunningParts, AppError> {
    let targets = args.targets()?;
    let names: Vec<String> = targets.addresses().map(|address| address.to_string()).collect();
    let (served, by_slot) = watch::channel(Arc::default());
    let manager = args.manager.manager();
    let (folder, timeout) = (args.handover_dir, args.handover_timeout);
    let handover = folder.map(|folder| Handover { folder, timeout });
    let pods = match &manager {
        None => node::Source::File(args.pods.ok_or(ConfigError::NoPods)?),
        Some(manager) => {
            let served = subscription::Subscriber::Node(args.node.ok_or(ConfigError::NoNode)?);
            let Process { metrics, drain, .. } = &process;
            node::Source::Manager(subscription::follow(manager.clone(), served, metrics, drain)?)
        }
    };
    let source = process.certificate(&names, manager).await?;
    let (acceptor, workers) = process.start(source, None, Policies::BySlot(by_slot), args.peer_ca.as_deref())?;
    let (port, state) = (args.redirect_port, args.manager.state_dir);
    let write_drain_timeout = args.common.write_drain_timeout;
    let drop_bypass = args.drop_bypass;
    let settings = Settings { pods, targets, port, state, removal, handover, write_drain_timeout, drop_bypass };
    let node = Node::open(settings, acceptor, served, process.drain.clone())?;
    let (asked, (left, done)) = (CancellationToken::new(), oneshot::channel::<()>());
    let leave = Some(Leave { asked: asked.clone(), done });
    process.drain.spawn(async move {
        Box::pin(node.run(starting, asked)).await;
        drop(left);
    });
    Ok(RunningParts { workers, leave })
}

/// Our own requests to the API server, where flags name what they need.
fn api_client(args: &NodeArgs) -> Result<Option<ApiClient>, AppError> {
    let Some(token) = args.api_token.clone() else { return Ok(None) };
    let trust = Arc::new(Trust::load(&args.common.upstream_ca)?);
    Ok(Some(ApiClient { target: args.api_server()?, trust, token }))
}

impl Process {
    /// The source of a certificate for `names`. The manager signs it where no flag says otherwise.
    async fn certificate(&self, names: &[String], manager: Option<Endpoint>) -> Result<Source, ConfigError> {
        match manager.filter(|_| self.args.lacks_certificate()) {
            None => self.args.certificate(names),
            Some(manager) => {
                let names = self.args.names(names);
                Ok(SignedCertificate::new(manager, names, self.drain.clone()).source().await)
            }
        }
    }

    /// Those who follow requests at the socket for it. Nobody does where there is none.
    fn listeners(&self) -> Result<Arc<Listeners>, AppError> {
        let listeners = Arc::<Listeners>::default();
        if let Some(path) = &self.args.trace_socket {
            let failed = |source| AppError::Socket { path: path.clone(), source };
            let socket = trace::bind(path).map_err(failed)?;
            self.drain.spawn_until_started(trace::serve(socket, listeners.clone()));
        }
        Ok(listeners)
    }

    /// Starts the serving threads, which present the certificate of `source`.
    fn start(
        &self,
        source: Source,
        target: Option<Target>,
        policies: Policies,
        peer_ca: Option<&Path>,
    ) -> Result<(Acceptor, Vec<JoinHandle<()>>), AppError> {
        let drain = &self.drain;
        let peer_ca = peer_ca.or(self.args.mesh_ca.as_ref().map(|ca| ca.cert.as_path()));
        let peers = peer_ca.map(Trust::load).transpose()?.map(Arc::new);
        let presented = Arc::new(ServingCertificate::load(source)?);
        let parts = Parts {
            tls: Arc::new(tls::server(presented.clone(), &[tls::ALPN_HTTP2, tls::ALPN_HTTP1])?),
            tls_http1: Arc::new(tls::server(presented.clone(), &[tls::ALPN_HTTP1])?),
            webhooks: Some(WebhookTls { own: Arc::new(tls::unverified::client()?), peers: peers.clone() }),
            trust: Arc::new(Trust::load(&self.args.upstream_ca)?),
            http1_only: Arc::default(),
            args: self.args.clone(),
            target,
            policies,
            metrics: self.metrics.clone(),
            tracer: Tracer::start(&self.spans, &self.metrics.spans, drain)?,
            listeners: self.listeners()?,
            drain: drain.clone(),
        };
        drain.spawn(presented.follow(drain.clone()));
        for trust in peers.into_iter().chain([parts.trust.clone()]) {
            drain.spawn(trust.follow(drain.clone()));
        }
        let (threads, workers) = parts.start()?;
        let max_connections = self.args.max_connections;
        let metrics = self.metrics.clone();
        let budget = MemoryBudget::for_process(self.args.memory_limit, &metrics);
        drain.spawn_until_started(budget.clone().give_back());
        let per_pod = PodLimits::new(self.args.max_connections_per_pod, budget);
        Ok((Acceptor { threads, max_connections, per_pod, metrics }, workers))
    }
}
