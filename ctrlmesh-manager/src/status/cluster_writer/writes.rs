//! What has to be written so that the cluster says what the plan says?

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::cluster::plan::Plan;
use crate::rules::pod::{Member, PodName};
use crate::rules::shard;
use crate::status::compute::{self, Contact, PlanIndex, StatusInputs, Unlabelled};

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// A shard of a root is missing or says something else.
    Apply {
        /// As it should be, with the UID and the version of what is there.
        config: Box<ShardingConfig>,
        /// Fields of its spec that somebody added, which applying would leave there.
        added: Vec<&'static str>,
    },
    /// A shard that its root no longer has.
    Remove {
        /// As it is.
        config: Box<ShardingConfig>,
    },
    /// A pod whose label names another shard than its own.
    Label {
        /// The pod.
        pod: PodName,
        /// Its UID.
        uid: String,
        /// Its shard.
        shard: String,
    },
    /// A status that says something else.
    Status {
        /// With the status as it should be.
        config: Box<ShardingConfig>,
        /// Whether it has another epoch: proxies are told what it says once it stands there, and not before.
        decides: bool,
        /// What people should hear of.
        events: Vec<EventNote>,
    },
}

/// What is told as an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventNote {
    /// Whether it is bad.
    pub warning: bool,
    /// Why, in one word.
    pub reason: String,
    /// What.
    pub message: String,
}

/// What is known beside the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observations {
    /// What the proxies have said.
    pub contacts: Arc<BTreeMap<PodName, Contact>>,
    /// What is to be labelled yet, where that is known to be anything.
    pub unlabelled: Option<Unlabelled>,
    /// Whether it has only just begun to be heard what the proxies say.
    pub begins: bool,
}

/// What has to be written: shards first, status last. None of it has to wait for another: what is decided by what another
/// has changed meanwhile is refused by the API server, and decided anew.
pub fn writes(plan: &Plan, observed: &Observations, now: Timestamp) -> Vec<Write> {
    let mut conflicts = BTreeMap::new();
    let mut writes = shards(plan, &mut conflicts);
    writes.extend(labels(plan));
    let unlabelled = observed.unlabelled.as_ref();
    let (contacts, begins) = (&observed.contacts, observed.begins);
    let inputs = StatusInputs { contacts, conflicts: &conflicts, unlabelled, begins, now };
    let found = PlanIndex::of(plan);
    for config in plan.snapshot.configs.iter().filter(|config| !is_leaving(config)) {
        let status = compute::of(config, plan, &found, inputs);
        if config.status.as_ref() != Some(&status) {
            let events = events(config.status.as_ref(), &status);
            let before = config.status.as_ref().and_then(|before| before.epoch);
            let decides = status.epoch != before;
            let config = Box::new(ShardingConfig { status: Some(status), ..config.clone() });
            writes.push(Write::Status { config, decides, events });
        }
    }
    writes
}

/// The shards of all roots; `conflicts` gets what stands in their way.
fn shards(plan: &Plan, conflicts: &mut BTreeMap<String, Vec<String>>) -> Vec<Write> {
    let labelling = &plan.snapshot.scheme.in_force;
    let mut by_namespace: BTreeMap<Option<&String>, Vec<&ShardingConfig>> = BTreeMap::new();
    for config in &plan.snapshot.configs {
        by_namespace.entry(config.metadata.namespace.as_ref()).or_default().push(config);
    }
    let mut writes = Vec::new();
    for root in plan.snapshot.configs.iter().filter(|config| config.spec.root.is_some()) {
        let divided = shard::divide(root, labelling, &plan.snapshot.namespaces);
        // What is wrong with it, or stands in its way, is said in its status.
        let Ok(Some(wanted)) = divided else { continue };
        if is_leaving(root) || !plan.compiled.operators.contains_key(&full_name(root)) {
            continue;
        }
        let near = by_namespace.get(&root.metadata.namespace.as_ref());
        let near = near.map_or(&[][..], Vec::as_slice);
        let there = |name: &str| {
            near.iter().copied().find(|one| one.metadata.name.as_deref() == Some(name))
        };
        let changes = shard::changes(root, &wanted, near);
        writes.extend(changes.apply.into_iter().map(|mut config| {
            let there = there(config.metadata.name.as_deref().unwrap_or_default());
            let added = there.map_or_else(Vec::new, |there| added(there, &config));
            // What is there is changed only as it was observed; what is not has the root's UID, and goes with that root.
            let observed = there.map(|there| &there.metadata);
            config.metadata.uid = observed.and_then(|observed| observed.uid.clone());
            config.metadata.resource_version =
                observed.and_then(|observed| observed.resource_version.clone());
            Write::Apply { config: Box::new(config), added }
        }));
        let remove = changes.remove.iter().filter_map(|name| there(name));
        let remove = remove.filter(|config| !is_leaving(config));
        writes.extend(remove.map(|config| Write::Remove { config: Box::new(config.clone()) }));
        if !changes.conflicts.is_empty() {
            let said = changes.conflicts.iter().map(ToString::to_string).collect();
            conflicts.insert(full_name(root), said);
        }
    }
    writes
}

/// The fields of the spec of `there` that `wanted` does not have.
fn added(there: &ShardingConfig, wanted: &ShardingConfig) -> Vec<&'static str> {
    let fields = [
        ("controller", there.spec.controller.is_some() && wanted.spec.controller.is_none()),
        ("webhook", there.spec.webhook.is_some() && wanted.spec.webhook.is_none()),
    ];
    fields.into_iter().filter_map(|(field, added)| added.then_some(field)).collect()
}

/// The pods of roots whose label does not name their shard, also of those that are switched off.
fn labels(plan: &Plan) -> Vec<Write> {
    let roots: Vec<&ShardingConfig> =
        plan.snapshot.configs.iter().filter(|config| config.spec.root.is_some()).collect();
    let made = |config: &&ShardingConfig| {
        let near = |root: &&ShardingConfig| root.metadata.namespace == config.metadata.namespace;
        roots.iter().any(|root| near(root) && shard::is_of(root, config))
    };
    // By itself it may have pods of other people's choosing, whose labels are theirs.
    let made: BTreeSet<String> = plan.snapshot.configs.iter().filter(made).map(full_name).collect();
    let of_root = |operator: &String| {
        let record = plan.compiled.operators.get(operator);
        record.is_some_and(|record| record.ownership.is_some()) || made.contains(operator)
    };
    let label = |member: &Member| {
        let told = plan.compiled.policies.get(&member.name)?;
        told.operator.as_ref().filter(|operator| of_root(operator))?;
        let shard = told.shard.clone().filter(|shard| member.recorded() != Some(shard))?;
        (!member.leaving).then(|| Write::Label {
            pod: member.name.clone(),
            uid: member.uid.clone(),
            shard,
        })
    };
    plan.snapshot.members.iter().filter_map(label).collect()
}

/// What has become worse or, of what was wrong, better.
fn events(before: Option<&ShardingConfigStatus>, after: &ShardingConfigStatus) -> Vec<EventNote> {
    let before = before.map_or(&[][..], |status| status.conditions.as_slice());
    let events = after.conditions.iter().filter_map(|condition| {
        let was = before.iter().find(|one| one.type_ == condition.type_);
        let bad = is_bad(condition);
        let changed =
            was.map_or(bad, |was| is_bad(was) != bad || bad && was.reason != condition.reason);
        // That proxies have not acknowledged yet is no events; that they have is.
        let told = changed && (condition.type_ != "Programmed" || condition.status == "True");
        told.then(|| EventNote {
            warning: bad,
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        })
    });
    events.collect()
}

fn is_bad(condition: &Condition) -> bool {
    (condition.status == "True") == (condition.type_ == "Degraded")
}

fn is_leaving(config: &ShardingConfig) -> bool {
    config.metadata.deletion_timestamp.is_some()
}

fn full_name(config: &ShardingConfig) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&config.metadata.namespace), part(&config.metadata.name))
}

#[cfg(test)]
mod tests;
