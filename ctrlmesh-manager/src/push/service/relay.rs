//! How does the leader learn what proxies told another replica?
//!
//! The other replica tells it, over the same gRPC, as the manager that it is: first all that it knows, then what changes,
//! a few times a second at most, and now and then all again. Of two that speak of one pod, the one to which its proxy is
//! connected counts, and else the one that heard of it later.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire::{PodId, Receipt as Said, Receipts, Relayed};
use tokio::sync::mpsc;
use tokio::time::{self, Instant};
use tonic::{Response, Status, Streaming};
use tracing::{debug, info};

use super::Push;
use super::leader::Leader;
use super::link::{Link, LinkError};
use crate::ca::store::Vault;
use crate::drain::Drain;
use crate::leader::lease::Leadership;
use crate::push::identity::Identity;
use crate::push::policy_store::{Board, Receipt};
use crate::rules::pod::PodName;
use crate::telemetry;

/// How long what changes is gathered before it is sent.
const GATHER: Duration = Duration::from_millis(300);

/// How long to wait after the leader was not reached.
const RETRY: Duration = Duration::from_secs(1);

/// How often all is sent again: what the leader did not know the pod of was lost on it.
const AGAIN: Duration = Duration::from_mins(1);

/// How many receipts go into one message: some 200 bytes each.
const IN_ONE: usize = 2000;

/// Tells the leader.
pub struct Relay {
    /// What is known here.
    pub board: Arc<Board>,
    /// Who leads.
    pub leadership: Leadership,
    /// For those who would ask it.
    pub leader: Leader,
    /// Who vouches for it.
    pub vault: Arc<Vault>,
    /// What all replicas are called.
    pub name: String,
    /// File with this replica's token.
    pub token: PathBuf,
    /// Ends with it.
    pub drain: Drain,
}

// === impl Relay ===

impl Relay {
    /// Tells whoever leads, for ever; nobody while this replica does.
    pub async fn run(mut self) {
        loop {
            let Some(leader) = self.leadership.other() else {
                self.leadership.changed().await;
                continue;
            };
            let mut leadership = self.leadership.clone();
            let another = async {
                while leadership.other().as_ref() == Some(&leader) {
                    leadership.changed().await;
                }
            };
            tokio::select! {
                // Somebody else leads.
                () = another => {}
                ended = self.tell(&leader) => {
                    if let Err(error) = ended {
                        debug!(leader = &*leader, error = telemetry::chain(&error), "the leader is not told");
                    }
                    time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn tell(&self, leader: &str) -> Result<(), LinkError> {
        let bundle = self.vault.current().manager.bundle();
        let link = Link::connect(leader, &self.name, &bundle, &self.token, &self.drain);
        let mut link = Box::pin(link).await?;
        let _held = self.leader.reached(&link);
        info!(leader, "tells the leader what its proxies say");
        let (sender, receipts) = mpsc::channel(1);
        tokio::select! {
            ended = link.relay(receipts) => ended,
            () = feed(&self.board, &sender) => Ok(()),
        }
    }
}

/// Sends all that is known, and then what changes, until nobody takes it.
async fn feed(board: &Board, sender: &mpsc::Sender<Receipts>) {
    let mut changes = board.receipts_changed();
    let mut sent: BTreeMap<PodName, Receipt> = BTreeMap::new();
    // Not at once: all is sent first anyway.
    let mut again = time::interval_at(Instant::now() + AGAIN, AGAIN);
    loop {
        changes.mark_unchanged();
        let now = board.heard_here();
        let news: Vec<Said> = now
            .iter()
            .filter(|(pod, receipt)| sent.get(*pod) != Some(*receipt))
            .map(|(pod, receipt)| said(pod, receipt))
            .collect();
        for some in news.chunks(IN_ONE) {
            if sender.send(Receipts { receipts: some.to_vec() }).await.is_err() {
                return;
            }
        }
        sent = now;
        tokio::select! {
            ended = changes.changed() => {
                if ended.is_err() {
                    return;
                }
                time::sleep(GATHER).await;
            }
            _ = again.tick() => sent.clear(),
        }
    }
}

fn said(pod: &PodName, receipt: &Receipt) -> Said {
    let since = receipt.last_contact.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let id = PodId {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: receipt.uid.clone(),
    };
    Said {
        pod: Some(id),
        epoch: receipt.epoch,
        digest: receipt.digest,
        refused: receipt.refused.clone().unwrap_or_default(),
        connected: receipt.connected,
        last_contact: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Takes what another replica heard, for as long as this one leads.
pub(super) async fn take(
    push: Arc<Push>,
    identity: Arc<Identity>,
    mut receipts: Streaming<Receipts>,
) -> Result<Response<Relayed>, Status> {
    let from: Arc<str> = Arc::from(identity.uid.as_str());
    let mut replaced = push.newest.begin(&from);
    let mut leadership = push.leadership.clone();
    let ended = loop {
        let message = tokio::select! {
            () = push.drain.started() => break Ok(()),
            _ = &mut replaced => break Err(Status::cancelled("connected anew")),
            () = leadership.lost() => break Err(Status::failed_precondition("does not lead")),
            message = receipts.message() => message,
        };
        match message {
            Ok(Some(message)) => {
                message.receipts.into_iter().for_each(|receipt| receive(&push, &from, receipt));
            }
            Ok(None) => break Ok(()),
            Err(status) => break Err(status),
        }
    };
    if push.newest.end(&from, &mut replaced) {
        push.board.lose(&from, SystemTime::now());
    }
    ended.map(|()| Response::new(Relayed {}))
}

fn receive(push: &Push, from: &Arc<str>, receipt: Said) {
    let Some(pod) = receipt.pod else { return };
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(receipt.last_contact));
    let taken = Receipt {
        uid: pod.uid,
        node: None,
        by: from.clone(),
        epoch: receipt.epoch,
        digest: receipt.digest,
        refused: (!receipt.refused.is_empty()).then_some(receipt.refused),
        connected: receipt.connected,
        // Its clock may be ahead of ours.
        last_contact: at.map_or_else(SystemTime::now, |at| at.min(SystemTime::now())),
    };
    push.board.receive(Some(from), &PodName { namespace: pod.namespace, name: pod.name }, taken);
}
