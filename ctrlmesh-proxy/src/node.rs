//! Serves the pods of a node.
//!
//! `reconciler` serves the pods of a list, four times a second and whenever something changed. One process at a time
//! does so (`handover`). A process that is told to stop serves until its successor does. Where ctrlmesh is removed, no
//! successor comes, and it takes everything out of the kernel (`removal`).

mod network;
mod pod_list;
mod pod_source;
mod enrolled_pod;
mod cgroup_watch;
mod error;
mod heartbeat;
mod reconciler;
mod api_client;
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

pub use error::NodeError;
pub use pod_list::{CgroupLocation, Pod, PodsError, ServedBy};
pub use pod_source::Source;
pub use reconciler::BySlot;
pub use removal::{Removal, RemovalCheck};

/// How soon the serving lock is tried again, while its holder starts or ends.
const SOON: Duration = Duration::from_millis(10);

/// How long those who have just connected have to ask what they came for: a new connection that ends before is an error
/// for most clients, while they connect again where an old one ends.
const LINGERS: Duration = Duration::from_secs(2);

/// How to serve a node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Who says which pods.
    pub pods: Source,
    /// What of their connections is redirected.
    pub targets: Targets,
    /// Where that arrives in each network namespace.
    pub port: u16,
    /// Folder in which it is kept what pods may have read; without it, that is known of no pod.
    pub state: Option<PathBuf>,
    /// What is taken out of the kernel in the end, and whether.
    pub removal: Removal,
    /// How one process follows another.
    pub handover: Option<Handover>,
}

/// How one process follows another.
#[derive(Clone, Debug)]
pub struct Handover {
    /// The folder in which they meet.
    pub folder: PathBuf,
    /// How long a process that is told to stop serves on where none has come yet to follow it.
    pub patience: Duration,
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
    /// Another one does.
    Followed,
    /// Nobody does, and what comes is refused.
    Over,
    /// Nobody will, ever.
    Removed,
}

impl Node {
    /// Loads the kernel programs and reads the list for the first time.
    ///
    /// # Errors
    /// If the kernel does not let us, or there is no list.
    pub fn open(
        settings: Settings,
        acceptor: Acceptor,
        served: BySlot,
        drain: Drain,
    ) -> Result<Self, NodeError> {
        let Settings { pods, targets, port, state, removal, handover } = settings;
        let ways = ReconcilerConfig { targets, port, pins: removal.pins.clone(), state };
        let reconciler = Reconciler::open(pods, ways, acceptor, served, drain.clone())?;
        Ok(Self { reconciler, removal, handover, drain })
    }

    /// Serves until it is `asked` to leave, and what that takes is done; `starting` is dropped once all pods have been
    /// tried, of those that are to be served, or once the process is ready to follow another one.
    pub async fn run(mut self, starting: BlockReady, asked: CancellationToken) {
        let mut starting = Some(starting);
        let Takeover { mut serving_lock, listeners, before } = tokio::select! {
            // Another process serves, and goes on.
            () = asked.cancelled() => return self.removal.if_due().await,
            begun = Box::pin(self.come(&mut starting)) => begun,
        };
        // This process holds the lock now. If it is asked to leave, it serves first, and then looks for a successor.
        self.reconciler.inherit(listeners).await;
        if let Some(before) = before {
            // Where it has not waited, it need not know.
            let _gone = before.serves().await;
        }
        match Box::pin(self.serve(&mut serving_lock, &mut starting, &asked)).await {
            Stop::Followed => {
                info!("another process serves the pods of this node now");
                self.reconciler.close();
                time::sleep(LINGERS).await;
            }
            Stop::Over => self.reconciler.close(),
            Stop::Removed => {
                self.reconciler.close();
                self.removal.carry_out();
            }
        }
    }

    /// Waits until this process holds the lock. Cancelling loses nothing.
    async fn come(&mut self, starting: &mut Option<BlockReady>) -> Takeover {
        let Some(Handover { folder, .. }) = self.handover.clone() else {
            return Takeover::default();
        };
        loop {
            match handover::claim(&folder) {
                Ok(Claim::Ours(serving_lock)) => {
                    return Takeover { serving_lock: Some(serving_lock), ..Takeover::default() };
                }
                Ok(Claim::Later) => time::sleep(SOON).await,
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

    /// Waits for what the process before this one gives; nothing where that has ended without.
    async fn follow(
        &mut self,
        mut before: handover::Predecessor,
        starting: &mut Option<BlockReady>,
    ) -> Option<Takeover> {
        let given = loop {
            if self.reconciler.knows() {
                drop(starting.take());
            }
            tokio::select! {
                given = before.gives() => break given,
                // It is ready as soon as it knows whom it will serve.
                () = self.reconciler.news() => {}
            }
        };
        let taken = match given {
            Ok(true) => before.take().await,
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

    /// Serves until there is a reason not to.
    async fn serve(
        &mut self,
        serving_lock: &mut Option<ServingLock>,
        starting: &mut Option<BlockReady>,
        asked: &CancellationToken,
    ) -> Stop {
        let drain = self.drain.clone();
        let mut ticks = ticks();
        let mut removed = pin!(self.removal.clone().once_asked(asked.clone()));
        let (mut leaving, mut alone) = (false, pin!(self.patience(asked.clone())));
        loop {
            if self.reconciler.knows() {
                drop(starting.take());
            }
            if leaving && self.gives(serving_lock).await {
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
                _ = ticks.tick() => self.reconciler.look(),
                () = self.reconciler.news() => {}
                () = attend(serving_lock) => {}
            }
            self.reconciler.pass().await;
        }
    }

    /// Gives everything to the process that waits to follow, where there is one; gives whether that has it now.
    async fn gives(&self, serving_lock: &mut Option<ServingLock>) -> bool {
        let Some(serving_lock) =
            serving_lock.as_mut().filter(|serving_lock| serving_lock.has_successor())
        else {
            return false;
        };
        let given = match self.reconciler.listeners() {
            Ok(listeners) => serving_lock.give(listeners).await,
            Err(error) => Err(error),
        };
        given.inspect_err(warn_of("give the pods to the process that follows")).is_ok()
    }

    /// Completes when nobody is waited for any more.
    fn patience(&self, asked: CancellationToken) -> impl Future<Output = ()> + use<> {
        let patience = self.handover.as_ref().map(|handover| handover.patience);
        async move {
            asked.cancelled().await;
            time::sleep(patience.unwrap_or_default()).await;
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("handover", &self.handover).finish_non_exhaustive()
    }
}

/// Lets in who follows, where somebody may.
async fn attend(serving_lock: &mut Option<ServingLock>) {
    let Some(serving_lock) = serving_lock else { return std::future::pending().await };
    if let Err(error) = serving_lock.attend().await {
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
