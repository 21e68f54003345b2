//! Relays the receipts of this replica's proxies to the leader, and what else they report.
//!
//! A new connection begins with all receipts. Then changes follow as they come, and all receipts once a minute: moves
//! of ownership wait for them. Of two receipts for one pod, that of a connected proxy wins, or else the later one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire::{
    self, Ended, EndedReport, LockReport, LockState, PodId, Receipts, Relayed, Traffic, TrafficReport, WatchReport,
    Watched, WebhookReport, WebhookState,
};
use ctrlmesh_runtime::grpc::{Authorities, GrpcError, Peer};
use ctrlmesh_runtime::unix_time;
use tokio::sync::mpsc;
use tokio::time::{self, Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};
use tonic_prost::prost::Message;
use tracing::{debug, info};

use super::PushService;
use super::leader_client::LeaderClient;
use crate::ca::store::CaStore;
use crate::cluster::backoff::Backoff;
use crate::drain::Drain;
use crate::leader::lease::Leadership;
use crate::push::identity::Identity;
use crate::push::policy_store::{PolicyStore, ProxyState, Receipt, Reported, Reports, SidecarWebhook};
use crate::rules::pod::PodName;
use crate::telemetry;

/// How long changes are gathered into one message at least.
const GATHER: Duration = Duration::from_millis(5);

/// The same for what proxies report all the time.
const GATHER_REPORTS: Duration = Duration::from_secs(1);

/// How many times as long as looking for changes took: with thousands of pods, something is new all the time.
const REST: u32 = 4;

/// Pause after a failed connection.
const RETRY: Duration = Duration::from_secs(1);

/// How often all receipts are sent again. The leader drops those of pods that it does not know yet.
const AGAIN: Duration = Duration::from_mins(1);

/// Receipts, and states of guards with them, in one message: of some 200 bytes each.
const IN_ONE: usize = 2000;

/// Most bytes of such reports in one message.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

pub struct ReceiptRelay {
    pub store: Arc<PolicyStore>,
    pub leadership: Leadership,
    /// Set while there is a connection.
    pub leader: LeaderClient,
    /// Its bundle verifies the leader.
    pub ca_store: Arc<CaStore>,
    /// DNS name in the certificates of all replicas.
    pub name: String,
    pub token: PathBuf,
    pub drain: Drain,
}

impl ReceiptRelay {
    /// Relays to the current leader for ever. Pauses while this replica leads.
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
                // The leader changed.
                () = another => {}
                ended = self.relay_to(&leader) => {
                    if let Err(error) = ended {
                        debug!(leader = &*leader, error = telemetry::chain(&error), "receipts do not reach the leader");
                    }
                    time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn relay_to(&self, leader: &str) -> Result<(), GrpcError> {
        let bundle = self.ca_store.current().manager.bundle();
        let peer = Peer::new(&self.name, Authorities::Pem(&bundle), &self.token)?;
        let mut connection = Box::pin(peer.connect(leader, &self.drain)).await?;
        let _held = self.leader.reached(&connection);
        info!(leader, "receipts go to the leader");
        let (sender, receipts) = mpsc::channel(1);
        tokio::select! {
            ended = connection.client_streaming::<_, Relayed>(wire::RELAY, ReceiverStream::new(receipts)) => {
                Ok(ended.map(|_relayed| ())?)
            }
            () = feed(&self.store, &sender) => Ok(()),
            () = feed_reports((self.store.traffic(), GATHER_REPORTS), traffic_report, in_traffic, &sender) => Ok(()),
            () = feed_reports((self.store.watches(), GATHER_REPORTS), watch_report, in_watches, &sender) => Ok(()),
            // Moves begin by them.
            () = feed_reports((self.store.ended(), GATHER), ended_report, in_ended, &sender) => Ok(()),
            () = feed_reports((self.store.locks(), GATHER), lock_report, in_locks, &sender) => Ok(()),
        }
    }
}

/// Sends all receipts and then changes, until the channel closes.
async fn feed(store: &PolicyStore, sender: &mpsc::Sender<Receipts>) {
    let mut changes = store.receipts_changed();
    let (mut sent, mut sent_webhooks) = (BTreeMap::<PodName, Receipt>::new(), BTreeMap::new());
    let mut is_again = false;
    // Not at once: the first message has all receipts.
    let mut again = time::interval_at(Instant::now() + AGAIN, AGAIN);
    loop {
        let begun = Instant::now();
        changes.mark_unchanged();
        let now = store.heard_here();
        let news: Vec<wire::Receipt> = now
            .iter()
            .filter(|(pod, receipt)| sent.get(*pod) != Some(*receipt))
            .map(|(pod, receipt)| message(pod, receipt))
            .collect();
        for receipts in chunks(news) {
            if sender.send(Receipts { receipts, ..Receipts::default() }).await.is_err() {
                return;
            }
        }
        sent = now;
        let webhooks = store.sidecar_webhooks_here();
        let all = std::mem::take(&mut is_again);
        for webhooks in webhook_news(&sent_webhooks, &webhooks, all).chunks(IN_ONE) {
            if sender.send(Receipts { webhooks: webhooks.to_vec(), ..Receipts::default() }).await.is_err() {
                return;
            }
        }
        sent_webhooks = webhooks;
        let rest = Backoff::after(begun, Instant::now(), REST);
        tokio::select! {
            ended = changes.changed() => {
                if ended.is_err() {
                    return;
                }
                time::sleep_until(rest.until(Instant::now() + GATHER)).await;
            }
            _ = again.tick() => {
                sent.clear();
                is_again = true;
            }
        }
    }
}

/// Sends all reports of one kind and then changes, each gathered for some time, until the channel closes. `report`
/// makes a message of what a proxy said; of what it says no more, without a state.
async fn feed_reports<S: ProxyState + Clone + PartialEq, R: Message>(
    (reports, gather): (&Reports<S>, Duration),
    report: fn(PodId, Option<&S>) -> R,
    message: fn(Vec<R>) -> Receipts,
    sender: &mpsc::Sender<Receipts>,
) {
    let mut changes = reports.changes();
    let (mut sent, mut is_again) = (BTreeMap::new(), false);
    let mut again = time::interval_at(Instant::now() + AGAIN, AGAIN);
    loop {
        changes.mark_unchanged();
        let now = reports.here();
        let of_pod = |(pod, said, is_there): (&PodName, &Reported<S>, bool)| {
            report(PodId::of(pod, &said.uid), is_there.then_some(&said.state))
        };
        let news = news(&sent, &now, std::mem::take(&mut is_again)).map(of_pod).collect();
        for one in in_messages(news) {
            if sender.send(message(one)).await.is_err() {
                return;
            }
        }
        sent = now;
        tokio::select! {
            ended = changes.changed() => {
                if ended.is_err() {
                    return;
                }
                time::sleep(gather).await;
            }
            _ = again.tick() => is_again = true,
        }
    }
}

/// Reports, as many in a message as it has room for: that of a shadow may be long.
fn in_messages<R: Message>(reports: Vec<R>) -> Vec<Vec<R>> {
    let (mut messages, mut message, mut bytes) = (Vec::new(), Vec::new(), 0);
    for report in reports {
        let length = report.encoded_len();
        if bytes + length > MAX_MESSAGE_BYTES {
            messages.extend(Some(std::mem::take(&mut message)).filter(|message| !message.is_empty()));
            bytes = 0;
        }
        bytes += length;
        message.push(report);
    }
    messages.extend(Some(message).filter(|message| !message.is_empty()));
    messages
}

/// What has changed of webhooks of pods with a sidecar; where `is_again`, all that there is.
fn webhook_news(
    sent: &BTreeMap<PodName, SidecarWebhook>,
    now: &BTreeMap<PodName, SidecarWebhook>,
    is_again: bool,
) -> Vec<WebhookReport> {
    let report = |(pod, said, is_there): (&PodName, &SidecarWebhook, bool)| {
        let state = is_there.then(|| said.state.clone());
        WebhookReport { pod: Some(PodId::of(pod, &said.uid)), state }
    };
    news(sent, now, is_again).map(report).collect()
}

fn traffic_report(pod: PodId, traffic: Option<&Traffic>) -> TrafficReport {
    TrafficReport { pod: Some(pod), traffic: traffic.cloned() }
}

fn watch_report(pod: PodId, watched: Option<&Watched>) -> WatchReport {
    WatchReport { pod: Some(pod), watched: watched.cloned() }
}

fn ended_report(pod: PodId, ended: Option<&Ended>) -> EndedReport {
    EndedReport { pod: Some(pod), ended: ended.cloned() }
}

fn lock_report(pod: PodId, lock: Option<&LockState>) -> LockReport {
    LockReport { pod: Some(pod), lock: lock.copied() }
}

fn in_traffic(traffic: Vec<TrafficReport>) -> Receipts {
    Receipts { traffic, ..Receipts::default() }
}

fn in_watches(watches: Vec<WatchReport>) -> Receipts {
    Receipts { watches, ..Receipts::default() }
}

fn in_ended(ended: Vec<EndedReport>) -> Receipts {
    Receipts { ended, ..Receipts::default() }
}

fn in_locks(locks: Vec<LockReport>) -> Receipts {
    Receipts { locks, ..Receipts::default() }
}

/// What is gone and what has changed, and whether it is still there; where `is_again`, all that there is.
fn news<'a, S: PartialEq>(
    sent: &'a BTreeMap<PodName, S>,
    now: &'a BTreeMap<PodName, S>,
    is_again: bool,
) -> impl Iterator<Item = (&'a PodName, &'a S, bool)> {
    let new = now.iter().filter(move |(pod, one)| is_again || sent.get(*pod) != Some(*one));
    let gone = sent.iter().filter(|(pod, _)| !now.contains_key(*pod));
    gone.map(|(pod, one)| (pod, one, false)).chain(new.map(|(pod, one)| (pod, one, true)))
}

/// As many in each as one message takes, and at least one.
fn chunks(receipts: Vec<wire::Receipt>) -> Vec<Vec<wire::Receipt>> {
    let (mut chunks, mut room) = (Vec::<Vec<_>>::new(), 0);
    for receipt in receipts {
        let size = 1 + receipt.guards.len();
        if let Some(chunk) = chunks.last_mut().filter(|_| size <= room) {
            chunk.push(receipt);
        } else {
            room = IN_ONE;
            chunks.push(vec![receipt]);
        }
        room = room.saturating_sub(size);
    }
    chunks
}

fn message(pod: &PodName, receipt: &Receipt) -> wire::Receipt {
    wire::Receipt {
        pod: Some(PodId::of(pod, &receipt.uid)),
        epoch: receipt.epoch,
        digest: receipt.digest,
        refused: receipt.refused.clone().unwrap_or_default(),
        connected: receipt.connected,
        last_contact: unix_time::millis(receipt.last_contact),
        guards: receipt.guards.to_vec(),
        webhook: receipt.webhook.clone(),
    }
}

/// Takes the receipts of another replica, while this one leads.
pub(super) async fn take(
    push: Arc<PushService>,
    identity: Arc<Identity>,
    mut receipts: Streaming<Receipts>,
) -> Result<Response<Relayed>, Status> {
    let from: Arc<str> = Arc::from(identity.uid.as_str());
    let mut replaced = push.latest_connections.begin(&from);
    // It begins with all that it has.
    push.store.lose_webhooks(&from);
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
                let store = &push.store;
                message.receipts.into_iter().for_each(|receipt| receive(&push, &from, receipt));
                message.webhooks.into_iter().for_each(|webhook| receive_webhook(&push, &from, webhook));
                message.traffic.into_iter().for_each(|traffic| receive_traffic(&push, &from, traffic));
                receive_states(store, store.watches(), &from, message.watches, |one| (one.pod, one.watched));
                receive_states(store, store.ended(), &from, message.ended, |one| (one.pod, one.ended));
                receive_states(store, store.locks(), &from, message.locks, |one| (one.pod, one.lock));
            }
            Ok(None) => break Ok(()),
            Err(status) => break Err(status),
        }
    };
    if push.latest_connections.end(&from, &mut replaced) {
        push.store.lose(&from, SystemTime::now());
    }
    ended.map(|()| Response::new(Relayed {}))
}

fn receive_webhook(push: &PushService, from: &Arc<str>, WebhookReport { pod, state }: WebhookReport) {
    let Some(pod) = pod else { return };
    push.store.receive_webhook(Some(from), (&pod.pod_name(), &pod.uid), from, state.map(WebhookState::truncated));
}

fn receive_traffic(push: &PushService, from: &Arc<str>, TrafficReport { pod, traffic }: TrafficReport) {
    let Some(pod) = pod else { return };
    push.store.receive_traffic(Some(from), (&pod.pod_name(), &pod.uid), from, traffic);
}

/// Takes reports of one kind, of which `read` gives the pod and its state.
fn receive_states<R, S: ProxyState + Clone>(
    store: &PolicyStore,
    states: &Reports<S>,
    from: &Arc<str>,
    reports: Vec<R>,
    read: fn(R) -> (Option<PodId>, Option<S>),
) {
    for (pod, state) in reports.into_iter().map(read) {
        if let Some(pod) = pod {
            store.receive_state(states, Some(from), (&pod.pod_name(), &pod.uid), from, state);
        }
    }
}

fn receive(push: &PushService, from: &Arc<str>, receipt: wire::Receipt) {
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
        lost: false,
        // The other clock may be ahead.
        last_contact: at.map_or_else(SystemTime::now, |at| at.min(SystemTime::now())),
        guards: receipt.guards.into(),
        webhook: receipt.webhook.map(WebhookState::truncated),
    };
    push.store.receive(Some(from), &PodName { namespace: pod.namespace, name: pod.name }, taken);
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::wire::{Shadow, ShadowDifference};

    use super::*;

    #[test]
    fn a_message_has_no_more_reports_than_it_has_room_for() {
        let report = |bytes: usize| {
            let difference = ShadowDifference { name: "x".repeat(bytes), ..ShadowDifference::default() };
            let shadow = Shadow { differences: vec![difference], ..Shadow::default() };
            TrafficReport { pod: None, traffic: Some(Traffic { shadow: Some(shadow), ..Traffic::default() }) }
        };
        let lengths = |sizes: &[usize]| -> Vec<usize> {
            in_messages(sizes.iter().map(|size| report(*size)).collect()).iter().map(Vec::len).collect()
        };
        assert_eq!(lengths(&[]), [0; 0]);
        assert_eq!(lengths(&[10; 100]), [100]);
        assert_eq!(lengths(&[400_000; 5]), [2, 2, 1]);
        assert_eq!(lengths(&[2_000_000, 1]), [1, 1]);
    }
}
