//! Start, admin pages and shutdown of the process.
//!
//! Signals and the pages come first: a proxy that waits for the manager can be stopped, and answers its liveness probe.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ctrlmesh_runtime::admin::{self, Admin, Probes};
use ctrlmesh_runtime::listen::listen;
use ctrlmesh_runtime::telemetry;
use ctrlmesh_runtime::termination::Termination;
use tokio::sync::oneshot;
use tokio::time;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::AppError;
use crate::config::CommonArgs;
use crate::metrics::Metrics;
use crate::spans::SpanArgs;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::readiness::Readiness;

/// Between attempts to listen at an address that the process before this one still has.
const LISTEN_RETRY: Duration = Duration::from_millis(100);

/// What both modes need.
#[derive(Clone)]
pub(super) struct Process {
    pub(super) args: CommonArgs,
    pub(super) spans: SpanArgs,
    pub(super) metrics: Arc<Metrics>,
    pub(super) readiness: Readiness,
    pub(super) drain: Drain,
}

/// The running parts that shutdown has to wait for.
#[derive(Default)]
pub(super) struct RunningParts {
    pub(super) workers: Vec<JoinHandle<()>>,
    pub(super) leave: Option<Leave>,
}

/// A part that serves on until it has left, before other connections are told to end.
pub(super) struct Leave {
    /// Asks the part to leave.
    pub(super) asked: CancellationToken,
    /// Resolves once the part has left, or has been dropped.
    pub(super) done: oneshot::Receiver<()>,
}

impl Process {
    pub(super) fn new(args: CommonArgs, spans: SpanArgs) -> Self {
        let metrics = Metrics::with_exemplars(spans.otlp_endpoint.is_some());
        let (readiness, drain) = (Readiness::default(), Drain::default());
        Self { args, spans, metrics, readiness, drain }
    }

    /// Runs until SIGTERM or SIGINT; returns whether everything ended in time.
    ///
    /// A process that is stopped before `start` is done runs `instead`. With a `socket`, the pages are there at once;
    /// their TCP address follows when the process before this one has released it.
    pub(super) async fn live(
        self,
        socket: Option<&Path>,
        start: impl Future<Output = Result<RunningParts, AppError>>,
        instead: impl Future<Output = ()>,
    ) -> Result<bool, AppError> {
        let mut stop = Termination::listen().map_err(AppError::Runtime)?;
        let pages = self.clone().pages(socket)?;
        let Self { args, drain, .. } = self;
        let life = async {
            let begun = tokio::select! {
                done = start => done?,
                // Stopped before it has begun.
                () = stop.requested() => {
                    info!("told to stop before it has begun");
                    instead.await;
                    return Ok(finish(drain, args.drain_timeout, RunningParts::default()).await);
                }
            };
            info!("begun");
            stop.requested().await;
            Ok(finish(drain, args.drain_timeout, begun).await)
        };
        tokio::select! {
            // The pages are served until the process ends.
            () = pages => Ok(true),
            clean = life => clean,
        }
    }

    fn pages(self, socket: Option<&Path>) -> Result<impl Future<Output = ()> + use<>, AppError> {
        let Self { args, metrics, readiness, drain, .. } = self;
        let address = args.admin_listen;
        let probes = Probes { readiness, drain: drain.clone() };
        let admin = Admin { probes: Some(probes), metrics: Some(metrics.registry()) };
        let (own, listener) = match socket {
            Some(path) => {
                let failed = |source| AppError::Socket { path: path.to_owned(), source };
                (Some(admin::bind(path).map_err(failed)?), None)
            }
            None => (None, Some(listen("admin", address)?)),
        };
        Ok(async move {
            match (own, listener) {
                (Some(own), _) => {
                    tokio::join!(admin.clone().run_on(own), shared(admin, address, drain));
                }
                (None, Some(listener)) => admin.run_at(listener).await,
                (None, None) => {}
            }
        })
    }
}

/// Returns whether everything ended in time.
async fn finish(drain: Drain, deadline: Duration, RunningParts { workers, leave }: RunningParts) -> bool {
    if let Some(Leave { asked, done }) = leave {
        asked.cancel();
        // An error means that the part has been dropped.
        let _done = done.await;
    }
    info!(?deadline, "draining");
    let clean = drain.finish(deadline).await;
    info!(clean, "drained");
    for worker in workers {
        if worker.join().is_err() {
            warn!("a serving thread panicked");
        }
    }
    clean
}

/// Serves the pages at an address that the process before this one may still have, until shutdown.
async fn shared(admin: Admin, address: SocketAddr, drain: Drain) {
    let mut logged = false;
    let listener = loop {
        match listen("admin", address) {
            Ok(listener) => break listener,
            Err(error) if !logged => {
                logged = true;
                info!(error = telemetry::chain(&error), "the address of the pages is tried again");
            }
            Err(_) => {}
        }
        time::sleep(LISTEN_RETRY).await;
    };
    tokio::select! {
        () = drain.started() => {}
        () = admin.run_at(listener) => {}
    }
}
