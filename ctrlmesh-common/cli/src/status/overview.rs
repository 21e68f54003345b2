//! Says how roots and shards by hand stand, by their status, and that of the CircuitBreakers beside them.
//!
//! Pure.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{
    BreakerState, CircuitBreaker, Root, ShardingConfig, ShardingConfigStatus, Trial, TrialPhase, is_problem,
};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::{Slot, SlotSet};
use ctrlmesh_manager::rules::shard::is_made_by;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::Serialize;

use super::shards::{ShardOverview, pods};
use crate::text::workload;

/// The reason of conditions of a shard without pods: nothing is wrong with it while it owns nothing.
const NO_PODS: &str = "NoPods";

/// The reason of conditions of a root that is switched off.
const DISABLED: &str = "Disabled";

/// How a root stands, or a shard by hand.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Overview {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// If not, it is a shard by hand, and the only one of `shards`.
    pub(super) is_root: bool,
    /// As `KIND NAME`. Absent: a shard by hand selects pods by their labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) workload: Option<String>,
    /// Absent: its proxies were told nothing yet, or the root is switched off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) epoch: Option<i64>,
    pub(crate) shards: Vec<ShardOverview>,
    /// Whether it is switched off. Then its shards stand alone, and its table does not count.
    pub(super) disabled: bool,
    /// Slots that belong to nobody now.
    pub(super) unowned_slots: Vec<Slot>,
    /// Namespaces that belong to nobody now, whatever their slot.
    pub(super) unowned_namespaces: Vec<String>,
    /// What is not as it should be.
    pub(crate) problems: Vec<Problem>,
    /// The revision on trial and its phase. Absent: none is tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trial: Option<TrialOverview>,
    /// Limits of CircuitBreakers that refuse requests of its pods now.
    pub(super) open_breakers: Vec<OpenBreaker>,
}

/// A condition that is not as it should be.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Problem {
    /// Of the root, or of a shard.
    pub(crate) of: String,
    pub(crate) condition: String,
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) since: Timestamp,
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

/// How each root among `configs` stands, and each shard that no root has made.
pub(crate) fn overviews(configs: &[ShardingConfig], breakers: &[CircuitBreaker]) -> Vec<Overview> {
    let mut roots: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for root in configs.iter().filter(|config| config.spec.root.is_some()) {
        roots.entry(root.namespace()).or_default().push(root);
    }
    let mut shards: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let mut by_hand = Vec::new();
    for shard in configs.iter().filter(|config| config.spec.root.is_none()) {
        let near = roots.get(&shard.namespace());
        match near.into_iter().flatten().find(|root| is_made_by(root, shard)) {
            Some(root) => shards.entry((root.namespace(), root.name_any())).or_default().push(shard),
            None => by_hand.push(Overview::of_shard(shard, breakers)),
        }
    }
    let of_root = |root: &ShardingConfig| {
        let shards = shards.remove(&(root.namespace(), root.name_any())).unwrap_or_default();
        Some(Overview::of_root(root, root.spec.root.as_ref()?, &shards, breakers))
    };
    let mut all: Vec<Overview> = configs.iter().filter_map(of_root).chain(by_hand).collect();
    all.sort_by(|one, other| one.namespace.cmp(&other.namespace));
    all
}

impl Overview {
    fn of_root(root: &ShardingConfig, rule: &Root, made: &[&ShardingConfig], breakers: &[CircuitBreaker]) -> Self {
        let (nothing, no_table) = (ShardingConfigStatus::default(), Ownership::default());
        let status = root.status.as_ref().unwrap_or(&nothing);
        let table = status.ownership.as_ref().unwrap_or(&no_table);
        let disabled = rule.disable == Some(true);
        let is_known = |problem: &Problem| disabled && is_switched_off(problem);
        let mut problems: Vec<_> =
            unseen(root).into_iter().chain(problems(root).filter(|one| !is_known(one))).collect();
        let mut shards = Vec::new();
        for shard in made {
            let by_table = ShardOverview::owning(&shard.name_any(), table, pods(shard, status.epoch));
            let counts = |problem: &Problem| !(by_table.idle && problem.reason == NO_PODS);
            problems.extend(self::problems(shard).filter(counts));
            let idle = by_table.idle;
            shards.push(if disabled { ShardOverview { idle, ..ShardOverview::alone(shard) } } else { by_table });
        }
        let (mut unowned_slots, mut unowned_namespaces) = (Vec::new(), Vec::new());
        if !disabled {
            shards.extend(others(table, made));
            let owned: SlotSet = table.slots.keys().copied().collect();
            unowned_slots.extend(owned.complement().iter());
            let revoked = table.revoked.iter().flat_map(|revoked| revoked.namespaces.keys());
            unowned_namespaces.extend(revoked.cloned());
        }
        Self {
            namespace: root.namespace().unwrap_or_default(),
            name: root.name_any(),
            is_root: true,
            workload: Some(workload(rule)),
            epoch: status.epoch.filter(|_| !disabled),
            disabled,
            unowned_slots,
            unowned_namespaces,
            problems,
            trial: TrialOverview::of(rule, status).filter(|_| !disabled),
            open_breakers: open_breakers(breakers, root.namespace().as_deref(), &shards),
            shards,
        }
    }

    /// A shard by hand.
    fn of_shard(shard: &ShardingConfig, breakers: &[CircuitBreaker]) -> Self {
        let shards = vec![ShardOverview::alone(shard)];
        Self {
            namespace: shard.namespace().unwrap_or_default(),
            name: shard.name_any(),
            is_root: false,
            workload: None,
            epoch: shard.status.as_ref().and_then(|status| status.epoch),
            disabled: false,
            unowned_slots: Vec::new(),
            unowned_namespaces: Vec::new(),
            problems: unseen(shard).into_iter().chain(problems(shard)).collect(),
            trial: None,
            open_breakers: open_breakers(breakers, shard.namespace().as_deref(), &shards),
            shards,
        }
    }

    /// Whether it is a root that divides by an ownership table now.
    pub(super) fn divides(&self) -> bool {
        self.is_root && !self.disabled
    }

    /// The shards for which there is something to be done.
    pub(super) fn busy_shards(&self) -> impl Iterator<Item = &ShardOverview> {
        self.shards.iter().filter(|shard| !shard.idle)
    }

    /// The same, as if all pods had been in touch just now.
    pub(super) fn without_ages(&self) -> Self {
        let mut all = self.clone();
        all.shards.iter_mut().flat_map(|shard| &mut shard.pods).for_each(|pod| pod.last_contact = None);
        all
    }

    /// Whether every object has an owner, and nothing is wrong.
    pub(crate) fn is_well(&self) -> bool {
        let owns_all = self.unowned_slots.is_empty() && self.unowned_namespaces.is_empty();
        owns_all && self.problems.is_empty() && self.open_breakers.is_empty()
    }
}

impl TrialOverview {
    /// `None`: no version is tried.
    fn of(rule: &Root, status: &ShardingConfigStatus) -> Option<Self> {
        let Trial { revision, phase, step, .. } = status.rollout.as_ref()?.trial.as_ref()?;
        let steps = rule.rollout.as_ref().map_or(0, |rollout| rollout.steps().len());
        Some(Self { revision: revision.clone(), phase: *phase, step: *step, steps })
    }
}

/// Whether a condition of a root says only that the root is switched off.
fn is_switched_off(problem: &Problem) -> bool {
    problem.reason == DISABLED || problem.condition == "Programmed"
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

fn problems(config: &ShardingConfig) -> impl Iterator<Item = Problem> {
    let conditions = config.status.iter().flat_map(|status| &status.conditions);
    conditions.filter(|one| is_problem(one)).map(|one| Problem {
        of: config.name_any(),
        condition: one.type_.clone(),
        reason: one.reason.clone(),
        message: one.message.clone(),
        since: one.last_transition_time.0,
    })
}

fn open_breakers(breakers: &[CircuitBreaker], namespace: Option<&str>, shards: &[ShardOverview]) -> Vec<OpenBreaker> {
    let pods: BTreeSet<&str> = shards.iter().flat_map(|shard| &shard.pods).map(|pod| &*pod.name).collect();
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
