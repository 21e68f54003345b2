//! Serves the pods of a node.
//!
//! `reconciler` keeps the kernel and the listeners as the list of pods says, four times a second and at each change.
//! One process at a time does so (`handover`). A process that is told to stop serves until its successor does. Where
//! ctrlmesh is removed, no successor comes, and it takes everything out of the kernel (`removal`).

mod network;
mod pod_list;
mod pod_source;
mod error;
mod inbound;
mod enrolled_pod;
mod cgroup_watch;
mod heartbeat;
mod restart;
mod bypass;
mod reconciler;
mod api_client;
mod announce;
mod removal;
mod handover;

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::time;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::net::accept::Acceptor;
use crate::node::handover::{Claim, Link, ServingLock};
use crate::node::network::InheritedListener;
use crate::node::reconciler::{Reconciler, ReconcilerConfig};
use crate::policy::file_poll::POLL_INTERVAL;
use ctrlmesh_intercept::Targets;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::readiness::BlockReady;

pub use announce::Announcement;
pub use api_client::ApiClient;
pub use error::NodeError;
pub use pod_list::{CgroupLocation, Pod, PodsError, ServedBy};
pub use pod_source::Source;
pub use reconciler::BySlot;
pub use removal::{Removal, RemovalCheck};

/// Between attempts to take the serving lock, while its holder starts or ends.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// The old process serves its open connections for so long after a handover. For most clients it is an error when a new
/// connection ends before its first request; after that they connect again.
const LINGER: Duration = Duration::from_secs(2);

/// How to serve a node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The source of the list of pods.
    pub pods: Source,
    /// The destinations that are redirected.
    pub targets: Targets,
    /// The port of the listener in each network namespace.
    pub port: u16,
    /// Folder of the pods' histories; without it, every history is unknown.
    pub state: Option<PathBuf>,
    /// What to do when ctrlmesh is removed.
    pub removal: Removal,
    /// `None` where no process follows this one.
    pub handover: Option<Handover>,
    /// How long writes may take to end that a new policy forbids.
    pub write_drain_timeout: Duration,
    /// Whether what pods send to the API server past the proxy is dropped.
    pub drop_bypass: bool,
}

/// How one process follows another.
#[derive(Clone, Debug)]
pub struct Handover {
    /// The folder of the lock file and the handover socket.
    pub folder: PathBuf,
    /// On SIGTERM without a successor, the process serves on for so long.
    pub timeout: Duration,
}

/// Serves the pods of a node.
pub struct Node {
    reconciler: Reconciler,
    removal: Removal,
    handover: Option<Handover>,
    drain: Drain,
}

/// What a process takes over from its predecessor.
#[derive(Default)]
struct Takeover {
    serving_lock: Option<ServingLock>,
    listeners: Vec<InheritedListener>,
    before: Option<Link>,
}

/// Why a process stops serving.
enum Stop {
    /// Another process serves now.
    Followed,
    /// No other process has come; the kernel refuses new connections.
    Over,
    /// ctrlmesh is removed.
    Removed,
}

impl Node {
    /// Loads the kernel programs and reads the list for the first time.
    ///
    /// # Errors
    /// If the kernel does not let us, or there is no list.
    pub fn open(settings: Settings, acceptor: Acceptor, served: BySlot, drain: Drain) -> Result<Self, NodeError> {
        let Settings { pods, targets, port, state, removal, handover, write_drain_timeout, drop_bypass } = settings;
        let pins = removal.pins.clone();
        let config = ReconcilerConfig { targets, port, pins, state, write_drain_timeout, drop_bypass };
        let reconciler = Reconciler::open(pods, config, acceptor, served, drain.clone())?;
        Ok(Self { reconciler, removal, handover, drain })
    }

    /// Serves until it is `asked` to leave and has handed over. Drops `starting` once every pod was tried, or once the
    /// process is ready to follow another one.
    pub async fn run(mut self, starting: BlockReady, asked: CancellationToken) {
        let mut starting = Some(starting);
        let Takeover { mut serving_lock, listeners, before } = tokio::select! {
            // Another process serves, and goes on.
            () = asked.cancelled() => return self.removal.if_due().await,
            begun = Box::pin(self.acquire(&mut starting)) => begun,
        };
        // This process holds the lock now. If it is asked to leave, it serves first, and then looks for a successor.
        self.reconciler.inherit(listeners).await;
        if let Some(before) = before {
            // Fails only where that process has ended.
            let _gone = before.confirm_serving().await;
        }
        match Box::pin(self.serve(&mut serving_lock, &mut starting, &asked)).await {
            Stop::Followed => {
                info!("another process serves the pods of this node now");
                self.reconciler.close();
                time::sleep(LINGER).await;
            }
            Stop::Over => self.reconciler.close(),
            Stop::Removed => {
                self.reconciler.close();
                self.removal.carry_out();
            }
        }
    }

    /// Waits until this process holds the lock. Cancel safe.
    async fn acquire(&mut self, starting: &mut Option<BlockReady>) -> Takeover {
        let Some(Handover { folder, .. }) = self.handover.clone() else {
            return Takeover::default();
        };
        loop {
            match handover::claim(&folder) {
                Ok(Claim::Ours(serving_lock)) => {
                    return Takeover { serving_lock: Some(serving_lock), ..Takeover::default() };
                }
                Ok(Claim::Later) => time::sleep(LOCK_RETRY).await,
                Ok(Claim::Theirs(before)) => {
                    info!("another process serves the pods of this node, waiting to follow it");
                    if let Some(begun) = self.follow(before, starting).await {
                        return begun;
                    }
                }
                Err(error) => {
                    warn_of("see whether another process serves the pods")(&error);
                    time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    /// Waits for the handover of the process before this one; `None` where that ends without one.
    async fn follow(
        &mut self,
        mut before: handover::Predecessor,
        starting: &mut Option<BlockReady>,
    ) -> Option<Takeover> {
        let given = loop {
            if self.reconciler.knows_pods() {
                drop(starting.take());
            }
            tokio::select! {
                given = before.receive_all() => break given,
                // This process is ready as soon as it has the list.
                () = self.reconciler.wait_for_change() => {}
            }
        };
        let taken = match given {
            Ok(true) => before.accept().await,
            Ok(false) => return None,
            Err(error) => Err(error),
        };
        match taken {
            Ok((serving_lock, listeners, link)) => {
                info!(listeners = listeners.len(), "follows the process before");
                Some(Takeover { serving_lock: Some(serving_lock), listeners, before: Some(link) })
            }
            Err(error) => {
                warn_of("follow the process that serves the pods")(&error);
                time::sleep(POLL_INTERVAL).await;
                None
            }
        }
    }

    /// Serves until there is a reason to stop.
    async fn serve(
        &mut self,
        serving_lock: &mut Option<ServingLock>,
        starting: &mut Option<BlockReady>,
        asked: &CancellationToken,
    ) -> Stop {
        let drain = self.drain.clone();
        let mut ticks = ticks();
        let mut removed = pin!(self.removal.clone().once_asked(asked.clone()));
        let (mut leaving, mut alone) = (false, pin!(self.successor_timeout(asked.clone())));
        loop {
            if self.reconciler.knows_pods() {
                drop(starting.take());
            }
            if leaving && self.hand_over(serving_lock).await {
                return Stop::Followed;
            }
            tokio::select! {
                biased;
                // Shutdown, without being asked to leave.
                () = drain.started() => return Stop::Over,
                gone = &mut removed, if !leaving => {
                    if gone {
                        return Stop::Removed;
                    }
                    if serving_lock.is_none() {
                        return Stop::Over;
                    }
                    leaving = true;
                }
                () = &mut alone, if leaving => {
                    info!("no other process has come to serve the pods of this node");
                    return if self.removal.is_due().await { Stop::Removed } else { Stop::Over };
                }
                _ = ticks.tick() => self.reconciler.find_cgroups(),
                () = self.reconciler.wait_for_change() => {}
                () = accept_successor(serving_lock) => {}
            }
            self.reconciler.pass().await;
        }
    }

    /// Hands over to the successor, if there is one. Returns whether it serves now.
    async fn hand_over(&self, serving_lock: &mut Option<ServingLock>) -> bool {
        let Some(serving_lock) = serving_lock.as_mut().filter(|serving_lock| serving_lock.has_successor()) else {
            return false;
        };
        let given = match self.reconciler.listeners() {
            Ok(listeners) => serving_lock.give(listeners).await,
            Err(error) => Err(error),
        };
        given.inspect_err(warn_of("give the pods to the process that follows")).is_ok()
    }

    /// Completes when no successor is waited for any more.
    fn successor_timeout(&self, asked: CancellationToken) -> impl Future<Output = ()> + use<> {
        let timeout = self.handover.as_ref().map(|handover| handover.timeout);
        async move {
            asked.cancelled().await;
            time::sleep(timeout.unwrap_or_default()).await;
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("handover", &self.handover).finish_non_exhaustive()
    }
}

/// Accepts a successor's connection; pending where no process can follow.
async fn accept_successor(serving_lock: &mut Option<ServingLock>) {
    let Some(serving_lock) = serving_lock else { return std::future::pending().await };
    if let Err(error) = serving_lock.accept_successor().await {
        warn_of("let in who follows")(&error);
        time::sleep(POLL_INTERVAL).await;
    }
}

fn warn_of(doing: &'static str) -> impl FnOnce(&io::Error) {
    move |error| warn!(error = error as &dyn std::error::Error, doing, "no hand-over")
}

fn ticks() -> Interval {
    let mut ticks = time::interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
