//! How does the cluster come to say what the plan says?
//!
//! Only the leader writes: the shards of roots, the labels of their pods, and status. Every write names the version or
//! UID that it was decided by, so that one by a leader that no longer is one comes to nothing. Nothing is written to one
//! object's status more than once a second; what failed is tried again, later and later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tokio::time::{self, Instant};
use tracing::{info, warn};

use crate::plan::{Plan, Plans};
use crate::pod::PodName;
use crate::shard::Labelling;
use crate::status::Contact;

mod writes;

pub use writes::{News, Seen, Write, writes};

/// As whom the manager writes.
pub const FIELD_MANAGER: &str = "ctrlmesh-manager";

/// How long an object's status is left alone after it was written.
const STATUS_PERIOD: Duration = Duration::from_secs(1);

/// How often it is looked whether the proxies have said something, or this replica has become the leader.
const PERIOD: Duration = Duration::from_millis(500);

/// How often it is looked where nothing has changed: time itself changes what is said of proxies that are away.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// How long is waited after a write that failed, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// How many writes are under way at once.
const CONCURRENT: usize = 8;

/// How long the API server may take for one.
const DEADLINE: Duration = Duration::from_secs(10);

/// Writes for one replica of the manager.
pub struct Control<Contacts, Unlabelled, MayWrite> {
    /// How the API server is reached.
    pub client: Client,
    /// How objects are labelled.
    pub labelling: Arc<Labelling>,
    /// Whom events are told by.
    pub recorder: Recorder,
    /// What the proxies have said.
    pub contacts: Contacts,
    /// What is to be labelled yet, where that is known to be anything.
    pub unlabelled: Unlabelled,
    /// Whether this replica may write, at this very moment.
    pub may_write: MayWrite,
}

/// A write that failed.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error("the API server refused it")]
    Refused(#[from] kube::Error),
    #[error("the API server did not answer within {DEADLINE:?}")]
    Slow,
}

/// What was done, and when.
#[derive(Default)]
struct Pace {
    /// By what it was decided last, and when; nothing where something is left to do.
    done: Option<(Arc<Plan>, Seen, Instant)>,
    /// When the status of each object was written.
    written: BTreeMap<(String, String), Instant>,
    /// How many times in a row something has failed.
    failures: u32,
    /// Nothing is tried before.
    not_before: Option<Instant>,
}

// === impl Control ===

impl<Contacts, Unlabelled, MayWrite> Control<Contacts, Unlabelled, MayWrite>
where
    Contacts: Fn() -> BTreeMap<PodName, Contact> + Send + Sync,
    Unlabelled: Fn() -> Option<String> + Send + Sync,
    MayWrite: Fn() -> bool + Send + Sync,
{
    /// Writes what the newest plan says, until nobody plans any more.
    pub async fn run(self, mut plans: Plans) {
        let mut pace = Pace::default();
        let mut ticks = time::interval(PERIOD);
        loop {
            tokio::select! {
                changed = plans.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                _ = ticks.tick() => {}
            }
            let plan = plans.borrow_and_update().clone();
            if let Some(plan) = plan
                && (self.may_write)()
                && pace.not_before.is_none_or(|at| Instant::now() >= at)
            {
                self.write(plan, &mut pace).await;
            }
        }
    }

    async fn write(&self, plan: Arc<Plan>, pace: &mut Pace) {
        let seen = Seen { contacts: (self.contacts)(), unlabelled: (self.unlabelled)() };
        let same = |done: &(Arc<Plan>, Seen, Instant)| {
            Arc::ptr_eq(&done.0, &plan) && done.1 == seen && done.2.elapsed() < LOOK_AGAIN
        };
        if pace.done.as_ref().is_some_and(same) {
            return;
        }
        let mut wanted = writes(&plan, &self.labelling, &seen, Timestamp::now());
        let all = wanted.len();
        wanted.retain(|write| pace.may(write));
        let postponed = wanted.len() < all;
        let written = futures::stream::iter(wanted).map(|write| async move {
            if !(self.may_write)() {
                return (write, Ok(()));
            }
            let done = time::timeout(DEADLINE, self.write_one(&write)).await;
            let done = done.map_err(|_elapsed| WriteError::Slow);
            (write, done.and_then(|done| done.map_err(WriteError::from)))
        });
        let written: Vec<_> = written.buffer_unordered(CONCURRENT).collect().await;
        let mut failed = false;
        for (write, done) in written {
            pace.note(&write);
            // A conflict: it was decided by what is no longer so. The next plan decides anew.
            if let Err(error) = done
                && !is_conflict(&error)
            {
                warn!(
                    write = write.what(),
                    object = write.object(),
                    error = &error as &dyn std::error::Error,
                    "write failed; tried again"
                );
                failed = true;
            }
        }
        pace.after(failed);
        pace.done = (!failed && !postponed).then(|| (plan, seen, Instant::now()));
    }

    async fn write_one(&self, write: &Write) -> kube::Result<()> {
        match write {
            Write::Apply { config, added } => self.apply(config, added).await,
            Write::Remove { config } => {
                let exactly = Preconditions {
                    uid: config.metadata.uid.clone(),
                    resource_version: config.metadata.resource_version.clone(),
                };
                let delete =
                    DeleteParams { preconditions: Some(exactly), ..DeleteParams::default() };
                self.configs(config).delete(&name(config), &delete).await?;
                info!(shard = write.object(), "shard removed, its root no longer has it");
                Ok(())
            }
            Write::Label { pod, uid, shard } => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
                let patch = json!({"metadata": {"uid": uid, "labels": {label::SHARDING_CONFIG_INJECTED: shard}}});
                pods.patch_metadata(&pod.name, &PatchParams::default(), &Patch::Merge(patch))
                    .await?;
                info!(%pod, shard, "pod labelled with its shard");
                Ok(())
            }
            Write::Status { config, news } => {
                let params = PostParams {
                    field_manager: Some(FIELD_MANAGER.to_owned()),
                    ..PostParams::default()
                };
                self.configs(config).replace_status(&name(config), &params, config).await?;
                self.tell(config, news).await;
                Ok(())
            }
        }
    }

    async fn apply(&self, config: &ShardingConfig, added: &[&str]) -> kube::Result<()> {
        let configs = self.configs(config);
        if !added.is_empty() {
            // Applying leaves alone what another has added.
            let fields: serde_json::Map<_, _> =
                added.iter().map(|field| ((*field).to_owned(), json!(null))).collect();
            let patch = Patch::Merge(json!({ "spec": fields }));
            configs.patch(&name(config), &PatchParams::default(), &patch).await?;
        }
        let params = PatchParams::apply(FIELD_MANAGER).force();
        configs.patch(&name(config), &params, &Patch::Apply(config)).await?;
        info!(shard = name(config), "shard written as its root says");
        Ok(())
    }

    async fn tell(&self, config: &ShardingConfig, news: &[News]) {
        for News { warning, reason, message } in news {
            let event = Event {
                type_: if *warning { EventType::Warning } else { EventType::Normal },
                reason: reason.clone(),
                note: Some(message.chars().take(1000).collect()),
                action: "Reconcile".to_owned(),
                secondary: None,
            };
            if let Err(error) = self.recorder.publish(&event, &config.object_ref(&())).await {
                warn!(%error, reason, "event not written");
            }
        }
    }

    fn configs(&self, config: &ShardingConfig) -> Api<ShardingConfig> {
        let namespace = config.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.client.clone(), namespace)
    }
}

// === impl Write ===

impl Write {
    /// In a word.
    pub fn what(&self) -> &'static str {
        match self {
            Self::Apply { .. } => "apply",
            Self::Remove { .. } => "remove",
            Self::Label { .. } => "label",
            Self::Status { .. } => "status",
        }
    }

    /// The object, as `NAMESPACE/NAME`.
    pub fn object(&self) -> String {
        match self {
            Self::Apply { config, .. } | Self::Remove { config } | Self::Status { config, .. } => {
                format!(
                    "{}/{}",
                    config.metadata.namespace.as_deref().unwrap_or_default(),
                    name(config)
                )
            }
            Self::Label { pod, .. } => pod.to_string(),
        }
    }
}

// === impl Pace ===

impl Pace {
    fn may(&self, write: &Write) -> bool {
        let Some(key) = Self::key(write) else { return true };
        self.written.get(&key).is_none_or(|at| at.elapsed() >= STATUS_PERIOD)
    }

    fn note(&mut self, write: &Write) {
        if let Some(key) = Self::key(write) {
            self.written.insert(key, Instant::now());
        }
    }

    fn after(&mut self, failed: bool) {
        self.written.retain(|_, at| at.elapsed() < STATUS_PERIOD);
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        let wait = RETRY.0.saturating_mul(1 << self.failures.min(16)).min(RETRY.1);
        self.not_before = failed.then(|| Instant::now() + wait);
    }

    fn key(write: &Write) -> Option<(String, String)> {
        let Write::Status { config, .. } = write else { return None };
        Some((config.metadata.namespace.clone().unwrap_or_default(), name(config)))
    }
}

fn is_conflict(error: &WriteError) -> bool {
    matches!(error, WriteError::Refused(kube::Error::Api(status)) if matches!(status.code, 404 | 409))
}

fn name(config: &ShardingConfig) -> String {
    config.metadata.name.clone().unwrap_or_default()
}
