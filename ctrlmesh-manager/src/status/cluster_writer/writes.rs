//! Compares the plan with the cluster and lists the writes that are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus, is_problem};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::write_queue::DECIDE_INTERVAL;
use crate::audit::Ownerships;
use crate::cluster::plan::{Changed, Plan};
use crate::ownership::fence_state::States;
use crate::rules::fenced::{is_fenced, is_handing_back};
use crate::rules::label_coverage::{self, LabelCoverages};
use crate::rules::object_name::{full_name, name};
use crate::rules::pod::{Member, PodName};
use crate::rules::rollout::Decisions;
use crate::rules::shard;
use crate::rules::shared::each;
use crate::status::compute::{self, AWAY, Contact, PlanIndex, StatusInputs, Unlabelled};

mod finalizers;
mod moves;
mod rollouts;

pub use moves::{GRANTED, GrantedShare};

#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// A shard of a root is missing or differs.
    Apply {
        /// As wanted, with the UID and version of the existing object.
        config: Box<ShardingConfig>,
        /// Fields of the spec that somebody added; a server-side apply would leave them.
        added: Vec<&'static str>,
    },
    /// A shard that its root does not have any more.
    Remove { config: Box<ShardingConfig> },
    /// A pod whose label names another shard.
    Label { pod: PodName, uid: String, shard: String },
    Status {
        /// With the wanted status.
        config: Box<ShardingConfig>,
        /// Whether the epoch changes: proxies get their policies only after this write.
        is_awaited: bool,
        /// Whether the ownership table of a root that is fenced changes, or its rollout, from which a move follows: a
        /// move waits for each table.
        is_move: bool,
        events: Vec<EventNote>,
    },
    /// A root that must not go, or may go.
    Finalizers { config: Box<ShardingConfig>, finalizers: Vec<String> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventNote {
    pub warning: bool,
    /// One word.
    pub reason: String,
    pub message: String,
}

/// What the status depends on besides the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observations {
    pub contacts: Arc<BTreeMap<PodName, Contact>>,
    pub unlabelled: Option<Unlabelled>,
    pub fences: Arc<States>,
    /// Of what roots name.
    pub coverages: LabelCoverages,
    /// What rollouts say next.
    pub rollouts: Arc<Decisions>,
    /// What the audit says of who owns what.
    pub ownerships: Arc<Ownerships>,
    /// Whether this replica became leader so recently that some proxies have not reported yet.
    pub new_leader: bool,
}

impl Observations {
    /// The namespaces in which something is observed that was not before, or has lasted until now.
    pub fn changed(&self, before: &Self, now: Timestamp) -> Changed {
        let mut changed = Changed::default();
        let audited = match (&*before.ownerships, &*self.ownerships) {
            (Some(old), Some(new)) => {
                changed.compare_by_name(old, new);
                true
            }
            (old, new) => old.is_none() && new.is_none(),
        };
        if !audited || self.unlabelled != before.unlabelled || self.new_leader != before.new_leader {
            return Changed::All;
        }
        changed.compare_maps(&before.contacts, &self.contacts, |pod| &pod.namespace);
        changed.compare_by_name(&before.fences, &self.fences);
        changed.compare_by_name(before.coverages.by_root(), self.coverages.by_root());
        changed.compare_by_name(&before.rollouts, &self.rollouts);
        // All are looked at within that time.
        let lately = AWAY..=AWAY + DECIDE_INTERVAL;
        let away =
            self.contacts.iter().filter(|(_, contact)| contact.away_for(now).is_some_and(|it| lately.contains(&it)));
        changed.add(away.map(|(pod, _)| pod.namespace.as_str()));
        changed
    }

    /// In what time the next proxy will have been away for so long that it is reported.
    pub fn next_away(&self, now: Timestamp) -> Option<Duration> {
        let left = |contact: &Contact| AWAY.checked_sub(contact.away_for(now)?);
        // It is reported once it has been away for longer.
        self.contacts.values().filter_map(left).min().map(|left| left + Duration::from_millis(1))
    }
}

/// What has to be written in these namespaces.
///
/// Shards first, status last. They need no order: the API server refuses a write that is based on an old
/// version, and it is decided again.
pub fn writes(plan: &Plan, observed: &Observations, within: &Changed, now: Timestamp) -> Vec<Write> {
    let mut conflicts = BTreeMap::new();
    let mut writes = shards(plan, within, &mut conflicts);
    writes.extend(labels(plan, within));
    let unlabelled = observed.unlabelled.as_ref();
    let (contacts, new_leader) = (&observed.contacts, observed.new_leader);
    let (coverages, fences, rollouts) = (&observed.coverages, &*observed.fences, &*observed.rollouts);
    let (ownerships, conflicts) = (&*observed.ownerships, &conflicts);
    let inputs =
        StatusInputs { contacts, conflicts, unlabelled, fences, coverages, rollouts, ownerships, new_leader, now };
    let index = PlanIndex::of(plan, within);
    writes.extend(finalizers::writes(plan, within, &observed.fences));
    let configs = plan.snapshot.configs_in(within);
    for config in configs.filter(|config| !is_leaving(config) || is_handing_back(config)) {
        let status = compute::of(config, plan, &index, inputs);
        if config.status.as_ref() != Some(&status) {
            let mut events = events(config.status.as_ref(), &status);
            events.extend(proposed_roles(config, &events, coverages));
            let before = config.status.as_ref();
            let is_awaited = status.epoch != before.and_then(|before| before.epoch);
            let table = before.and_then(|before| before.ownership.as_ref());
            let moved = status.ownership.as_ref().filter(|_| config.spec.root.as_ref().is_some_and(is_fenced));
            let moved = moved.filter(|after| table != Some(*after));
            events.extend(moved.into_iter().flat_map(|after| moves::events(table, after)));
            let rollout = before.and_then(|before| before.rollout.as_ref());
            events.extend(rollouts::events(rollout, status.rollout.as_ref()));
            let is_move = moved.is_some() || status.rollout.as_ref() != rollout;
            let config = Box::new(ShardingConfig { status: Some(status), ..config.clone() });
            writes.push(Write::Status { config, is_awaited, is_move, events });
        }
    }
    writes
}

/// Adds to `conflicts` what blocks a root's shards.
fn shards(plan: &Plan, within: &Changed, conflicts: &mut BTreeMap<String, Vec<String>>) -> Vec<Write> {
    let labelling = &plan.snapshot.scheme.in_force;
    let mut by_namespace: BTreeMap<Option<&String>, Vec<&ShardingConfig>> = BTreeMap::new();
    for config in plan.snapshot.configs_in(within) {
        by_namespace.entry(config.metadata.namespace.as_ref()).or_default().push(config);
    }
    let mut writes = Vec::new();
    for root in plan.snapshot.roots_in(within) {
        let siblings = by_namespace.get(&root.metadata.namespace.as_ref());
        let siblings = siblings.map_or(&[][..], Vec::as_slice);
        let divided = shard::divide(root, labelling, &plan.snapshot.namespaces, siblings);
        // Problems of a root are in its status.
        let Ok(Some(wanted)) = divided else { continue };
        if is_leaving(root) || !plan.compiled.operators.contains_key(&full_name(&root.metadata)) {
            continue;
        }
        let existing = |name: &str| siblings.iter().copied().find(|one| one.metadata.name.as_deref() == Some(name));
        let changes = shard::changes(root, &wanted, siblings);
        writes.extend(changes.apply.into_iter().map(|mut config| {
            let existing = existing(name(&config.metadata));
            let added = existing.map_or_else(Vec::new, |existing| added(existing, &config));
            // Existing objects are changed only in the version that was observed. A new one has the root's
            // UID, and is deleted with it.
            let observed = existing.map(|existing| &existing.metadata);
            config.metadata.uid = observed.and_then(|observed| observed.uid.clone());
            config.metadata.resource_version = observed.and_then(|observed| observed.resource_version.clone());
            Write::Apply { config: Box::new(config), added }
        }));
        let remove = changes.remove.iter().filter_map(|name| existing(name));
        let remove = remove.filter(|config| !is_leaving(config));
        writes.extend(remove.map(|config| Write::Remove { config: Box::new(config.clone()) }));
        if !changes.conflicts.is_empty() {
            let messages = changes.conflicts.iter().map(ToString::to_string).collect();
            conflicts.insert(full_name(&root.metadata), messages);
        }
    }
    writes
}

fn added(existing: &ShardingConfig, wanted: &ShardingConfig) -> Vec<&'static str> {
    let fields = [
        ("controller", existing.spec.controller.is_some() && wanted.spec.controller.is_none()),
        ("webhook", existing.spec.webhook.is_some() && wanted.spec.webhook.is_none()),
        ("clusters", !existing.spec.clusters.is_empty() && wanted.spec.clusters.is_empty()),
        ("clusterHashes", existing.spec.cluster_hashes.is_some() && wanted.spec.cluster_hashes.is_none()),
    ];
    fields.into_iter().filter_map(|(field, added)| added.then_some(field)).collect()
}

/// Also for roots that are switched off.
fn labels(plan: &Plan, within: &Changed) -> Vec<Write> {
    let mut roots: BTreeMap<Option<&String>, Vec<&ShardingConfig>> = BTreeMap::new();
    for root in plan.snapshot.roots_in(within) {
        roots.entry(root.metadata.namespace.as_ref()).or_default().push(root);
    }
    let made = |config: &&ShardingConfig| {
        let near = roots.get(&config.metadata.namespace.as_ref()).into_iter().flatten();
        { near }.any(|root| shard::is_of(root, config))
    };
    // Pods that a standalone config selects by other labels keep theirs.
    let made: BTreeSet<String> =
        plan.snapshot.configs_in(within).filter(made).map(|config| full_name(&config.metadata)).collect();
    let of_root = |operator: &String| {
        let record = plan.compiled.operators.get(operator);
        record.is_some_and(|record| record.ownership.is_some()) || made.contains(operator)
    };
    let label = |member: &Member| {
        let policy = plan.compiled.policies.get(&member.name)?;
        policy.operator.as_ref().filter(|operator| of_root(operator))?;
        let shard = policy.shard.clone().filter(|shard| member.labelled_shard() != Some(shard))?;
        (!member.terminating).then(|| Write::Label { pod: member.name.clone(), uid: member.uid.clone(), shard })
    };
    each(&plan.snapshot.members).filter(|member| within.has(&member.name.namespace)).filter_map(label).collect()
}

/// What got worse, what is wrong for another reason now, and what recovered. That objects are being labelled is no
/// event, and neither is what is still on its way.
fn events(before: Option<&ShardingConfigStatus>, after: &ShardingConfigStatus) -> Vec<EventNote> {
    let before = before.map_or(&[][..], |status| status.conditions.as_slice());
    let mut events: Vec<EventNote> = Vec::new();
    for condition in &after.conditions {
        let was = before.iter().find(|one| one.type_ == condition.type_);
        let bad = is_problem(condition);
        let says_other = |was: &Condition| was.reason != condition.reason || was.message != condition.message;
        let changed = was.map_or(bad, |was| is_problem(was) != bad || bad && says_other(was));
        let passes = match condition.type_.as_str() {
            "Programmed" => bad && condition.reason != "NodeCannotServe",
            "Settled" | "WebhookRouted" => bad,
            // Rollouts have events of their own.
            "Progressing" => !bad || condition.reason != "StrategyCannotHold",
            "Analysing" | "Promoted" | "RolledBack" => true,
            // Nor is a fence that is being built.
            "Fenced" => was.is_none() && condition.reason != "Unsupported",
            _ => bad && condition.reason == "Labelling",
        };
        // Two conditions may have one reason.
        let is_told = events.iter().any(|event| event.message == condition.message);
        if changed && !passes && !is_told {
            let (reason, message) = (condition.reason.clone(), condition.message.clone());
            events.push(EventNote { warning: bad, reason, message });
        }
    }
    events
}

/// Events with the roles that let the manager label what a root names, where an event says that it may not.
fn proposed_roles(root: &ShardingConfig, events: &[EventNote], coverages: &LabelCoverages) -> Vec<EventNote> {
    let is_forbidden = events.iter().any(|event| event.reason == "LabelsForbidden");
    let coverage = coverages.of(&full_name(&root.metadata)).filter(|_| is_forbidden);
    let needed = coverage.map_or(&[][..], |coverage| &coverage.needed);
    let name = format!("ctrlmesh-labels:{}", full_name(&root.metadata).replace('/', ":"));
    let role = |message| EventNote { warning: true, reason: "ApplyClusterRole".to_owned(), message };
    label_coverage::cluster_roles(&name, needed).into_iter().map(role).collect()
}

fn is_leaving(config: &ShardingConfig) -> bool {
    config.metadata.deletion_timestamp.is_some()
}

#[cfg(test)]
mod tests;
