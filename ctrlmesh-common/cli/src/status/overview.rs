//! Says how a root stands, by its status, that of its shards, and that of the CircuitBreakers beside it.
//!
//! Pure.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{
    BreakerState, CircuitBreaker, PodStatus, Root, ShardingConfig, ShardingConfigStatus, Trial, TrialPhase,
};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::{Slot, SlotSet};
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::Serialize;

use crate::text::{dash, since, workload};

/// Conditions that are True where all is well.
const GOOD: [&str; 5] = ["Accepted", "Labelled", "Programmed", "Settled", "WebhookRouted"];

/// Conditions that are True where something is wrong.
const BAD: [&str; 2] = ["Degraded", "RolledBack"];

/// Reasons of `Fenced` by which the API server does not refuse what it should.
const UNFENCED: [&str; 3] = ["NotProved", "NotWritten", "Unsupported"];

/// Reasons of `Progressing` by which a version goes no further.
const STUCK: [&str; 2] = ["StrategyCannotHold", "Held"];

/// The reason of conditions of a shard without pods: nothing is wrong with it while it owns nothing.
const NO_PODS: &str = "NoPods";

/// How a root stands.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RootOverview {
    pub(super) namespace: String,
    pub(super) name: String,
    /// As `KIND NAME`.
    pub(super) workload: String,
    /// Absent: there is no table yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) epoch: Option<i64>,
    pub(super) shards: Vec<ShardOverview>,
    /// Whether it is switched off. Then its shards stand alone, and what else is here is from before.
    pub(super) disabled: bool,
    /// Slots that belong to nobody now.
    pub(super) unowned_slots: Vec<Slot>,
    /// Namespaces that belong to nobody now, whatever their slot.
    pub(super) unowned_namespaces: Vec<String>,
    /// What is not as it should be.
    pub(super) problems: Vec<Problem>,
    /// The revision on trial and its phase. Absent: none is tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trial: Option<TrialOverview>,
    /// Limits of CircuitBreakers that refuse requests of its pods now.
    pub(super) open_breakers: Vec<OpenBreaker>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ShardOverview {
    pub(super) name: String,
    pub(super) slots: Vec<Slot>,
    /// Namespaces that it owns whatever their slot.
    pub(super) namespaces: Vec<String>,
    pub(super) pods: Vec<PodOverview>,
}

/// A pod, and how far its proxy is.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodOverview {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
    /// That its proxy has. Absent: none yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<i64>,
    /// Whether that is the epoch of the root.
    pub(crate) current: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_contact: Option<Timestamp>,
}

impl PodOverview {
    /// The headings of [`Self::cells`].
    pub(crate) const HEAD: [&str; 4] = ["POD", "NODE", "EPOCH", "CONTACT"];

    /// For a table.
    pub(crate) fn cells(&self, now: Timestamp) -> [String; 4] {
        [
            self.name.clone(),
            self.node.clone().unwrap_or_else(dash),
            self.epoch.map_or_else(dash, |epoch| epoch.to_string()),
            self.last_contact.map_or_else(dash, |contact| format!("{} ago", since(contact, now))),
        ]
    }
}

/// A condition that is not as it should be.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Problem {
    /// Of the root, or of a shard.
    pub(super) of: String,
    pub(super) condition: String,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) since: Timestamp,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TrialOverview {
    pub(super) revision: String,
    pub(super) phase: TrialPhase,
    pub(super) step: i32,
    pub(super) steps: usize,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OpenBreaker {
    pub(super) breaker: String,
    pub(super) limit: String,
    pub(super) pod: String,
}

/// How each root among `configs` stands.
pub(super) fn overviews(configs: &[ShardingConfig], breakers: &[CircuitBreaker]) -> Vec<RootOverview> {
    let by_name: BTreeMap<_, _> = configs.iter().map(|one| ((one.namespace(), one.name_any()), one)).collect();
    let overview = |root: &ShardingConfig| {
        let rule = root.spec.root.as_ref()?;
        let names = root.status.iter().filter_map(|status| status.root.as_ref());
        let names = names.flat_map(|made| &made.child_sharding_configs);
        let shards: Vec<_> = names.filter_map(|name| by_name.get(&(root.namespace(), name.clone()))).copied().collect();
        Some(RootOverview::of(root, rule, &shards, breakers))
    };
    configs.iter().filter_map(overview).collect()
}

impl RootOverview {
    fn of(root: &ShardingConfig, rule: &Root, shards: &[&ShardingConfig], breakers: &[CircuitBreaker]) -> Self {
        let (nothing, no_table) = (ShardingConfigStatus::default(), Ownership::default());
        let status = root.status.as_ref().unwrap_or(&nothing);
        let table = status.ownership.as_ref().unwrap_or(&no_table);
        let mut problems: Vec<_> = unseen(root).into_iter().chain(problems(root)).collect();
        let mut shard_overviews = Vec::new();
        for shard in shards {
            let overview = ShardOverview::owning(&shard.name_any(), table, pods(shard, status.epoch));
            let counts = |problem: &Problem| !(overview.is_idle() && problem.reason == NO_PODS);
            problems.extend(self::problems(shard).filter(counts));
            shard_overviews.push(overview);
        }
        shard_overviews.extend(others(table, shards));
        let pods: BTreeSet<&str> = shard_overviews.iter().flat_map(|shard| &shard.pods).map(|pod| &*pod.name).collect();
        let open_breakers = open_breakers(breakers, root.namespace().as_deref(), &pods);
        let owned: SlotSet = table.slots.keys().copied().collect();
        let revoked = table.revoked.iter().flat_map(|revoked| revoked.namespaces.keys());
        let trial = status.rollout.as_ref().and_then(|rollout| rollout.trial.as_ref());
        let steps = rule.rollout.as_ref().map_or(0, |rollout| rollout.steps().len());
        let of = |trial: &Trial| TrialOverview {
            revision: trial.revision.clone(),
            phase: trial.phase,
            step: trial.step,
            steps,
        };
        let unowned = if status.ownership.is_some() { owned.complement() } else { SlotSet::ALL };
        Self {
            namespace: root.namespace().unwrap_or_default(),
            name: root.name_any(),
            workload: workload(rule),
            epoch: status.epoch,
            disabled: rule.disable.unwrap_or_default(),
            unowned_slots: unowned.iter().collect(),
            unowned_namespaces: revoked.cloned().collect(),
            problems,
            trial: trial.map(of),
            open_breakers,
            shards: shard_overviews,
        }
    }

    /// The shards for which there is something to be done.
    pub(super) fn busy_shards(&self) -> impl Iterator<Item = &ShardOverview> {
        self.shards.iter().filter(|shard| !shard.is_idle())
    }

    /// The same, as if all pods had been in touch just now.
    pub(super) fn without_ages(&self) -> Self {
        let mut all = self.clone();
        all.shards.iter_mut().flat_map(|shard| &mut shard.pods).for_each(|pod| pod.last_contact = None);
        all
    }

    /// Whether every object has an owner, and nothing is wrong.
    pub(super) fn is_well(&self) -> bool {
        let owns_all = self.unowned_slots.is_empty() && self.unowned_namespaces.is_empty();
        owns_all && self.problems.is_empty() && self.open_breakers.is_empty()
    }
}

/// Owners that have no ShardingConfig among `shards`: pods that are not enrolled, and shards that are gone.
fn others(table: &Ownership, shards: &[&ShardingConfig]) -> Vec<ShardOverview> {
    let names: BTreeSet<&String> = table.slots.values().chain(table.namespaces.values()).collect();
    let is_shard = |name: &String| shards.iter().any(|shard| shard.name_any() == *name);
    names
        .into_iter()
        .filter(|name| !is_shard(name))
        .map(|name| ShardOverview::owning(name, table, Vec::new()))
        .collect()
}

/// The problem that the status is not of the newest spec.
fn unseen(root: &ShardingConfig) -> Option<Problem> {
    let (wanted, seen) = (root.metadata.generation?, root.status.as_ref().and_then(|one| one.observed_generation));
    (seen != Some(wanted)).then(|| Problem {
        of: root.name_any(),
        condition: "Accepted".to_owned(),
        reason: "NotSeen".to_owned(),
        message: "no manager has seen this spec yet: the rest is of an earlier one".to_owned(),
        since: root.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0),
    })
}

impl ShardOverview {
    /// Whether nothing is to be done for it.
    fn is_idle(&self) -> bool {
        self.slots.is_empty() && self.namespaces.is_empty() && self.pods.is_empty()
    }

    fn owning(name: &str, table: &Ownership, pods: Vec<PodOverview>) -> Self {
        let slots = table.slots.iter().filter(|(_, owner)| *owner == name).map(|(slot, _)| *slot);
        let namespaces = table.namespaces.iter().filter(|(_, owner)| *owner == name);
        Self {
            name: name.to_owned(),
            slots: slots.collect(),
            namespaces: namespaces.map(|(namespace, _)| namespace.clone()).collect(),
            pods,
        }
    }
}

/// The pods of a shard, whose root is in this epoch.
pub(crate) fn pods(shard: &ShardingConfig, epoch: Option<i64>) -> Vec<PodOverview> {
    let overview = |pod: &PodStatus| PodOverview {
        name: pod.name.clone(),
        node: pod.node.clone(),
        epoch: pod.epoch,
        current: pod.epoch.is_some() && pod.epoch == epoch,
        last_contact: pod.last_contact.as_ref().map(|contact| contact.0),
    };
    shard.status.iter().flat_map(|status| &status.pods).map(overview).collect()
}

fn problems(config: &ShardingConfig) -> impl Iterator<Item = Problem> {
    let conditions = config.status.iter().flat_map(|status| &status.conditions);
    let is_bad = |kind: &str, reason: &str, status: &str| {
        let is_true = status == "True";
        GOOD.contains(&kind) && !is_true
            || BAD.contains(&kind) && is_true
            || kind == "Fenced" && UNFENCED.contains(&reason)
            || kind == "Progressing" && STUCK.contains(&reason)
    };
    let bad = conditions.filter(move |one| is_bad(&one.type_, &one.reason, &one.status));
    bad.map(|one| Problem {
        of: config.name_any(),
        condition: one.type_.clone(),
        reason: one.reason.clone(),
        message: one.message.clone(),
        since: one.last_transition_time.0,
    })
}

fn open_breakers(breakers: &[CircuitBreaker], namespace: Option<&str>, pods: &BTreeSet<&str>) -> Vec<OpenBreaker> {
    let mut open = Vec::new();
    for breaker in breakers.iter().filter(|one| one.namespace().as_deref() == namespace) {
        for target in breaker.status.iter().flat_map(|status| &status.target_status) {
            let Some(pod) = target.target.pod_name.as_ref().filter(|pod| pods.contains(pod.as_str())) else { continue };
            let limits = target.limiting_snapshots.iter().filter(|limit| limit.state == BreakerState::Opened);
            open.extend(limits.map(|limit| OpenBreaker {
                breaker: breaker.name_any(),
                limit: limit.name.clone(),
                pod: pod.clone(),
            }));
        }
    }
    open
}
