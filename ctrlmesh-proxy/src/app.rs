//! How do the parts become a process? The only file that knows all names.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::thread::JoinHandle;

use rustls::ServerConfig;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, LocalOptions};
use tokio::signal::unix;
use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::accept::{Accepted, Acceptor, Origin, Thread};
use crate::admin::Admin;
use crate::config::{CommonArgs, ConfigError, SidecarArgs};
use crate::drain::Drain;
use crate::metrics::Metrics;
use crate::policy;
use crate::policy::{Current, LoadError, PolicyArgs};
use crate::readiness::Readiness;
use crate::serve::{Policies, Server};
use crate::tls;
use crate::tls::TlsError;
use crate::tls::issue::Presented;
use crate::tls::trust::Trust;
use crate::upstream::{Address, Dialer, Target};

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
    pub(crate) http1_only: Arc<AtomicBool>,
    pub(crate) target: Option<Target>,
    pub(crate) policies: Policies,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) drain: Drain,
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

async fn run_sidecar(args: SidecarArgs) -> Result<bool, AppError> {
    let metrics = Metrics::new();
    let readiness = Readiness::default();
    let starting = readiness.block("listeners");
    let drain = Drain::default();
    let target = args.target()?;
    let policies = Policies::One(policy(&args.policy, &metrics, &drain)?);
    let (parts, presented) =
        Parts::new(args.common.clone(), Some(target), policies, metrics.clone(), drain.clone())?;
    drain.spawn(presented.follow(drain.clone()));
    drain.spawn(parts.trust.clone().follow(drain.clone()));
    let (threads, workers) = parts.start()?;
    let admin = Admin { metrics: metrics.clone(), readiness, drain: drain.clone() };
    let acceptor = Acceptor { threads, max_connections: args.common.max_connections, metrics };
    for address in &args.listen {
        let listener = listen("operators", *address).await?;
        let drain = drain.clone();
        let acceptor = acceptor.clone();
        drain.spawn(acceptor.run(listener, |_| Some(Origin::default()), drain.clone()));
    }
    drop(acceptor);
    let pages = admin.run(listen("admin", args.common.admin_listen).await?);
    drop(starting);
    tokio::select! {
        // The pages are served for as long as the process lives.
        () = pages => Ok(true),
        clean = shutdown(drain, args.common.drain_timeout) => {
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

// === impl Parts ===

impl Parts {
    fn new(
        args: CommonArgs,
        target: Option<Target>,
        policies: Policies,
        metrics: Arc<Metrics>,
        drain: Drain,
    ) -> Result<(Self, Arc<Presented>), AppError> {
        let names = target.iter().map(|target| match &target.address {
            Address::Socket(address) => address.ip().to_string(),
            Address::Host(host, _) => host.clone(),
        });
        let presented = Arc::new(Presented::load(args.certificate(names)?)?);
        let parts = Self {
            tls: Arc::new(tls::server(presented.clone(), &[tls::ALPN_HTTP2, tls::ALPN_HTTP1])?),
            tls_http1: Arc::new(tls::server(presented.clone(), &[tls::ALPN_HTTP1])?),
            trust: Arc::new(Trust::load(&args.upstream_ca)?),
            http1_only: Arc::default(),
            args,
            target,
            policies,
            metrics,
            drain,
        };
        Ok((parts, presented))
    }

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

/// The policy from where the arguments say, followed until shutdown.
fn policy(args: &PolicyArgs, metrics: &Arc<Metrics>, drain: &Drain) -> Result<Current, AppError> {
    let source = args.source();
    let first = source.as_ref().map(policy::load).transpose()?.unwrap_or_default();
    let (sender, current) = watch::channel(Arc::new(first));
    let stop = drain.clone();
    drain.spawn(async move {
        let following = async move {
            match source {
                Some(source) => policy::follow(source, sender).await,
                // Nothing can change, but whoever waits for a change is to wait.
                None => sender.closed().await,
            }
        };
        tokio::select! {
            () = stop.started() => {}
            () = following => {}
        }
    });
    let pod =
        args.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)).unwrap_or_default();
    drain.spawn(show(current.clone(), pod, metrics.clone(), drain.clone()));
    Ok(current)
}

/// Shows the epoch in force, until shutdown.
async fn show(mut current: Current, pod: String, metrics: Arc<Metrics>, drain: Drain) {
    loop {
        let epoch = current.borrow_and_update().epoch;
        metrics.epoch(&pod, epoch);
        info!(pod, epoch, "policy in force");
        tokio::select! {
            () = drain.started() => return,
            changed = current.changed() => if changed.is_err() { return },
        }
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
async fn shutdown(drain: Drain, deadline: std::time::Duration) -> Result<bool, AppError> {
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
