//! Computes the status of a ShardingConfig.
//!
//! Pure: takes the plan and the contacts of the proxies. All replicas go by the epoch in the status; the rest
//! is for people.

use std::collections::BTreeMap;
use std::time::Duration;

use ctrlmesh_common::api::{PodStatus, RolloutStatus, Root, RootStatus, ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::STANDBY;
use ctrlmesh_common::wire::WebhookState;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::audit::Ownerships;
use crate::cluster::plan::Plan;
use crate::ownership::fence_state::States;
use crate::rules::compile::{CompiledPolicy, Record};
use crate::rules::fenced::is_fenced;
use crate::rules::label_coverage::{self, LabelCoverage, LabelCoverages, LabelGap, MissingRule};
use crate::rules::object_name::{full_name, name};
use crate::rules::pod::{Member, PodName};
use crate::rules::rollout::Decisions;
use crate::status::finding::{Finding, condition, finding, listed, seconds};

mod fenced;
mod owned;
mod plan_index;
mod programmed;
mod rollout;
mod webhook;

pub use plan_index::PlanIndex;
use webhook::OfWebhook;

/// How old `lastContact` may become in the status while nothing else changes. For connected proxies it is
/// rewritten at each multiple, for all configs at once: every such write triggers a new plan.
const CONTACT_PRECISION: Duration = Duration::from_mins(5);

/// A proxy that is gone for longer is reported. A restart of a proxy or manager is shorter.
pub const AWAY: Duration = Duration::from_mins(1);

/// What a pod's proxy reported last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contact {
    /// Last acknowledged epoch.
    pub epoch: u64,
    /// Of the policy in force there; 0 if unknown.
    pub digest: u64,
    /// Why the proxy refused its last policy.
    pub refused: Option<String>,
    pub connected: bool,
    /// Last contact; of no meaning while it is connected.
    pub at: Timestamp,
    /// What becomes of calls to the pod's webhook, if the proxy has said it.
    pub webhook: Option<WebhookState>,
}

impl Contact {
    /// How long the proxy has not been connected; `None` while it is.
    pub fn away_for(&self, now: Timestamp) -> Option<Duration> {
        if self.connected { None } else { Duration::try_from(now.duration_since(self.at)).ok() }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct StatusInputs<'a> {
    pub contacts: &'a BTreeMap<PodName, Contact>,
    /// What blocks a root's shards, by `NAMESPACE/NAME` of the root.
    pub conflicts: &'a BTreeMap<String, Vec<String>>,
    /// Of what the list of kinds names, and of a running migration.
    pub unlabelled: Option<&'a Unlabelled>,
    pub fences: &'a States,
    /// Of what roots name.
    pub coverages: &'a LabelCoverages,
    /// What rollouts say next.
    pub rollouts: &'a Decisions,
    /// What the audit says of who owns what.
    pub ownerships: &'a Ownerships,
    /// Whether this replica became leader so recently that some proxies have not reported yet.
    pub new_leader: bool,
    pub now: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unlabelled {
    /// Some objects lack the labels that shards select by: no shard owns them.
    Some(String),
    /// All objects have those labels, and get other ones too.
    Beside(String),
}

impl Contact {
    /// Whether `policy` is in force. Not by epoch: another operator, or one created anew, may have the same number.
    pub fn acknowledged(&self, policy: &CompiledPolicy) -> bool {
        self.digest != 0 && self.digest == policy.digest()
    }

    fn last_contact(&self, now: Timestamp) -> Timestamp {
        if self.connected { now } else { self.at }
    }

    /// Whether `last` is recent enough to stay in the status.
    fn is_recent(&self, last: &Time, now: Timestamp) -> bool {
        let precision = CONTACT_PRECISION.as_secs().cast_signed();
        if self.connected {
            return last.0.as_second().div_euclid(precision) == now.as_second().div_euclid(precision);
        }
        Duration::try_from(self.at.duration_since(last.0)).is_ok_and(|age| age < CONTACT_PRECISION)
    }
}

/// Fields about which nothing new is known stay as they are.
pub fn of(
    config: &ShardingConfig,
    plan: &Plan,
    index: &PlanIndex<'_>,
    inputs: StatusInputs<'_>,
) -> ShardingConfigStatus {
    let nothing = ShardingConfigStatus::default();
    let before = config.status.as_ref().unwrap_or(&nothing);
    let (name, full_name) = (name(&config.metadata), full_name(&config.metadata));
    let record = plan.compiled.operators.get(&full_name);
    let root = index.root(config);
    let root_record = root.as_ref().and_then(|root| plan.compiled.operators.get(root));
    let (all, is_root) = (index.pods(&full_name, name, record, root.as_deref()), config.spec.root.is_some());
    let mut status = ShardingConfigStatus {
        observed_generation: config.metadata.generation,
        is_root: Some(is_root),
        pods: if is_root { Vec::new() } else { pod_statuses(&all, &before.pods, record.or(root_record), inputs) },
        conditions: Vec::new(),
        epoch: before.epoch,
        policy_digest: before.policy_digest.clone(),
        changed_at: before.changed_at.clone(),
        root: before.root.clone(),
        ownership: before.ownership.clone(),
        wanted: before.wanted.clone(),
        rollout: rollout_status(config, &full_name, before, inputs.rollouts),
    };
    match (record, root_record) {
        (Some(record), _) => write(record, &mut status),
        // A shard gets its root's epoch once the root's status has it.
        (None, Some(record)) if record.written => {
            status.epoch = i64::try_from(record.epoch).ok();
            status.policy_digest = record.shards.get(name).cloned();
        }
        _ => {}
    }
    if status.epoch != before.epoch {
        // The version from which the epoch was decided.
        status.changed_at.clone_from(&config.metadata.resource_version);
    }
    let accepted = accepted(config, &full_name, plan);
    let programmed = programmed::of(config, record.or(root_record), &all, (index, plan), inputs);
    let coverage = inputs.coverages.of(if is_root { &full_name } else { root.as_deref().unwrap_or_default() });
    let degraded = degraded(&full_name, record, &all, plan, inputs, coverage);
    let settled = config.spec.root.as_ref().map(|rule| ("Settled", settled(rule, record)));
    let conditions = [("Accepted", accepted), ("Programmed", programmed), ("Degraded", degraded)];
    let fenced = fenced::of(config, &full_name, &before.conditions, inputs.fences).map(|one| (fenced::FENCED, one));
    let labelled = coverage.filter(|_| is_root).map(|coverage| (label_coverage::CONDITION, labelled(coverage)));
    let (operator, shard) = (root.as_deref().unwrap_or(&full_name), (!is_root).then_some(name));
    let routed = OfWebhook { config, operator, shard, pods: &all }
        .finding(plan, inputs)
        .map(|finding| (webhook::WEBHOOK_ROUTED, finding));
    let owned = owned::of(&full_name, &before.conditions, inputs.ownerships);
    let conditions = conditions.into_iter().chain(settled).chain(labelled).chain(fenced).chain(owned).chain(routed);
    let conditions = conditions.chain(rollout::findings(config, status.rollout.as_ref(), plan));
    let condition =
        |(kind, finding)| condition(kind, finding, config.metadata.generation, &before.conditions, inputs.now);
    status.conditions = conditions.map(condition).collect();
    status
}

/// A decision counts for the status that it follows. Of a root that tries no versions it stays known only which shards
/// its pods are of.
fn rollout_status(
    config: &ShardingConfig,
    root: &str,
    before: &ShardingConfigStatus,
    decisions: &Decisions,
) -> Option<RolloutStatus> {
    let rule = config.spec.root.as_ref();
    if rule.is_none_or(|rule| rule.rollout.is_none() || rule.disable == Some(true)) {
        let second = before.rollout.as_ref()?.second;
        return second.then(|| RolloutStatus { second, ..RolloutStatus::default() });
    }
    let decision = decisions.get(root).filter(|decision| decision.base == before.rollout);
    decision.map(|decision| decision.next.clone()).or_else(|| before.rollout.clone())
}

/// What the status said before.
fn as_before(before: &[Condition], kind: &str) -> Option<Finding> {
    let before = before.iter().find(|one| one.type_ == kind)?;
    Some(Finding {
        holds: before.status == "True",
        reason: before.reason.clone().into(),
        message: before.message.clone(),
    })
}

/// Whether no ownership of the root is on its way. It counts for the table that is written with it.
fn settled(rule: &Root, record: Option<&Record>) -> Finding {
    match record {
        _ if rule.disable == Some(true) => finding(true, "Disabled", "the root is switched off; nothing moves"),
        None => finding(false, "Undecided", "who should own what is not decided"),
        Some(record) if !record.waiting.is_empty() => finding(false, "Moving", record.waiting.join("; ")),
        Some(_) if is_fenced(rule) => finding(true, "Settled", "every share is with the owner that the root names"),
        Some(_) => finding(true, "Unfenced", "what moves, moves at once: spec.root.fence is Off"),
    }
}

/// The status of a root, or of a standalone ShardingConfig.
fn write(record: &Record, status: &mut ShardingConfigStatus) {
    status.epoch = i64::try_from(record.epoch).ok();
    status.policy_digest = Some(record.policy_digest.clone());
    if let Some(ownership) = &record.ownership {
        status.ownership = Some(ownership.clone());
        status.wanted.clone_from(&record.wanted);
        let names = record.shards.keys().cloned().collect();
        status.root = Some(RootStatus { child_sharding_configs: names });
    }
}

fn pod_statuses(
    pods: &[(&Member, &CompiledPolicy)],
    before: &[PodStatus],
    record: Option<&Record>,
    inputs: StatusInputs<'_>,
) -> Vec<PodStatus> {
    let table = record.and_then(|record| record.ownership.as_ref());
    let owner = |pod: &Member| table.and_then(|table| table.pod_uids.get(&pod.uid));
    let mut by_name: BTreeMap<&str, Vec<&PodStatus>> = BTreeMap::new();
    for one in before {
        by_name.entry(&one.name).or_default().push(one);
    }
    let status = |(member, _): &(&Member, &CompiledPolicy)| {
        let contact = inputs.contacts.get(&member.name);
        // An entry about an earlier pod of the same name does not count.
        let its_own = |before: &PodStatus| {
            let last = before.last_contact.as_ref().map(|last| last.0.as_second());
            member.created_at.is_none_or(|created_at| last.is_none_or(|last| last >= created_at))
        };
        let mut before = by_name.get(member.name.name.as_str()).into_iter().flatten();
        let before = before.find(|before| its_own(before)).copied();
        let epoch = contact.and_then(|contact| i64::try_from(contact.epoch).ok());
        let last = before.and_then(|before| before.last_contact.clone());
        let last_contact = match (last, contact) {
            (Some(last), Some(contact)) if contact.is_recent(&last, inputs.now) => Some(last),
            (last, contact) => contact.map(|one| Time(seconds(one.last_contact(inputs.now)))).or(last),
        };
        PodStatus {
            name: member.name.name.clone(),
            node: member.node.clone(),
            epoch: epoch.or(before.and_then(|before| before.epoch)),
            last_contact,
            stands_by: owner(member).is_some_and(|owner| owner == STANDBY),
        }
    };
    pods.iter().map(status).collect()
}

fn accepted(config: &ShardingConfig, full_name: &str, plan: &Plan) -> Finding {
    let problems = plan.compiled.troubles.iter().filter(|trouble| {
        trouble.object.starts_with("ShardingConfig ") && trouble.configs.iter().any(|config| config == full_name)
    });
    let problems: Vec<&str> = problems.map(|trouble| trouble.message.as_str()).collect();
    let disabled = config.spec.root.as_ref().is_some_and(|root| root.disable == Some(true));
    match problems[..] {
        [] if disabled => finding(true, "Disabled", "the root is switched off; its shards stay as they are"),
        [] => finding(true, "Valid", "it is valid and complete"),
        _ => finding(false, "Invalid", problems.join("; ")),
    }
}

fn degraded(
    full_name: &str,
    record: Option<&Record>,
    pods: &[(&Member, &CompiledPolicy)],
    plan: &Plan,
    inputs: StatusInputs<'_>,
    coverage: Option<&LabelCoverage>,
) -> Finding {
    let refused = pods.iter().find_map(|(member, _)| {
        let reason = inputs.contacts.get(&member.name)?.refused.as_ref()?;
        Some(format!("the proxy of pod {} refuses its policy: {reason}", member.name.name))
    });
    if let Some(message) = refused {
        return finding(true, "PolicyRefused", message);
    }
    if let Some(conflicts) = inputs.conflicts.get(full_name) {
        return finding(true, "Conflict", listed(conflicts, "; "));
    }
    let selected_twice =
        plan.compiled.troubles.iter().find(|trouble| {
            trouble.object.starts_with("Pod ") && trouble.configs.iter().any(|config| config == full_name)
        });
    if let Some(trouble) = selected_twice {
        let message = format!("{} {}", trouble.object, trouble.message);
        return finding(true, "PodSelectedTwice", message);
    }
    if let Some(absent) = absent(pods, inputs) {
        return finding(true, "ProxyAway", absent);
    }
    match record.map(|record| record.unserved.as_slice()) {
        Some([_, ..]) if pods.is_empty() => {
            finding(true, "NoPods", "no pod of the operator is enrolled; nobody owns anything")
        }
        Some(unserved @ [_, ..]) => {
            let names = listed(unserved, ", ");
            let message = format!("no pod is of {names}: their objects are reconciled by nobody");
            finding(true, "ShardsWithoutPods", message)
        }
        _ => unlabelled(inputs.unlabelled, coverage),
    }
}

/// What is wrong with labels. A root, and its shards, go by the kinds that it names, and others by the list of kinds.
fn unlabelled(listed: Option<&Unlabelled>, coverage: Option<&LabelCoverage>) -> Finding {
    let gap = coverage.and_then(|coverage| coverage.gap.as_ref());
    match (gap, listed) {
        (Some(LabelGap::Forbidden(rules)), _) => finding(true, "LabelsForbidden", forbidden(rules)),
        (Some(LabelGap::InProgress(message)), _) => finding(true, "Labelling", message),
        (Some(LabelGap::Failed(message)), _) | (None, Some(Unlabelled::Some(message)))
            if gap.is_some() || coverage.is_none() =>
        {
            finding(true, "Unlabelled", message)
        }
        (_, Some(Unlabelled::Beside(message))) => finding(false, "Relabelling", message),
        _ => finding(false, "AsExpected", "nothing is wrong"),
    }
}

fn forbidden(rules: &[MissingRule]) -> String {
    let rules: Vec<String> = rules.iter().map(MissingRule::text).collect();
    format!(
        "the manager may not {}: no ClusterRole with label {}: \"true\" allows it; an event has the YAML to apply",
        listed(&rules, "; "),
        label::AGGREGATE_TO_LABELS
    )
}

/// Whether every object of a root's kinds has had its labels once. It stays true where one lacks them later.
fn labelled(coverage: &LabelCoverage) -> Finding {
    if coverage.permits_grants() {
        finding(true, "Complete", "every object of the kinds that the root names has had its labels")
    } else {
        Finding { holds: false, ..unlabelled(None, Some(coverage)) }
    }
}

/// Pods whose proxies were not heard of for [`AWAY`].
fn absent(pods: &[(&Member, &CompiledPolicy)], inputs: StatusInputs<'_>) -> Option<String> {
    let absent = pods.iter().filter(|(member, _)| {
        let away = inputs.contacts.get(&member.name).and_then(|contact| contact.away_for(inputs.now));
        !member.terminating && away.is_some_and(|away| away > AWAY)
    });
    let names: Vec<String> = absent.map(|(member, _)| member.name.name.clone()).collect();
    let message = || {
        format!(
            "no word for a minute from the proxies of {}; they go on by their last policy, if they live",
            listed(&names, ", ")
        )
    };
    (!names.is_empty()).then(message)
}

#[cfg(test)]
mod tests;
