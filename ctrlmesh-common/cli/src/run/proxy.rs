//! Serves one command with the sidecar's own serving threads.
//!
//! The proxy has a thread of its own; the process's first thread waits for the command.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio::time;
use tokio_rustls::TlsConnector;

use crate::run::cluster::Cluster;
use crate::run::egress::EgressProxy;
use crate::run::egress::tunnel;
use crate::run::error::RunError;
use crate::run::signals::Event;
use ctrlmesh_proxy::app::{AppError, Parts};
use ctrlmesh_proxy::config::CommonArgs;
use ctrlmesh_proxy::guard::PodGuards;
use ctrlmesh_proxy::metrics::Metrics;
use ctrlmesh_proxy::net::accept::{Acceptor, Origin, PodLimits};
use ctrlmesh_proxy::net::memory_budget::MemoryBudget;
use ctrlmesh_proxy::net::tls;
use ctrlmesh_proxy::net::tls::issue::ServingCertificate;
use ctrlmesh_proxy::net::tls::trust::Trust;
use ctrlmesh_proxy::policy;
use ctrlmesh_proxy::serve::explain;
use ctrlmesh_proxy::session::{Policies, ServedPod};
use ctrlmesh_proxy::upstream::{Address, Target};
use ctrlmesh_runtime::drain::Drain;

/// How long requests of whoever the command left behind may take to end.
const DRAIN: Duration = Duration::from_secs(1);

/// What is served, and how.
pub(crate) struct Setup {
    pub(crate) args: CommonArgs,
    pub(crate) listener: TcpListener,
    pub(crate) cluster: Cluster,
    pub(crate) through: Option<EgressProxy>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) presented: Arc<ServingCertificate>,
    /// Whom to serve.
    pub(crate) verifier: Arc<dyn ClientCertVerifier>,
    pub(crate) policy: Policy,
    /// Where the policy changes, if it can.
    pub(crate) source: Option<policy::Source>,
}

/// The proxy, serving.
pub(crate) struct Proxy {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    metrics: Arc<Metrics>,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) accepted: u64,
    pub(crate) tls_failed: u64,
    pub(crate) requests: u64,
    pub(crate) injected: u64,
    pub(crate) refused: u64,
}

impl Proxy {
    /// Begins to serve; `events` hears once it does, or why not.
    pub(crate) fn start(setup: Setup, events: Sender<Event>) -> Result<Self, RunError> {
        let metrics = Metrics::new();
        let counted = metrics.clone();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new().name("proxy".to_owned());
        let thread = thread.spawn(move || {
            let outcome = serve(setup, counted, &events, stopped);
            if let Err(error) = outcome {
                let _ended = events.send(Event::Proxy(Err(Box::new(error))));
            }
        });
        let thread = thread.map_err(RunError::Start)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), metrics })
    }

    /// Ends it; what it has counted.
    pub(crate) fn finish(mut self) -> Counts {
        self.end();
        counts(&self.metrics.render().unwrap_or_default())
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.end();
    }
}

fn serve(
    setup: Setup,
    metrics: Arc<Metrics>,
    events: &Sender<Event>,
    mut stopped: oneshot::Receiver<()>,
) -> Result<(), RunError> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(RunError::Start)?;
    let outcome = runtime.block_on(async {
        let drain = Drain::default();
        let workers = tokio::select! {
            // Whoever waits for it gave up.
            _ = &mut stopped => Ok(Vec::new()),
            workers = begin(setup, metrics, &drain) => workers,
        };
        let served = workers.is_ok() && !stopped.is_terminated();
        if served {
            let _ended = events.send(Event::Proxy(Ok(())));
            // Only ever dropped.
            let _stop = stopped.await;
        }
        drain.finish(DRAIN).await;
        for worker in workers? {
            let _panicked = worker.join();
        }
        Ok(())
    });
    // A name may still be looked up, which nobody can end.
    runtime.shutdown_background();
    outcome
}

async fn begin(setup: Setup, metrics: Arc<Metrics>, drain: &Drain) -> Result<Vec<JoinHandle<()>>, RunError> {
    let mut target = setup.cluster.target.clone();
    if let Some(through) = setup.through {
        let bridge = tunnel::start(through, setup.cluster.server.clone(), drain);
        target.address = Address::Socket(bridge.await.map_err(RunError::Start)?);
    }
    reach(&setup.trust, &target, setup.args.connect_timeout)
        .await
        .map_err(|source| RunError::Unreachable { url: setup.cluster.url, source })?;
    let tls = |protocols| -> Result<Arc<ServerConfig>, AppError> {
        let verifier = setup.verifier.clone();
        Ok(Arc::new(tls::server_for(verifier, setup.presented.clone(), protocols)?))
    };
    let policy = follow(setup.policy, setup.source, drain);
    let guards = PodGuards::new(policy.clone(), &metrics, None);
    let parts = Parts {
        tls: tls(&[tls::ALPN_HTTP2, tls::ALPN_HTTP1])?,
        tls_http1: tls(&[tls::ALPN_HTTP1])?,
        webhooks: None,
        trust: setup.trust.clone(),
        http1_only: Arc::default(),
        target: Some(target),
        policies: Policies::One(ServedPod::new(policy, Arc::default(), guards, None)),
        metrics: metrics.clone(),
        tracer: None,
        listeners: Arc::default(),
        drain: drain.clone(),
        args: setup.args.clone(),
    };
    drain.spawn(setup.presented.follow(drain.clone()));
    drain.spawn(setup.trust.follow(drain.clone()));
    let (threads, workers) = parts.start()?;
    let max_connections = setup.args.max_connections;
    let budget = MemoryBudget::for_process(setup.args.memory_limit, &metrics);
    let per_pod = PodLimits::new(max_connections, budget);
    let acceptor = Acceptor { threads, max_connections, per_pod, metrics };
    setup.listener.set_nonblocking(true).map_err(RunError::Start)?;
    let listener = tokio::net::TcpListener::from_std(setup.listener).map_err(RunError::Start)?;
    drain.spawn(acceptor.run(listener, |_: &_, _, _| Some(Origin::default()), drain.clone()));
    Ok(workers)
}

/// The policy that holds, as its file changes.
fn follow(policy: Policy, source: Option<policy::Source>, drain: &Drain) -> policy::Current {
    let (sender, current) = watch::channel(Arc::new(policy));
    let (stop, mut changes) = (drain.clone(), current.clone());
    let telling = async move {
        while changes.changed().await.is_ok() {
            explain::note(format_args!("the policy changed"));
            explain::policy(&changes.borrow_and_update());
        }
    };
    drain.spawn(async move {
        let following = async move {
            match source {
                Some(source) => policy::follow(source, sender).await,
                // Nothing can change, but whoever waits for a change is to wait.
                None => sender.closed().await,
            }
        };
        tokio::select! {
            // The run is over.
            () = stop.started() => {}
            // Nobody is interested any more.
            () = following => {}
            () = telling => {}
        }
    });
    current
}

/// Whether the API server is there, and is whom we believe.
async fn reach(trust: &Trust, target: &Target, deadline: Duration) -> std::io::Result<()> {
    let connecting = async {
        let stream = match &target.address {
            Address::Socket(address) => tokio::net::TcpStream::connect(address).await?,
            Address::Host(host, port) => tokio::net::TcpStream::connect((host.as_str(), *port)).await?,
        };
        let connector = TlsConnector::from(trust.client().http1);
        connector.connect(target.name.clone(), stream).await.map(drop)
    };
    time::timeout(deadline, connecting).await.unwrap_or_else(|_elapsed| {
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no answer in {deadline:?}")))
    })
}

/// Reads the page that Prometheus would get.
fn counts(page: &str) -> Counts {
    let sum = |series: &str| {
        let values = page.lines().filter_map(|line| {
            let rest = line.strip_prefix("ctrlmesh_proxy_")?.strip_prefix(series)?;
            rest.starts_with(['{', ' ']).then_some(rest)?.rsplit(' ').next()?.parse::<u64>().ok()
        });
        values.sum()
    };
    let tls = r#"client_errors_total{reason="tls"}"#;
    Counts {
        accepted: sum("accepted_total"),
        tls_failed: sum(tls),
        requests: sum("requests_total"),
        injected: sum("injected_total"),
        refused: sum("refused_total"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ctrlmesh_proxy::metrics::{ClientError, Outcome, Verb};

    #[test]
    fn what_was_counted_is_read_from_the_metrics() {
        let metrics = Metrics::new();
        metrics.end_request(Verb::of("list"), Outcome::Ok);
        metrics.end_request(Verb::of("watch"), Outcome::Refused);
        metrics.injected.inc();
        metrics.accepted.inc_by(3);
        metrics.client_error(ClientError::Tls);
        let counted = counts(&metrics.render().unwrap());
        let expected = Counts { accepted: 3, tls_failed: 1, requests: 2, injected: 1, refused: 0 };
        assert_eq!(counted, expected);
    }
}
