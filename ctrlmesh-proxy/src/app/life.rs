//! How does the process begin, show itself, and stop?
//!
//! Signals are waited for and the pages shown before anything else is begun: a proxy that waits for the manager can be
//! told to stop, and whoever looks sees that it lives.

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
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::readiness::Readiness;

/// How often an address is tried that the process before this one still has.
const AGAIN: Duration = Duration::from_millis(100);

/// What every mode begins with.
#[derive(Clone)]
pub(super) struct Process {
    pub(super) args: CommonArgs,
    pub(super) metrics: Arc<Metrics>,
    pub(super) readiness: Readiness,
    pub(super) drain: Drain,
}

/// What there is once the proxy has begun.
#[derive(Default)]
pub(super) struct Begun {
    pub(super) workers: Vec<JoinHandle<()>>,
    pub(super) leave: Option<Leave>,
}

/// Who has something to do before connections are told to end, and still serves meanwhile.
pub(super) struct Leave {
    /// Tells so.
    pub(super) asked: CancellationToken,
    /// Done, also where nobody is there to say so.
    pub(super) done: oneshot::Receiver<()>,
}

// === impl Process ===

impl Process {
    pub(super) fn new(args: CommonArgs) -> Self {
        let (metrics, readiness, drain) = (Metrics::new(), Readiness::default(), Drain::default());
        Self { args, metrics, readiness, drain }
    }

    /// Begins, and runs until it is told to stop; returns whether everything ended in time. What is told to stop before
    /// it has begun does `instead` of ending what there is. Where there is a `socket`, the pages are there in any case,
    /// and at their address as soon as no process before this one has it any more.
    pub(super) async fn live(
        self,
        socket: Option<&Path>,
        begin: impl Future<Output = Result<Begun, AppError>>,
        instead: impl Future<Output = ()>,
    ) -> Result<bool, AppError> {
        let mut stop = Termination::listen().map_err(AppError::Runtime)?;
        let pages = self.clone().pages(socket).await?;
        let Self { args, drain, .. } = self;
        let life = async {
            let there = tokio::select! {
                done = begin => done?,
                // It still waits for what it needs.
                () = stop.requested() => {
                    info!("told to stop before it has begun");
                    instead.await;
                    return Ok(finish(drain, args.drain_timeout, Begun::default()).await);
                }
            };
            info!("begun");
            stop.requested().await;
            Ok(finish(drain, args.drain_timeout, there).await)
        };
        tokio::select! {
            // They are served for as long as the process lives.
            () = pages => Ok(true),
            clean = life => clean,
        }
    }

    async fn pages(
        self,
        socket: Option<&Path>,
    ) -> Result<impl Future<Output = ()> + use<>, AppError> {
        let Self { args, metrics, readiness, drain } = self;
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
                    let here = admin.clone().run(async || Ok(own.accept().await?.0));
                    tokio::join!(here, shared(admin, address, drain));
                }
                (None, Some(listener)) => admin.run_at(listener).await,
                (None, None) => {}
            }
        })
    }
}

/// Stops; returns whether everything ended in time.
async fn finish(drain: Drain, deadline: Duration, Begun { workers, leave }: Begun) -> bool {
    if let Some(Leave { asked, done }) = leave {
        asked.cancel();
        // Where it is gone without a word, there is nothing to wait for, either.
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

/// Shows the pages at an address that the process before this one may still have, and leaves it to the next one.
async fn shared(admin: Admin, address: SocketAddr, drain: Drain) {
    let mut said = false;
    let listener = loop {
        match listen("admin", address) {
            Ok(listener) => break listener,
            Err(error) if !said => {
                said = true;
                info!(error = telemetry::chain(&error), "the address of the pages is tried again");
            }
            Err(_) => {}
        }
        time::sleep(AGAIN).await;
    };
    tokio::select! {
        () = drain.started() => {}
        () = admin.run_at(listener) => {}
    }
}
