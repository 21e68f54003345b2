//! Migrates objects to another set of labels.
//!
//! The leader takes the next step when it is possible, and writes it to the `ManagerState`. All replicas read it there,
//! and label, compile and admit by it. The steps themselves are in `label_scheme`. This file finds out whether one is
//! possible, and reports the progress.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::api::{ManagerState, ManagerStateStatus};
use ctrlmesh_common::names::{MANAGER_STATE, label};
use ctrlmesh_runtime::sync::lock;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::PostParams;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::{self, Instant};
use tracing::{info, warn};

use crate::cluster::cache::Cache;
use crate::cluster::plan::Plans;
use crate::labels::{CurrentProgress, Progress, list_of_kinds};
use crate::leader::lease::Leadership;
use crate::rules::label_scheme::{Facts, Scheme, Step};
use crate::rules::pod::PodName;
use crate::rules::shard::Labelling;
use crate::status::compute::Contact;
use crate::status::status_writer::{StatusPermit, StatusWriter, read_or_create};
use crate::telemetry;

mod former_labels;

const PERIOD: Duration = Duration::from_secs(1);

/// How long no object may have lacked a label. By then, objects are found that were written before the API server and
/// other replicas knew the new labels.
const SETTLES: Duration = Duration::from_secs(5);

/// The same for keys that were in use before. A watch resumes at its last version, where objects may still have old
/// values. A bookmark, which the API server sends each minute (`defaultBookmarkFrequency`), moves it on.
const SETTLES_AGAIN: Duration = Duration::from_secs(90);

const DEADLINE: Duration = Duration::from_secs(10);

const CONDITION: &str = "Relabelled";

pub struct Migration<Contacts> {
    pub client: Client,
    /// The manager's namespace, with the list of kinds.
    pub namespace: String,
    pub wanted: Labelling,
    /// Whether the former labels stay.
    pub keeps_former: bool,
    pub cache: Arc<Cache>,
    pub plans: Plans,
    pub contacts: Contacts,
    pub current: CurrentProgress,
    pub leadership: Leadership,
    pub status_writer: StatusWriter,
    pub recorder: Recorder,
    pub metrics: MigrationMetrics,
    pub notice: MigrationNotice,
}

/// The message about a running migration. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct MigrationNotice(Arc<Mutex<Option<String>>>);

#[derive(Clone, Debug, Default)]
pub struct MigrationMetrics(Family<StageLabels, Gauge>);

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct StageLabels {
    stage: &'static str,
}

/// Since when no object has lacked a label, by which scheme, and at which count of labelled objects.
#[derive(Debug, Default)]
struct QuietPeriod(Option<(Arc<Scheme>, u64, Instant)>);

/// The stage of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stage {
    /// None where no migration runs.
    name: Option<&'static str>,
    message: String,
}

impl MigrationNotice {
    pub fn get(&self) -> Option<String> {
        lock(&self.0).clone()
    }

    fn set(&self, message: Option<String>) {
        *lock(&self.0) = message;
    }
}

impl MigrationMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "1 where the leader gives objects other labels besides (labelling), waits until nobody goes by those from before (leaving), or takes these away (removing)";
        registry.register("label_migration", help, this.0.clone());
        this.set(None);
        this
    }

    fn set(&self, stage: Option<&'static str>) {
        for one in ["labelling", "leaving", "removing"] {
            let gauge = self.0.get_or_create_owned(&StageLabels { stage: one });
            gauge.set(i64::from(stage == Some(one)));
        }
    }
}

impl QuietPeriod {
    /// Whether the quiet period has passed, given the number of `repaired` objects and whether labelling is `finished`.
    fn is(&mut self, scheme: &Arc<Scheme>, finished: bool, repaired: u64, now: Instant) -> bool {
        let same =
            |(before, count, _): &(Arc<Scheme>, u64, Instant)| finished && before == scheme && *count == repaired;
        if !self.0.as_ref().is_some_and(same) {
            self.0 = finished.then(|| (Arc::clone(scheme), repaired, now));
        }
        self.0.as_ref().is_some_and(|(.., since)| now >= *since + settles(scheme))
    }
}

fn settles(scheme: &Scheme) -> Duration {
    let mut keys = scheme.in_force.keys().into_iter();
    let is_spare = keys.any(|key| key.starts_with(label::SPARE));
    if is_spare { SETTLES_AGAIN } else { SETTLES }
}

impl<Contacts: Fn() -> Arc<BTreeMap<PodName, Contact>>> Migration<Contacts> {
    pub async fn run(mut self) {
        let mut ticks = time::interval(PERIOD);
        let (mut settled, mut written) = (QuietPeriod::default(), None);
        loop {
            if !self.leadership.is_held() {
                self.metrics.set(None);
                self.notice.set(None);
                (settled, written) = (QuietPeriod::default(), None);
            }
            self.leadership.acquired().await;
            ticks.tick().await;
            let looked = time::timeout(DEADLINE, Box::pin(self.look(&mut settled, &mut written)));
            match looked.await {
                Ok(Ok(None)) => {}
                // The step was taken, and the event has a deadline of its own.
                Ok(Ok(Some((step, message)))) => {
                    if time::timeout(DEADLINE, self.publish_event(step, &message)).await.is_err() {
                        warn!(?step, "event not written in time");
                    }
                }
                Ok(Err(error)) => warn!(%error, state = MANAGER_STATE, "not written; tried again"),
                Err(_elapsed) => warn!(state = MANAGER_STATE, "not written in time; tried again"),
            }
        }
    }

    /// Takes the next step, if possible. Returns the step and its message. `written` is the stage that was written
    /// last.
    async fn look(
        &self,
        settled: &mut QuietPeriod,
        written: &mut Option<Stage>,
    ) -> kube::Result<Option<(Step, String)>> {
        let Some(scheme) = self.cache.scheme() else { return Ok(None) };
        let progress = self.current.of(&scheme);
        let repaired = progress.as_ref().map_or(0, Progress::repaired);
        let unfinished = match &progress {
            Some(progress) => progress.unfinished(),
            None => Some("it has only begun".to_owned()),
        };
        let labelled = settled.is(&scheme, unfinished.is_none(), repaired, Instant::now());
        let asked = scheme.former.is_some().then(|| self.still_asked(&scheme)).flatten();
        let facts = Facts { wanted: &self.wanted, labelled, left: asked.is_none() };
        let next = scheme.step(facts);
        let after = next.as_ref().map_or(&*scheme, |(after, _)| after);
        // These describe the stage before the step.
        let (unfinished, asked) = if next.is_some() { (None, None) } else { (unfinished, asked) };
        let stage = Stage::of(after, unfinished.as_deref(), asked.as_deref());
        self.metrics.set(stage.name);
        self.notice.set(stage.name.map(|_| stage.message.clone()));
        if next.is_none() && written.as_ref() == Some(&stage) && self.cache.is_scheme_written() {
            return Ok(None);
        }
        let stands = Box::pin(self.write(&scheme, after, &stage, &mut self.status_writer.take().await)).await?;
        if !stands {
            return Ok(None);
        }
        let taken = next.map(|(_, step)| (step, stage.message.clone()));
        if let Some((step, message)) = &taken {
            info!(?step, labels = message, "other labels");
        }
        *written = Some(stage);
        Ok(taken)
    }

    /// Who may still select by the former labels.
    fn still_asked(&self, scheme: &Arc<Scheme>) -> Option<String> {
        // Labels of an intermediate step are never kept.
        if self.keeps_former && scheme.in_force == self.wanted {
            return Some("they are to be kept (--keep-former-labels)".to_owned());
        }
        let plan = self.plans.borrow().clone();
        let Some(plan) = plan.filter(|plan| plan.snapshot.scheme == *scheme) else {
            return Some("what follows is not known yet".to_owned());
        };
        former_labels::used_by(&plan, &(self.contacts)(), &scheme.former_keys())
    }

    /// Writes scheme `after` and the stage, unless the scheme is not `before` any more. Returns whether the status has
    /// both now.
    async fn write(
        &self,
        before: &Scheme,
        after: &Scheme,
        far: &Stage,
        status_writer: &mut StatusPermit<'_>,
    ) -> kube::Result<bool> {
        let api: Api<ManagerState> = Api::all(self.client.clone());
        let found = read_or_create(&api, || self.leadership.is_held()).await?;
        let Some(found) = found else { return Ok(false) };
        let status = found.status.clone().unwrap_or_default();
        match status.labels.as_ref().map(Scheme::read) {
            // Another client wrote it meanwhile.
            Some(Ok(there)) if there != *before => return Ok(false),
            Some(Err(error)) => {
                let error = telemetry::chain(&error);
                warn!(error, state = MANAGER_STATE, "not read; what was known is written again");
            }
            Some(Ok(_)) | None => {}
        }
        let condition = far.condition(&status.conditions, Timestamp::now());
        let others = status.conditions.iter().filter(|one| one.type_ != CONDITION).cloned();
        let conditions = others.chain([condition]).collect();
        let labels = Some(after.written());
        let wanted = ManagerStateStatus { labels: labels.clone(), conditions, ..status.clone() };
        if wanted == status {
            return Ok(true);
        }
        if !self.leadership.is_held() {
            return Ok(false);
        }
        let next = ManagerState { status: Some(wanted), ..found };
        status_writer.writes();
        let written = api.replace_status(MANAGER_STATE, &PostParams::default(), &next).await?;
        let kept = written.status.is_some_and(|status| status.labels == labels);
        if !kept {
            warn!(
                state = MANAGER_STATE,
                "its definition is older than this manager, and has no `status.labels`: update the definitions"
            );
        }
        Ok(kept)
    }

    /// Publishes an event on the list of kinds.
    async fn publish_event(&self, step: Step, message: &str) {
        let reason = match step {
            Step::Begun => "Relabelling",
            Step::GivenUp => "RelabellingGivenUp",
            Step::Switched => "Relabelled",
            Step::Left => "FormerLabelsLeft",
            Step::Removed => "FormerLabelsRemoved",
        };
        let event = Event {
            type_: EventType::Normal,
            reason: reason.to_owned(),
            note: Some(message.chars().take(1000).collect()),
            action: "Relabel".to_owned(),
            secondary: None,
        };
        let list = list_of_kinds(&self.namespace);
        if let Err(error) = self.recorder.publish(&event, &list).await {
            warn!(%error, "event not written");
        }
    }
}

impl Stage {
    fn of(scheme: &Scheme, unfinished: Option<&str>, asked: Option<&str>) -> Self {
        let Scheme { in_force, next, former, leftover } = scheme;
        let labels = |one: &Labelling| format!("{} ({})", one.keys().join(", "), one.hash);
        let far = unfinished.unwrap_or("every object was gone through");
        let (name, message) = match (next, former) {
            (Some(next), _) => (
                Some("labelling"),
                format!(
                    "objects are given other labels, {}, beside those that shards go by, {}; until all have both: {far}",
                    labels(next),
                    labels(in_force)
                ),
            ),
            (None, Some(former)) => (
                Some("leaving"),
                format!(
                    "shards go by other labels, {}; objects keep those from before, {}, until nobody goes by them: {}",
                    labels(in_force),
                    labels(former),
                    asked.unwrap_or("nobody does")
                ),
            ),
            (None, None) if !leftover.is_empty() => {
                let keys: Vec<&str> = leftover.iter().map(String::as_str).collect();
                let keys = keys.join(", ");
                let message = format!("labels that nobody goes by are taken away, {keys}: {far}");
                (Some("removing"), message)
            }
            (None, None) => (None, format!("shards go by {}", labels(in_force))),
        };
        Self { name, message }
    }

    fn condition(&self, before: &[Condition], now: Timestamp) -> Condition {
        let (status, reason) = match self.name {
            None => ("True", "Done"),
            Some("labelling") => ("False", "Labelling"),
            Some("leaving") => ("False", "Leaving"),
            Some(_) => ("False", "Removing"),
        };
        let same = before.iter().find(|one| one.type_ == CONDITION && one.status == status);
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
        Condition {
            type_: CONDITION.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: self.message.clone(),
            observed_generation: None,
            last_transition_time: same.map_or_else(|| Time(now), |same| same.last_transition_time.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
