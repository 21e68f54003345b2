//! How do the parts become a process? The only file that knows all names.

use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::thread::JoinHandle;
use std::time::Duration;

use rustls::ServerConfig;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, LocalOptions};
use tokio::signal::unix;
use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::time;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::accept::{Accepted, Acceptor, Origin, PerPod, Thread};
use crate::admin::Admin;
use crate::config::{CommonArgs, ConfigError, NodeArgs, SidecarArgs};
use crate::drain::Drain;
use crate::manager::Manager;
use crate::metrics::Metrics;
use crate::node::{self, End, Node, NodeError, Settings};
use crate::policy;
use crate::policy::client;
use crate::policy::{History, Kept, LoadError, StoreError};
use crate::readiness::{BlockReady, Readiness};
use crate::serve::{Policies, Served, Server};
use crate::tls;
use crate::tls::TlsError;
use crate::tls::issue::{Presented, Source};
use crate::tls::signed::Signed;
use crate::tls::trust::Trust;
use crate::upstream::{Address, Dialer, Http1Only, Target};

/// Nearer than the deadline of any request, and far enough not to be felt.
const NEAR: Duration = Duration::from_secs(4);

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
    /// An address cannot be listened at.
    #[error("listen at {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The operating system gives no runtime, thread or signal.
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
}

/// What all serving threads are made from.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) args: CommonArgs,
    pub(crate) tls: Arc<ServerConfig>,
    pub(crate) tls_http1: Arc<ServerConfig>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) http1_only: Arc<Http1Only>,
    pub(crate) target: Option<Target>,
    pub(crate) policies: Policies,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) drain: Drain,
}

/// What every mode begins with.
struct Process {
    args: CommonArgs,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    drain: Drain,
}

/// Runs `ctrlmesh-proxy sidecar` until SIGTERM or SIGINT; returns whether everything ended in time.
///
/// # Errors
///
/// Fails when it cannot start.
pub fn sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(run_sidecar(args))
}

/// Runs `ctrlmesh-proxy node` until SIGTERM or SIGINT; returns whether everything ended in time.
///
/// # Errors
///
/// Fails when it cannot start.
pub fn node(args: NodeArgs) -> Result<bool, AppError> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(run_node(args))
}

async fn run_sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    let process = Process::new(args.common.clone());
    let starting = process.readiness.block("listeners");
    let Process { metrics, drain, .. } = &process;
    let pod = args.policy.pod.as_ref().map(ToString::to_string).unwrap_or_default();
    let never = CancellationToken::new();
    let manager = args.manager.manager();
    let policy = match &manager {
        None => policy::enforce(args.policy.source(), pod, metrics, drain, never)?,
        Some(manager) => {
            let pod = args.policy.pod.clone().ok_or(ConfigError::NoPod)?;
            let followed =
                client::follow(manager.clone(), client::Served::Pod(pod.clone()), metrics, drain)?;
            // Nothing is served before it is known what.
            let Some(policy) = client::policy_of(pod, followed.told, metrics, drain).await else {
                return Ok(true);
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
    let served = Served { policy, history, gone: None };
    let (acceptor, workers) = process.start(source, Some(target), Policies::One(served))?;
    for address in &args.listen {
        let listener = listen("operators", *address).await?;
        let (acceptor, stop) = (acceptor.clone(), drain.clone());
        drain.spawn(acceptor.run(listener, |_, _| Some(Origin::default()), stop));
    }
    if let Some(port) = args.redirected {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let listener = listen("redirected connections", address).await?;
        // What the kernel redirects arrives at loopback addresses, and from outside nobody can dial those.
        let inside =
            |own: SocketAddr, _| own.ip().to_canonical().is_loopback().then(Origin::default);
        drain.spawn(acceptor.clone().run(listener, inside, drain.clone()));
    }
    drop(acceptor);
    process.finish(workers, Some(starting)).await
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
    let starting = process.readiness.block("pods");
    let targets = args.targets()?;
    let names: Vec<String> = targets.addresses().map(|address| address.to_string()).collect();
    let (served, by_slot) = watch::channel(Arc::default());
    let manager = args.manager.manager();
    let end = end(&args)?;
    let pods = match &manager {
        None => node::Source::File(args.pods.ok_or(ConfigError::NoPods)?),
        Some(manager) => {
            let served = client::Served::Node(args.node.ok_or(ConfigError::NoNode)?);
            let Process { metrics, drain, .. } = &process;
            node::Source::Manager(client::follow(manager.clone(), served, metrics, drain)?)
        }
    };
    let source = process.certificate(&names, manager).await?;
    let (acceptor, workers) = process.start(source, None, Policies::BySlot(by_slot))?;
    let (port, pins) = (args.redirect_port, args.pin_dir);
    let state = args.manager.state_dir;
    let settings = Settings { pods, targets, port, pins, state, end };
    let node = Node::open(settings, acceptor, served, process.drain.clone())?;
    process.drain.spawn(node.run(starting));
    process.finish(workers, None).await
}

/// Who says whether a node's proxy ends for good.
fn end(args: &NodeArgs) -> Result<Option<End>, AppError> {
    let Some((daemon_set, token)) = args.daemon_set.clone().zip(args.api_token.clone()) else {
        return Ok(None);
    };
    Ok(Some(End {
        target: args.api_server()?,
        trust: Arc::new(Trust::load(&args.common.upstream_ca)?),
        token,
        namespace: daemon_set.namespace,
        daemon_set: daemon_set.name,
    }))
}

// === impl Process ===

impl Process {
    fn new(args: CommonArgs) -> Self {
        let (metrics, readiness, drain) = (Metrics::new(), Readiness::default(), Drain::default());
        Self { args, metrics, readiness, drain }
    }

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
        let per_pod = PerPod::at_most(self.args.max_connections_per_pod);
        let metrics = self.metrics.clone();
        Ok((Acceptor { threads, max_connections, per_pod, metrics }, workers))
    }

    /// Shows the pages until told to stop, and stops.
    async fn finish(
        self,
        workers: Vec<JoinHandle<()>>,
        starting: Option<BlockReady>,
    ) -> Result<bool, AppError> {
        let Self { args, metrics, readiness, drain } = self;
        let admin = Admin { metrics, readiness, drain: drain.clone() };
        let pages = admin.run(listen("admin", args.admin_listen).await?);
        drop(starting);
        tokio::select! {
            // The pages are served for as long as the process lives.
            () = pages => Ok(true),
            clean = shutdown(drain, args.drain_timeout) => {
                let clean = clean?;
                for worker in workers {
                    if worker.join().is_err() {
                        warn!("a serving thread panicked");
                    }
                }
                Ok(clean)
            }
        }
    }
}

// === impl Parts ===

impl Parts {
    /// Starts the serving threads.
    pub(crate) fn start(&self) -> Result<(Vec<Thread>, Vec<JoinHandle<()>>), AppError> {
        let mut threads = Vec::new();
        let mut workers = Vec::new();
        for number in 0..self.args.serving_threads() {
            let (thread, connections) = Thread::new();
            let parts = self.clone();
            let worker = thread::Builder::new()
                .name(format!("serve-{number}"))
                .spawn(move || parts.serve(connections))
                .map_err(AppError::Runtime)?;
            threads.push(thread);
            workers.push(worker);
        }
        Ok((threads, workers))
    }

    /// One serving thread, until no more connections come.
    fn serve(self, mut connections: UnboundedReceiver<Accepted>) {
        let runtime =
            Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                return warn!(
                    error = &error as &dyn std::error::Error,
                    "a serving thread cannot start"
                );
            }
        };
        let drain = self.drain.for_thread();
        runtime.block_on(async move {
            let server = self.server(drain.clone());
            drain.spawn_local(keep_a_timer_near(drain.clone()));
            while let Some(accepted) = connections.recv().await {
                drain.spawn_local(server.clone().serve(accepted));
            }
            drain.ended().await;
        });
    }

    fn server(self, drain: Drain) -> Rc<Server> {
        let dialer = Dialer {
            trust: self.trust,
            deadline: self.args.connect_timeout,
            http1_only: self.http1_only,
            metrics: self.metrics.clone(),
            drain: drain.clone(),
        };
        Rc::new(Server {
            tls: self.tls,
            tls_http1: self.tls_http1,
            dialer: Rc::new(dialer),
            target: self.target,
            policies: self.policies,
            header_timeout: self.args.header_timeout,
            response_timeout: self.args.response_timeout,
            metrics: self.metrics,
            drain,
        })
    }
}

/// Lets each request have its deadline without a system call: a runtime must be woken only for a timer that is nearer
/// than all others, and this one is.
async fn keep_a_timer_near(drain: Drain) {
    let ticks = async {
        loop {
            time::sleep(NEAR).await;
        }
    };
    tokio::select! {
        () = drain.started() => {}
        () = ticks => {}
    }
}

async fn listen(purpose: &'static str, address: SocketAddr) -> Result<TcpListener, AppError> {
    let failed = |source| AppError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    info!(purpose, address = %bound, "listening");
    Ok(listener)
}

/// Waits to be asked to stop, and stops.
async fn shutdown(drain: Drain, deadline: Duration) -> Result<bool, AppError> {
    let mut terminate = unix::signal(SignalKind::terminate()).map_err(AppError::Runtime)?;
    let mut interrupt = unix::signal(SignalKind::interrupt()).map_err(AppError::Runtime)?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    info!(deadline = ?deadline, "draining");
    let clean = drain.finish(deadline).await;
    info!(clean, "drained");
    Ok(clean)
}
