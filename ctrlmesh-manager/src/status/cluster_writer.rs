//! Writes what the plan says into the cluster: shards, labels of pods, statuses and events.
//!
//! Only the leader writes. Each write to an existing object names its version or UID, so that a write by a
//! former leader fails. The queue decides the order; an object that cannot be written holds no other up.
//! Events are sent beside, and may be lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::time::{self, Instant};
use tracing::{info, warn};

use crate::audit::Ownerships;
use crate::cluster::backoff::Backoff;
use crate::cluster::event_recorder::EventRecorder;
use crate::cluster::plan::{Plan, Plans};
use crate::cluster::write_error::{WriteError, within};
use crate::ownership::fence_state::FenceStates;
use crate::rules::label_coverage::{self, LabelCoverages};
use crate::rules::object_name::{full_name, name, namespace, resource_version};
use crate::rules::pod::PodName;
use crate::rules::rollout::Decisions;
use crate::rules::shared::Shared;
use crate::status::compute::{Contact, Unlabelled};

mod writes;
mod write_queue;

use write_queue::{Outcome, WriteQueue};
pub use writes::{EventNote, GRANTED, GrantedShare, Observations, Write, writes};

pub const FIELD_MANAGER: &str = "ctrlmesh-manager";

/// Interval of checks for new contacts and for leadership.
const PERIOD: Duration = Duration::from_millis(500);

/// The pause after a decision, as a multiple of its duration, if no proxy waits: with thousands of pods
/// something is new all the time.
const PAUSE_FACTOR: u32 = 4;

/// A new leader takes this long to hear from all proxies.
const NEW_LEADER: Duration = Duration::from_mins(1);

/// Limit for one write.
const DEADLINE: Duration = Duration::from_secs(10);

/// Events that may wait; more are dropped.
const EVENTS: usize = 1000;

pub struct ClusterWriter<Contacts, Labels, MayWrite> {
    pub client: Client,
    pub recorder: EventRecorder,
    pub contacts: Contacts,
    /// What is wrong with labels, and how far those of these ShardingConfigs are.
    pub labels: Labels,
    pub fences: FenceStates,
    /// What rollouts say next.
    pub rollouts: watch::Receiver<Arc<Decisions>>,
    /// What the audit says of who owns what.
    pub ownerships: watch::Receiver<Arc<Ownerships>>,
    /// Whether this replica leads now.
    pub may_write: MayWrite,
}

type StatusEvents = (Box<ShardingConfig>, Vec<EventNote>);

impl<Contacts, Labels, MayWrite> ClusterWriter<Contacts, Labels, MayWrite>
where
    Contacts: Fn() -> Arc<BTreeMap<PodName, Contact>> + Send + Sync,
    Labels: Fn(&[Shared<ShardingConfig>]) -> (Option<Unlabelled>, LabelCoverages) + Send + Sync,
    MayWrite: Fn() -> bool + Send + Sync,
{
    /// Writes until the plans end.
    pub async fn run(self, plans: Plans) {
        let (events, receiver) = mpsc::channel(EVENTS);
        tokio::join!(self.write_all(plans, events), self.publish_events(receiver));
    }

    async fn write_all(&self, mut plans: Plans, events: mpsc::Sender<StatusEvents>) {
        let mut queue = WriteQueue::default();
        let mut under_way = FuturesUnordered::new();
        let mut ticks = time::interval(PERIOD);
        let (mut since, mut backoff) = (None, Backoff::default());
        loop {
            // After a write, decide only when the queue is empty.
            let mut decides = true;
            tokio::select! {
                changed = plans.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                Some((write, done)) = under_way.next() => {
                    let now = Instant::now();
                    note_version(&mut queue, &write, &done, now);
                    let outcome = outcome(&write, done);
                    queue.done(&write, outcome, now);
                    send_events(write, outcome, &events);
                    decides = queue.is_idle();
                }
                _ = ticks.tick() => {}
            }
            if !(self.may_write)() {
                queue.clear();
                (since, backoff) = (None, Backoff::default());
                continue;
            }
            let since = *since.get_or_insert_with(Instant::now);
            let plan = plans.borrow_and_update().clone();
            let begun = Instant::now();
            let may = |plan: &Arc<Plan>| decides && (backoff.is_over(begun) || plan.waits());
            if let Some(plan) = plan.filter(may)
                && self.decide(plan, &mut queue, since)
            {
                backoff = Backoff::after(begun, Instant::now(), PAUSE_FACTOR);
            }
            while let Some(write) = queue.next() {
                under_way.push(self.attempt(write).boxed());
            }
        }
    }

    /// Decides what to write if something is new; returns whether it did.
    fn decide(&self, plan: Arc<Plan>, queue: &mut WriteQueue, since: Instant) -> bool {
        let (contacts, (unlabelled, coverages)) = ((self.contacts)(), (self.labels)(&plan.snapshot.configs));
        let (fences, new_leader) = (Arc::clone(&self.fences.borrow()), since.elapsed() < NEW_LEADER);
        let (rollouts, ownerships) = (Arc::clone(&self.rollouts.borrow()), Arc::clone(&self.ownerships.borrow()));
        let observed = Observations { contacts, unlabelled, fences, coverages, rollouts, ownerships, new_leader };
        let now = Instant::now();
        let needs_decision = queue.needs_decision(&plan, &observed, now);
        if needs_decision {
            let time = Timestamp::now();
            let scope = queue.scope(&plan, &observed, (now, time));
            let (writes, next_away) = (writes(&plan, &observed, &scope, time), observed.next_away(time));
            queue.take(plan, observed, (&scope, writes), now);
            if let Some(away) = next_away {
                queue.decide_by(now + away);
            }
        }
        needs_decision
    }

    async fn attempt(&self, write: Write) -> (Write, Result<u64, WriteError>) {
        let done = if (self.may_write)() {
            within(DEADLINE, Box::pin(self.write_one(&write))).await
        } else {
            Err(WriteError::Lost)
        };
        (write, done)
    }

    /// Gives the version of the ShardingConfig after it; 0 where it is gone.
    async fn write_one(&self, write: &Write) -> kube::Result<u64> {
        match write {
            Write::Apply { config, added } => self.apply(config, added).await,
            Write::Remove { config } => {
                let exactly = Preconditions {
                    uid: config.metadata.uid.clone(),
                    resource_version: config.metadata.resource_version.clone(),
                };
                let delete = DeleteParams { preconditions: Some(exactly), ..DeleteParams::default() };
                self.configs(config).delete(name(&config.metadata), &delete).await?;
                info!(shard = write.object(), "shard removed, its root no longer has it");
                Ok(0)
            }
            Write::Label { pod, uid, shard } => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
                let patch = json!({"metadata": {"uid": uid, "labels": {label::SHARDING_CONFIG_INJECTED: shard}}});
                pods.patch_metadata(&pod.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
                info!(%pod, shard, "pod labelled with its shard");
                Ok(0)
            }
            Write::Finalizers { config, finalizers } => {
                let (uid, version) = (&config.metadata.uid, &config.metadata.resource_version);
                let observed = json!({"uid": uid, "resourceVersion": version, "finalizers": finalizers});
                let patch = Patch::Merge(json!({ "metadata": observed }));
                let configs = self.configs(config);
                let written = configs.patch_metadata(name(&config.metadata), &PatchParams::default(), &patch).await?;
                info!(root = write.object(), ?finalizers, "finalizers of a root written");
                Ok(resource_version(&written.metadata))
            }
            Write::Status { config, .. } => {
                let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
                let written = self.configs(config).replace_status(name(&config.metadata), &params, config).await?;
                Ok(resource_version(&written.metadata))
            }
        }
    }

    /// Applies a shard. A suspended leader may still create one after its term; the next leader removes it.
    async fn apply(&self, config: &ShardingConfig, added: &[&str]) -> kube::Result<u64> {
        let configs = self.configs(config);
        let mut config = config.clone();
        if !added.is_empty() {
            // A server-side apply leaves fields that others added.
            let fields: serde_json::Map<_, _> = added.iter().map(|field| ((*field).to_owned(), json!(null))).collect();
            let meta = &config.metadata;
            let observed = json!({"uid": meta.uid, "resourceVersion": meta.resource_version});
            let patch = Patch::Merge(json!({"metadata": observed, "spec": fields}));
            let there = configs.patch(name(&config.metadata), &PatchParams::default(), &patch).await?;
            config.metadata.resource_version = there.metadata.resource_version;
        }
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let written = configs.patch(name(&config.metadata), &params, &Patch::Apply(&config)).await?;
        info!(shard = name(&config.metadata), "shard written as its root says");
        Ok(resource_version(&written.metadata))
    }

    async fn publish_events(&self, mut receiver: mpsc::Receiver<StatusEvents>) {
        while let Some((config, events)) = receiver.recv().await {
            for event in &events {
                if let Err(error) = within(DEADLINE, self.publish_event(&config, event)).await {
                    let error = &error as &dyn std::error::Error;
                    warn!(error, reason = event.reason, "event not written");
                }
            }
        }
    }

    async fn publish_event(&self, config: &ShardingConfig, event: &EventNote) -> kube::Result<()> {
        self.recorder.publish(&event.into(), &config.object_ref(&())).await
    }

    fn configs(&self, config: &ShardingConfig) -> Api<ShardingConfig> {
        Api::namespaced(self.client.clone(), namespace(&config.metadata))
    }
}

impl From<&EventNote> for Event {
    fn from(EventNote { warning, reason, message }: &EventNote) -> Self {
        Self {
            type_: if *warning { EventType::Warning } else { EventType::Normal },
            reason: reason.clone(),
            note: Some(message.chars().take(label_coverage::NOTE_BYTES).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        }
    }
}

impl Write {
    /// Whether proxies wait for it.
    fn is_awaited(&self) -> bool {
        matches!(self, Self::Status { is_awaited: true, .. }) || self.is_move()
    }

    /// Whether a move of ownership waits for it.
    fn is_move(&self) -> bool {
        matches!(self, Self::Status { is_move: true, .. })
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Self::Apply { .. } => "apply",
            Self::Remove { .. } => "remove",
            Self::Label { .. } => "label",
            Self::Finalizers { .. } => "finalizers",
            Self::Status { .. } => "status",
        }
    }

    /// The version of the ShardingConfig that it was decided by; 0 where there was none.
    fn version(&self) -> Option<u64> {
        match self {
            Self::Apply { config, .. }
            | Self::Remove { config }
            | Self::Finalizers { config, .. }
            | Self::Status { config, .. } => Some(resource_version(&config.metadata)),
            Self::Label { .. } => None,
        }
    }

    fn namespace(&self) -> &str {
        match self {
            Self::Apply { config, .. }
            | Self::Remove { config }
            | Self::Finalizers { config, .. }
            | Self::Status { config, .. } => namespace(&config.metadata),
            Self::Label { pod, .. } => &pod.namespace,
        }
    }

    /// `NAMESPACE/NAME`.
    pub fn object(&self) -> String {
        match self {
            Self::Apply { config, .. }
            | Self::Remove { config }
            | Self::Finalizers { config, .. }
            | Self::Status { config, .. } => full_name(&config.metadata),
            Self::Label { pod, .. } => pod.to_string(),
        }
    }
}

/// Tells what a write says of its object's version.
fn note_version(queue: &mut WriteQueue, write: &Write, done: &Result<u64, WriteError>, now: Instant) {
    match done {
        Ok(version) => queue.has_version(write, Some(*version).filter(|version| *version > 0), now),
        Err(error) if error.is_conflict() => queue.has_version(write, None, now),
        Err(_) => {}
    }
}

fn outcome(write: &Write, done: Result<u64, WriteError>) -> Outcome {
    match done {
        Ok(_version) => Outcome::Written,
        // Another writer was first, or this replica lost the Lease.
        Err(WriteError::Lost) => Outcome::Outdated,
        Err(error) if error.is_conflict() => Outcome::Outdated,
        Err(error) => {
            warn!(
                write = write.kind(),
                object = write.object(),
                error = &error as &dyn std::error::Error,
                "write failed; tried again"
            );
            Outcome::Failed
        }
    }
}

/// Sends the events of a status that was written, without waiting.
fn send_events(write: Write, outcome: Outcome, sender: &mpsc::Sender<StatusEvents>) {
    let Write::Status { config, events, .. } = write else { return };
    if outcome == Outcome::Written
        && !events.is_empty()
        && let Err(error) = sender.try_send((config, events))
    {
        warn!(%error, "events not written");
    }
}

#[cfg(test)]
mod tests;
