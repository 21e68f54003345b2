//! How do the parts become a process? The only file that knows all names.

mod threads;
mod life;

use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
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

use self::life::{Begun, Leave, Process};
use crate::config::{ConfigError, NodeArgs, SidecarArgs};
use crate::manager_client::Manager;
use crate::manager_client::certificate::Signed;
use crate::net::accept::{Acceptor, Origin, PodLimits};
use crate::net::memory_budget::MemoryBudget;
use crate::net::tls;
use crate::net::tls::TlsError;
use crate::net::tls::issue::{Presented, Source};
use crate::net::tls::trust::Trust;
use crate::node::{self, Handover, Node, NodeError, Removal, RemovalCheck, Settings};
use crate::policy;
use crate::policy::subscription;
use crate::policy::{History, Kept, LoadError, StoreError};
use crate::session::{Policies, ServedPod};
use crate::upstream::{Address, Target};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::readiness::BlockReady;

pub use self::threads::Parts;

/// How long the API server may take to show its certificate.
const REACHED_WITHIN: Duration = Duration::from_secs(5);

/// How often it is tried whether it is reached.
const REACHED_AGAIN: Duration = Duration::from_millis(200);

/// Why the proxy cannot run.
#[derive(Debug, Error)]
pub enum AppError {
    /// It was told something that does not make sense.
    #[error("read the configuration")]
    Config(#[from] ConfigError),
    /// Certificates and keys are not there.
    #[error("prepare TLS")]
    Tls(#[from] TlsError),
    /// There is no policy that could be applied.
    #[error("read the policy")]
    Policy(#[from] LoadError),
    /// What the manager says cannot be kept.
    #[error("keep what the manager says")]
    Store(#[from] StoreError),
    /// The pods of a node cannot be served.
    #[error("serve the pods of this node")]
    Node(#[from] NodeError),
    /// The TLS library does not do what is needed.
    #[error("set up TLS")]
    Library(#[from] rustls::Error),
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// There can be no socket for probes.
    #[error("listen at {path}")]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The operating system gives no runtime, thread or signal.
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
}

/// Runs `ctrlmesh-proxy sidecar` until SIGTERM or SIGINT; returns whether everything ended in time.
///
/// # Errors
///
/// Fails when it cannot start.
pub fn sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    raise_open_files();
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(run_sidecar(args))
}

/// Runs `ctrlmesh-proxy node` until SIGTERM or SIGINT; returns whether everything ended in time.
///
/// # Errors
///
/// Fails when it cannot start.
pub fn node(args: NodeArgs) -> Result<bool, AppError> {
    raise_open_files();
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(run_node(args))
}

/// As many files may be open as the system lets us: many container runtimes begin with 1024, and each connection is two.
fn raise_open_files() {
    let limit = Resource::RLIMIT_NOFILE;
    let raised = getrlimit(limit).and_then(|(_, most)| setrlimit(limit, most, most));
    if let Err(error) = raised {
        warn!(%error, "not more files may be open than before");
    }
}

async fn run_sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    let process = Process::new(args.common.clone());
    let starting = process.readiness.block("listeners");
    let begun = begin_sidecar(process.clone(), args, starting);
    process.live(None, Box::pin(begun), async {}).await
}

async fn begin_sidecar(
    process: Process,
    args: SidecarArgs,
    starting: BlockReady,
) -> Result<Begun, AppError> {
    let Process { metrics, drain, .. } = &process;
    let pod = args.policy.pod.as_ref().map(ToString::to_string).unwrap_or_default();
    let never = CancellationToken::new();
    let manager = args.manager.manager();
    let policy = match &manager {
        None => policy::enforce(args.policy.source(), pod, metrics, drain, never)?,
        Some(manager) => {
            let pod = args.policy.pod.clone().ok_or(ConfigError::NoPod)?;
            let followed = subscription::follow(
                manager.clone(),
                subscription::Served::Pod(pod.clone()),
                metrics,
                drain,
            )?;
            // Nothing is served before it is known what.
            let Some(policy) = subscription::policy_of(pod, followed.told, metrics, drain).await
            else {
                return Ok(Begun::default());
            };
            policy
        }
    };
    let target = args.target()?;
    let name = match &target.address {
        Address::Socket(address) => address.ip().to_string(),
        Address::Host(host, _) => host.clone(),
    };
    let source = process.certificate(&[name], manager).await?;
    let history = history(&args);
    let served = ServedPod { policy, history, gone: None };
    let reached = target.clone();
    let (acceptor, workers) = process.start(source, Some(target), Policies::One(served))?;
    for address in &args.listen {
        let listener = listen("operators", *address)?;
        let (acceptor, stop) = (acceptor.clone(), drain.clone());
        drain.spawn(acceptor.run(listener, |_, _| Some(Origin::default()), stop));
    }
    if let Some(port) = args.redirected {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let listener = listen("redirected connections", address)?;
        // What the kernel redirects arrives at loopback addresses, and from outside nobody can dial those.
        let inside =
            |own: SocketAddr, _| own.ip().to_canonical().is_loopback().then(Origin::default);
        drain.spawn(acceptor.clone().run(listener, inside, drain.clone()));
    }
    match args.redirected {
        Some(_) => begun_past_ourselves(reached, &args.common.upstream_ca, drain, starting)?,
        None => drop(starting),
    }
    Ok(Begun { workers, leave: None })
}

/// Has begun once what we dial is the API server.
fn begun_past_ourselves(
    target: Target,
    ca: &Path,
    drain: &Drain,
    starting: BlockReady,
) -> Result<(), AppError> {
    let (trust, stop) = (Trust::load(ca)?, drain.clone());
    drain.spawn(async move {
        tokio::select! {
            () = stop.started() => {}
            () = past_ourselves(&target, &trust) => drop(starting),
        }
    });
    Ok(())
}

/// Waits until what we dial is the API server: until the node's proxy knows which container is ours, the kernel sends our own
/// connections back to us.
async fn past_ourselves(target: &Target, trust: &Trust) {
    loop {
        let reached = time::timeout(REACHED_WITHIN, Box::pin(target.reach(trust))).await;
        match reached.map_err(io::Error::from).flatten() {
            Ok(_stream) => return,
            Err(error) => debug!(%error, "the API server is not reached yet"),
        }
        time::sleep(REACHED_AGAIN).await;
    }
}

/// What the pod's operator may have read before: nothing where everything passes, and always did.
fn history(args: &SidecarArgs) -> Arc<History> {
    match &args.manager.state_dir {
        Some(state) => History::kept(Kept::of(state, args.policy.pod.as_ref(), "")),
        None if args.policy.source().is_none() => Arc::default(),
        None => History::unknown(),
    }
}

async fn run_node(args: NodeArgs) -> Result<bool, AppError> {
    let process = Process::new(args.common.clone());
    let removal = Removal { pins: args.pin_dir.clone(), end: end(&args)? };
    if let Some(end) = &removal.end {
        process.drain.spawn(end.clone().watch(process.drain.clone()));
    }
    let socket = args.probe_socket.clone();
    let starting = process.readiness.block("pods");
    let begun = begin_node(process.clone(), args, removal.clone(), starting);
    process.live(socket.as_deref(), Box::pin(begun), removal.if_due()).await
}

async fn begin_node(
    process: Process,
    args: NodeArgs,
    removal: Removal,
    starting: BlockReady,
) -> Result<Begun, AppError> {
    let targets = args.targets()?;
    let names: Vec<String> = targets.addresses().map(|address| address.to_string()).collect();
    let (served, by_slot) = watch::channel(Arc::default());
    let manager = args.manager.manager();
    let (folder, patience) = (args.handover_dir, args.handover_timeout);
    let handover = folder.map(|folder| Handover { folder, patience });
    let pods = match &manager {
        None => node::Source::File(args.pods.ok_or(ConfigError::NoPods)?),
        Some(manager) => {
            let served = subscription::Served::Node(args.node.ok_or(ConfigError::NoNode)?);
            let Process { metrics, drain, .. } = &process;
            node::Source::Manager(subscription::follow(manager.clone(), served, metrics, drain)?)
        }
    };
    let source = process.certificate(&names, manager).await?;
    let (acceptor, workers) = process.start(source, None, Policies::BySlot(by_slot))?;
    let (port, state) = (args.redirect_port, args.manager.state_dir);
    let settings = Settings { pods, targets, port, state, removal, handover };
    let node = Node::open(settings, acceptor, served, process.drain.clone())?;
    let (asked, (left, done)) = (CancellationToken::new(), oneshot::channel::<()>());
    let leave = Some(Leave { asked: asked.clone(), done });
    process.drain.spawn(async move {
        Box::pin(node.run(starting, asked)).await;
        drop(left);
    });
    Ok(Begun { workers, leave })
}

/// Who says whether a node's proxy ends for good.
fn end(args: &NodeArgs) -> Result<Option<RemovalCheck>, AppError> {
    let Some((daemon_set, token)) = args.daemon_set.clone().zip(args.api_token.clone()) else {
        return Ok(None);
    };
    let trust = Arc::new(Trust::load(&args.common.upstream_ca)?);
    Ok(Some(RemovalCheck::new(args.api_server()?, trust, token, daemon_set)))
}

// === impl Process ===

impl Process {
    /// Where the certificate comes from that carries `names`; the manager signs it where nothing else was said.
    async fn certificate(
        &self,
        names: &[String],
        manager: Option<Manager>,
    ) -> Result<Source, ConfigError> {
        match manager.filter(|_| self.args.lacks_certificate()) {
            None => self.args.certificate(names),
            Some(manager) => {
                let names = self.args.names(names);
                Ok(Signed::new(manager, names, self.drain.clone()).source().await)
            }
        }
    }

    /// Starts the serving threads, which present what comes from `source`.
    fn start(
        &self,
        source: Source,
        target: Option<Target>,
        policies: Policies,
    ) -> Result<(Acceptor, Vec<JoinHandle<()>>), AppError> {
        let drain = &self.drain;
        let presented = Arc::new(Presented::load(source)?);
        let parts = Parts {
            tls: Arc::new(tls::server(presented.clone(), &[tls::ALPN_HTTP2, tls::ALPN_HTTP1])?),
            tls_http1: Arc::new(tls::server(presented.clone(), &[tls::ALPN_HTTP1])?),
            trust: Arc::new(Trust::load(&self.args.upstream_ca)?),
            http1_only: Arc::default(),
            args: self.args.clone(),
            target,
            policies,
            metrics: self.metrics.clone(),
            drain: drain.clone(),
        };
        drain.spawn(presented.follow(drain.clone()));
        drain.spawn(parts.trust.clone().follow(drain.clone()));
        let (threads, workers) = parts.start()?;
        let max_connections = self.args.max_connections;
        let metrics = self.metrics.clone();
        let budget = MemoryBudget::for_process(self.args.memory_limit, &metrics);
        let per_pod = PodLimits::new(self.args.max_connections_per_pod, budget);
        Ok((Acceptor { threads, max_connections, per_pod, metrics }, workers))
    }
}
