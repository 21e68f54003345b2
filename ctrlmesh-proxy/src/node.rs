//! Which pods of this node are served?
//!
//! Those of a list (`keeper`), by one process at a time (`charge`). The list and what became of the pods are looked at
//! four times a second, and whenever there is news. A process that is told to stop serves on until the one that follows
//! it does; and it takes everything out of the kernel where none will, because ctrlmesh is removed (`end`).

mod network;
mod pods;
mod roster;
mod enrolled;
mod arrivals;
mod error;
mod pulse;
mod keeper;
mod ask;
mod end;
mod charge;

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::time;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::drain::Drain;
use crate::net::accept::Acceptor;
use crate::node::charge::{Charge, Claim, Link};
use crate::node::keeper::{Keeper, Ways};
use crate::node::network::Heirloom;
use crate::policy::file_poll::POLL_INTERVAL;
use crate::readiness::BlockReady;
use ctrlmesh_intercept::Targets;

pub use end::{End, Removal};
pub use error::NodeError;
pub use keeper::BySlot;
pub use pods::{Place, Pod, PodsError, Taker};
pub use roster::Source;

/// How soon it is looked again whose the charge is, where another process has it and cannot be asked.
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
    keeper: Keeper,
    removal: Removal,
    handover: Option<Handover>,
    drain: Drain,
}

/// What a process in charge holds.
type Held = Option<Charge>;

/// What a process begins with.
#[derive(Default)]
struct Begun {
    charge: Held,
    heirlooms: Vec<Heirloom>,
    /// The way to the process that was in charge before.
    before: Option<Link>,
}

/// Why a process serves no more.
enum Why {
    /// Another one does.
    Followed,
    /// Nobody does, and what comes is refused.
    Over,
    /// Nobody will, ever.
    Removed,
}

// === impl Node ===

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
        let ways = Ways { targets, port, pins: removal.pins.clone(), state };
        let keeper = Keeper::open(pods, ways, acceptor, served, drain.clone())?;
        Ok(Self { keeper, removal, handover, drain })
    }

    /// Serves until it is `asked` to leave, and what that takes is done; `starting` is dropped once all pods have been
    /// tried, of those that are to be served, or once the process is ready to follow another one.
    pub async fn run(mut self, starting: BlockReady, asked: CancellationToken) {
        let mut starting = Some(starting);
        let Begun { mut charge, heirlooms, before } = tokio::select! {
            // Another process is in charge, and stays so.
            () = asked.cancelled() => return self.removal.if_due().await,
            begun = Box::pin(self.come(&mut starting)) => begun,
        };
        // Nobody else has the charge from here on: who is asked to leave first serves, and then sees who follows.
        self.keeper.inherit(heirlooms).await;
        if let Some(before) = before {
            // Where it has not waited, it need not know.
            let _gone = before.serves().await;
        }
        match Box::pin(self.serve(&mut charge, &mut starting, &asked)).await {
            Why::Followed => {
                info!("another process serves the pods of this node now");
                self.keeper.close();
                time::sleep(LINGERS).await;
            }
            Why::Over => self.keeper.close(),
            Why::Removed => {
                self.keeper.close();
                self.removal.carry_out();
            }
        }
    }

    /// Waits until this process is in charge. Nothing is lost where it waits no longer.
    async fn come(&mut self, starting: &mut Option<BlockReady>) -> Begun {
        let Some(Handover { folder, .. }) = self.handover.clone() else {
            return Begun::default();
        };
        loop {
            match charge::claim(&folder) {
                Ok(Claim::Ours(charge)) => {
                    return Begun { charge: Some(charge), ..Begun::default() };
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
        mut before: charge::Predecessor,
        starting: &mut Option<BlockReady>,
    ) -> Option<Begun> {
        let given = loop {
            if self.keeper.knows() {
                drop(starting.take());
            }
            tokio::select! {
                given = before.gives() => break given,
                // It is ready as soon as it knows whom it will serve.
                () = self.keeper.news() => {}
            }
        };
        let taken = match given {
            Ok(true) => before.take().await,
            Ok(false) => return None,
            Err(error) => Err(error),
        };
        match taken {
            Ok((charge, heirlooms, link)) => {
                info!(listeners = heirlooms.len(), "follows the process before");
                Some(Begun { charge: Some(charge), heirlooms, before: Some(link) })
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
        charge: &mut Held,
        starting: &mut Option<BlockReady>,
        asked: &CancellationToken,
    ) -> Why {
        let drain = self.drain.clone();
        let mut ticks = ticks();
        let mut removed = pin!(self.removal.clone().once_asked(asked.clone()));
        let (mut leaving, mut alone) = (false, pin!(self.patience(asked.clone())));
        loop {
            if self.keeper.knows() {
                drop(starting.take());
            }
            if leaving && self.gives(charge).await {
                return Why::Followed;
            }
            tokio::select! {
                biased;
                // Shutdown, without being asked to leave.
                () = drain.started() => return Why::Over,
                gone = &mut removed, if !leaving => {
                    if gone {
                        return Why::Removed;
                    }
                    if charge.is_none() {
                        return Why::Over;
                    }
                    leaving = true;
                }
                () = &mut alone, if leaving => {
                    info!("no other process has come to serve the pods of this node");
                    return if self.removal.is_due().await { Why::Removed } else { Why::Over };
                }
                _ = ticks.tick() => self.keeper.look(),
                () = self.keeper.news() => {}
                () = attend(charge) => {}
            }
            self.keeper.pass().await;
        }
    }

    /// Gives everything to the process that waits to follow, where there is one; gives whether that has it now.
    async fn gives(&self, charge: &mut Held) -> bool {
        let Some(charge) = charge.as_mut().filter(|charge| charge.has_successor()) else {
            return false;
        };
        let given = match self.keeper.heirlooms() {
            Ok(heirlooms) => charge.give(heirlooms).await,
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
async fn attend(charge: &mut Held) {
    let Some(charge) = charge else { return std::future::pending().await };
    if let Err(error) = charge.attend().await {
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
