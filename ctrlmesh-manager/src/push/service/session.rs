//! The stream of one connected proxy.
//!
//! One task a proxy. Policies are read from the store when there is room to send them. So a slow proxy gets the newest
//! policies and not every version. A dead one costs one message until its connection ends.

mod reports;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire::{Hello, MAX_KNOWN, PodEntry, PodId, PolicySummary, Report, Update};
use futures::StreamExt as _;
use futures::stream::Map;
use tokio::sync::{mpsc, watch};
use tokio::time;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Response, Status, Streaming};
use tracing::debug;

use super::PushService;
use super::catch_up::{MinimumVersions, catch_up, is_held};
use super::delivery::{Delivery, RemovedPods, is_of, known};
use super::hello;
use super::latest_connections::Replaced;
use crate::ca::api_server::ApiServer;
use crate::metrics::{Open, Refused};
use crate::push::identity::{IdentityError, ReviewedIdentity};
use crate::push::policy_store::{EnrolledPod, Reader, Receipt};
use crate::rules::pod::PodName;

/// Bytes of policies in one message; the rest follows in the next one.
const FULL_BYTES: usize = 1024 * 1024;

/// Messages in the channel: the next one is built when this one is sent.
const ROOM: usize = 1;

struct Session {
    push: Arc<PushService>,
    proven: ReviewedIdentity,
    /// When the token is reviewed again.
    review: time::Instant,
    /// Whether the proxy needs a new review ticket.
    needs_ticket: bool,
    /// UID of the proxy's pod.
    by: Arc<str>,
    token: Arc<str>,
    reader: Reader,
    inbound: Streaming<Report>,
    outbound: mpsc::Sender<Outgoing>,
    replaced: Replaced,
    delivered: HashMap<PodName, Delivery>,
    /// Removals that were sent.
    gone: RemovedPods,
    /// Policies that are held back.
    held_back: MinimumVersions,
    /// Addresses of the API server.
    servers: watch::Receiver<ApiServer>,
    /// Whether there may be something to send.
    news: bool,
    _open: Open,
}

enum Event {
    Report(Result<Option<Box<Report>>, Status>),
    News,
    Room,
    Review,
    Replaced,
    Shutdown,
}

/// Boxed, because a channel allocates 32 slots however few it may hold.
type Outgoing = Box<Result<Update, Status>>;

pub(super) type Updates = Map<ReceiverStream<Outgoing>, fn(Outgoing) -> Result<Update, Status>>;

pub(super) async fn follow(
    push: Arc<PushService>,
    proven: ReviewedIdentity,
    token: Arc<str>,
    mut inbound: Streaming<Report>,
) -> Result<Response<Updates>, Status> {
    let identity = &proven.identity;
    let hello = hello::read(&push, identity, &mut inbound).await?;
    let subject =
        hello::subject(&push, identity, &hello).map_err(|status| push.refuse(Refused::Foreign, identity, status))?;
    if hello.known.len() > MAX_KNOWN {
        let status = Status::invalid_argument("knows more pods than a node has");
        return Err(push.refuse(Refused::Message, identity, status));
    }
    // Counts from now on, however long the start takes.
    let review = time::Instant::now() + push.review_schedule.due(proven.reviewed);
    push.store.begun().await;
    let replaced = push.latest_connections.begin(&identity.uid);
    let mut servers = push.ca_store.servers();
    servers.mark_changed();
    let (outbound, answers) = mpsc::channel(ROOM);
    let session = Session {
        reader: push.store.follow(subject),
        _open: Open::new(&push.metrics.clients),
        push: push.clone(),
        by: Arc::from(identity.uid.as_str()),
        proven,
        review,
        needs_ticket: true,
        token,
        inbound,
        outbound,
        replaced,
        delivered: HashMap::new(),
        gone: RemovedPods::default(),
        held_back: MinimumVersions::new(),
        servers,
        news: false,
    };
    push.drain.spawn(session.run(hello));
    Ok(Response::new(ReceiverStream::new(answers).map(|outgoing| *outgoing)))
}

impl Session {
    async fn run(mut self, hello: Hello) {
        debug!(pod = %self.proven.identity.pod, node = hello.node, version = hello.version, "follows");
        let mut known = known(hello.known);
        // A sidecar hears of its own pod only.
        known.retain(|pod, _| self.reader.subject().may_be(pod));
        // Boxed: a rare path must not enlarge this task for as long as the proxy is connected.
        let status = match Box::pin(self.begin(known)).await {
            Ok(()) => self.go_on().await,
            Err(status) => Some(status),
        };
        self.gone();
        if let Some(status) = status {
            debug!(pod = %self.proven.identity.pod, error = status.message(), "is let go");
            // Without room in the channel, the proxy is not reading either.
            drop(self.outbound.try_send(Box::new(Err(status))));
        }
    }

    /// Sends what the proxy does not have.
    async fn begin(&mut self, known: HashMap<PodName, PolicySummary>) -> Result<(), Status> {
        self.held_back = tokio::select! {
            held_back = catch_up(&self.push, &mut self.reader, &known) => held_back?,
            () = self.outbound.closed() => return Err(Status::cancelled("the proxy is gone")),
            () = self.push.drain.started() => return Err(Status::unavailable("the manager ends")),
        };
        let now = self.reader.read();
        for pod in &now {
            let (Some(known), Some(policy)) = (known.get(&pod.name), &pod.policy) else {
                continue;
            };
            // Counts as sent, so that the proxy hears when the pod is gone.
            let keeps = known.digest == policy.digest() || self.held_back.contains_key(&pod.name);
            if is_of(known, pod) && keeps {
                let delivery = Delivery::of(pod, policy, known.epoch).left_with(known);
                self.delivered.insert(pod.name.clone(), delivery);
                self.receipt(&pod.name, true);
            }
        }
        let mut update = Update { guard_reports: true, ..self.update() };
        // A proxy keeps its policy of a pod that is there and has no policy here.
        let here = |known: &PolicySummary| now.iter().any(|pod| is_of(known, pod));
        let gone = known.into_values().filter(|known| !here(known));
        update.gone.extend(gone.filter_map(|known| known.pod));
        // An empty first message tells the proxy that it is up to date.
        self.send(update).await
    }

    /// Runs until one side ends. Returns the reason for the proxy, unless the proxy itself ended.
    async fn go_on(&mut self) -> Option<Status> {
        let mut review = Box::pin(time::sleep_until(self.review));
        loop {
            let event = tokio::select! {
                report = self.inbound.message() => Event::Report(report.map(|report| report.map(Box::new))),
                () = self.reader.changed(), if !self.news => Event::News,
                () = moved(&mut self.servers), if !self.news => Event::News,
                // The permit itself is not needed: nobody else sends.
                _ = self.outbound.reserve(), if self.news => Event::Room,
                () = &mut review => Event::Review,
                // The sender is dropped when the same pod connects again.
                _ = &mut self.replaced => Event::Replaced,
                () = self.push.drain.started() => Event::Shutdown,
            };
            let done = match event {
                Event::Report(Ok(None)) => return None,
                Event::Report(Ok(Some(report))) => self.take_report(*report),
                Event::Report(Err(status)) => Err(self.unreadable(status)?),
                Event::News => {
                    self.news = true;
                    Ok(())
                }
                Event::Room => self.send_updates().await,
                Event::Review => {
                    let due = Box::pin(self.review()).await;
                    due.map(|due| review.as_mut().reset(time::Instant::now() + due))
                }
                Event::Replaced => Err(Status::aborted("the same pod follows anew")),
                Event::Shutdown => Err(Status::unavailable("the manager ends")),
            };
            if let Err(status) = done {
                return Some(status);
            }
        }
    }

    /// The refusal of an unreadable message; none where the connection broke.
    fn unreadable(&self, status: Status) -> Option<Status> {
        let broken = matches!(status.code(), Code::Cancelled | Code::Unavailable | Code::Unknown);
        (!broken).then(|| self.push.refuse(Refused::Message, &self.proven.identity, status))
    }

    /// Reviews the token, and returns the time until the next review. A review without an answer counts as passed.
    async fn review(&mut self) -> Result<Duration, Status> {
        match self.push.reviewer.identify_again(&self.token).await {
            Ok(proven) if proven.identity == self.proven.identity => {
                let due = self.push.review_schedule.due(proven.reviewed);
                (self.proven, self.needs_ticket, self.news) = (proven, true, true);
                Ok(due)
            }
            Err(error @ (IdentityError::Review(_) | IdentityError::Late)) => {
                drop(self.push.unknown(&error));
                Ok(self.push.review_schedule.retry())
            }
            Ok(_) => Err(Status::unauthenticated("the token is another's now")),
            // Not counted: every token expires.
            Err(_) => Err(Status::unauthenticated("the token is not good any more")),
        }
    }

    /// Sends what the proxy does not have yet, if anything.
    async fn send_updates(&mut self) -> Result<(), Status> {
        let update = self.update();
        if update == Update::default() {
            return Ok(());
        }
        self.send(update).await
    }

    /// What the proxy does not have yet, as much as fits into one message.
    fn update(&mut self) -> Update {
        let now = self.reader.read();
        let mut update = Update::default();
        let mut bytes = 0;
        self.news = false;
        let here: HashMap<&PodName, &EnrolledPod> = now.iter().map(|pod| (&pod.name, &**pod)).collect();
        self.delivered.retain(|pod, delivery| {
            let stays = here.get(pod).is_some_and(|one| one.uid == delivery.uid);
            if !stays {
                self.held_back.remove(pod);
                update.gone.push(PodId::of(pod, &delivery.uid));
                self.gone.remember(PodId::of(pod, &delivery.uid));
            }
            stays
        });
        for pod in &now {
            let Some(policy) = &pod.policy else { continue };
            if is_held(&mut self.held_back, &pod.name, policy) {
                continue;
            }
            let last = self.delivered.get(&pod.name);
            if last.is_some_and(|last| last.digest == policy.digest()) {
                continue;
            }
            if bytes >= FULL_BYTES {
                self.news = true;
                break;
            }
            bytes += policy.json().len();
            let epoch = last.map_or(0, |last| last.epoch);
            let delivery = Delivery::of(pod, policy, epoch).with_states_of(last);
            self.delivered.insert(pod.name.clone(), delivery);
            update.policies.push(PodEntry {
                pod: Some(PodId::of(&pod.name, &pod.uid)),
                digest: policy.digest(),
                policy: policy.json().clone(),
                operator: policy.operator.clone().unwrap_or_default(),
                version: policy.version,
            });
        }
        if self.servers.has_changed().unwrap_or_default() {
            let all = self.servers.borrow_and_update();
            update.servers = all.addresses.iter().map(ToString::to_string).collect();
        }
        update.more = self.news;
        if std::mem::take(&mut self.needs_ticket) {
            update.ticket = self.push.ticket_key().issue(&self.token, &self.proven);
        }
        update
    }

    async fn send(&mut self, update: Update) -> Result<(), Status> {
        let count = update.policies.len();
        let sent = tokio::select! {
            sent = self.outbound.send(Box::new(Ok(update))) => sent,
            () = self.push.drain.started() => return Err(Status::unavailable("the manager ends")),
        };
        sent.map_err(|_closed| Status::cancelled("the proxy is gone"))?;
        self.push.metrics.policies.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
        Ok(())
    }

    fn receipt(&self, pod: &PodName, connected: bool) {
        let Some(delivery) = self.delivered.get(pod) else { return };
        if !self.reader.speaks_for(delivery.inside) {
            let state = delivery.webhook.clone().filter(|_| connected);
            return self.push.store.receive_webhook(None, (pod, &delivery.uid), &self.by, state);
        }
        let receipt = Receipt {
            uid: delivery.uid.clone(),
            node: delivery.node.clone(),
            by: self.by.clone(),
            epoch: delivery.epoch,
            digest: delivery.in_force,
            refused: delivery.refused.clone(),
            connected,
            lost: false,
            last_contact: SystemTime::now(),
            guards: delivery.guards.clone(),
            // Of a sidecar's pod, the node's proxy knows.
            webhook: delivery.webhook.clone().filter(|_| !delivery.inside),
        };
        self.push.store.receive(None, pod, receipt);
    }

    /// Marks the proxy as disconnected, unless it has connected again.
    fn gone(&mut self) {
        if !self.push.latest_connections.end(&self.proven.identity.uid, &mut self.replaced) {
            return;
        }
        for pod in self.delivered.keys() {
            self.receipt(pod, false);
            self.push.store.reporter_left(pod, &self.by);
        }
    }
}

/// Resolves when the API server's addresses change, and leaves the change unseen for its reader.
async fn moved(servers: &mut watch::Receiver<ApiServer>) {
    // The sender lives as long as this replica serves.
    drop(servers.changed().await);
    servers.mark_changed();
}
