//! What is answered when the API server asks whether an object may be?
//!
//! Each handler takes the question and what is known of the cluster, and gives the answer; nothing is written, nothing
//! waited for. Only who was admitted is remembered for a moment.

use std::collections::BTreeSet;
use std::time::Instant;

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ManagerState, ShardingConfig};
use ctrlmesh_common::names::label as key;
use ctrlmesh_common::selector::Labels;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, Operation};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cache::Snapshot;
use crate::compile::{self, World};
use crate::inject::{self, Settings};
use crate::label::{self, Listed, Scope};
use crate::pod::{Admitted, Member};
use crate::scheme::Scheme;
use crate::shard::{self, Labelling};
use crate::validate::{self, Report};

mod patch;
mod recent;

pub use recent::Recent;

/// A question of the API server.
pub type Asked = AdmissionRequest<DynamicObject>;

/// Most warnings that are given to one question: clients show every one.
const MAX_WARNINGS: usize = 10;

/// The annotation of pods that a kubelet runs from a file.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Whether one of our four kinds may be as it is asked.
///
/// `snapshot` is none where nothing is known of the cluster yet: then the object is judged by itself, as if objects were
/// labelled as was `told`.
pub fn validate(asked: &Asked, snapshot: Option<&Snapshot>, told: &Labelling) -> AdmissionResponse {
    let labelling = snapshot.map_or(told, |snapshot| &snapshot.scheme.in_force);
    let response = AdmissionResponse::from(asked);
    let (Operation::Create | Operation::Update, Some(object)) = (&asked.operation, &asked.object)
    else {
        return response;
    };
    let skipped =
        object.metadata.labels.as_ref().and_then(|labels| labels.get(key::IGNORE_VALIDATE));
    if skipped.is_some_and(|value| value == "true") || object.metadata.deletion_timestamp.is_some()
    {
        return response;
    }
    match report(asked, object, snapshot, labelling) {
        Ok(report) => answer(response, &report),
        Err(error) => response.deny(format!("cannot be read: {error}")),
    }
}

/// A pod that is created, with what its shard needs.
///
/// `snapshot` is none where nothing is known of the cluster yet: then it cannot be said which shard the pod is of, and
/// it is not admitted. `recent` are those that were admitted and that it does not have yet; the pod is added.
pub fn inject(
    asked: &Asked,
    snapshot: Option<&Snapshot>,
    settings: &Settings,
    recent: &mut Recent,
    now: Instant,
) -> AdmissionResponse {
    let response = AdmissionResponse::from(asked);
    let (Operation::Create, Some(object)) = (&asked.operation, &asked.object) else {
        return response;
    };
    let labelled = |key: &str| object.metadata.labels.as_ref().and_then(|labels| labels.get(key));
    let is_true = |key: &str| labelled(key).is_some_and(|value| value == "true");
    let annotations = object.metadata.annotations.as_ref();
    // The kubelet's own pods are shown, not made, by the API server: it can change nothing about them.
    let is_mirror = annotations.is_some_and(|all| all.contains_key(MIRROR));
    if !is_true(key::ENABLE_PROXY) || is_true(key::IGNORE_VALIDATE) || is_mirror {
        return response;
    }
    let pod: Pod = match read(object) {
        Ok(pod) => pod,
        Err(error) => return response.deny(format!("cannot be read: {error}")),
    };
    let Some(snapshot) = snapshot else {
        return response.deny("the manager has not read the ShardingConfigs yet; try again");
    };
    let unseen = recent.unseen(&snapshot.members, now);
    let member = member(asked, &pod);
    let shards = match shards(&member, snapshot, &unseen) {
        Ok(shards) => shards,
        Err(why) => return response.deny(why),
    };
    match shards.as_slice() {
        // Its ShardingConfig may come later; until then it sees nothing.
        [] => match inject::inject(&pod, None, settings) {
            Ok(injected) => {
                let namespace = asked.namespace.as_deref().unwrap_or_default();
                let warning = format!(
                    "no ShardingConfig of namespace {namespace:?} is for this pod: it sees nothing until one is"
                );
                warned(patched(response, object, &injected), vec![warning])
            }
            Err(refusal) => response.deny(refusal.to_string()),
        },
        [shard] => match inject::inject(&pod, Some(shard), settings) {
            Ok(injected) => {
                // Asked again, because another webhook has changed it, it has its shard already.
                if !asked.dry_run && member.recorded().is_none() {
                    recent.admitted(&member, shard, &snapshot.members, now);
                }
                patched(response, object, &injected)
            }
            Err(refusal) => response.deny(refusal.to_string()),
        },
        [one, other, ..] => response.deny(format!(
            "the pod is of ShardingConfig {one:?} and of {other:?}; a pod can be in one shard only"
        )),
    }
}

/// An object that is written, with the labels that it lacks: for API servers that cannot label by themselves.
///
/// What nobody goes by any more is left there: the watches take it away.
pub fn label(asked: &Asked, scheme: &Scheme) -> AdmissionResponse {
    let response = AdmissionResponse::from(asked);
    let (Operation::Create | Operation::Update, Some(object)) = (&asked.operation, &asked.object)
    else {
        return response;
    };
    let is_namespace = asked.kind.group.is_empty() && asked.kind.kind == "Namespace";
    let (scope, namespace) = match asked.namespace.as_deref() {
        _ if is_namespace => (Scope::Namespace, None),
        Some(namespace) if !namespace.is_empty() => (Scope::Namespaced, Some(namespace.to_owned())),
        _ => (Scope::Cluster, None),
    };
    // The namespace may stand in the URL only. A name that is still to be made up is not known.
    let meta = ObjectMeta { namespace, ..object.metadata.clone() };
    let change = label::change(&meta, scope, scheme).unwrap_or_default();
    let labels: Labels =
        change.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    if labels.is_empty() {
        return response;
    }
    let there = object.metadata.labels.as_ref();
    let mut patch = Vec::new();
    if there.is_none_or(std::collections::BTreeMap::is_empty) {
        patch.push(json!({"op": "add", "path": "/metadata/labels", "value": {}}));
    }
    patch.extend(labels.iter().map(|(key, value)| {
        let key = key.replace('~', "~0").replace('/', "~1");
        json!({"op": "add", "path": format!("/metadata/labels/{key}"), "value": value})
    }));
    let failed = response.clone();
    let patched = serde_json::from_value(Value::Array(patch));
    match patched.map(|patch| response.with_patch(patch)) {
        Ok(Ok(response)) => response,
        // The watches will label it.
        Ok(Err(_)) | Err(_) => failed,
    }
}

fn report(
    asked: &Asked,
    object: &DynamicObject,
    snapshot: Option<&Snapshot>,
    labelling: &Labelling,
) -> Result<Report, serde_json::Error> {
    Ok(match asked.kind.kind.as_str() {
        "ShardingConfig" => {
            let config: ShardingConfig = read(object)?;
            let old = asked.old_object.as_ref().map(read::<ShardingConfig>).transpose()?;
            of_config(&config, old.as_ref(), snapshot, labelling)
        }
        "CircuitBreaker" => validate::circuit_breaker(&read::<CircuitBreaker>(object)?),
        "FaultInjection" => validate::fault_injection(&read::<FaultInjection>(object)?),
        "ManagerState" => validate::manager_state(&read::<ManagerState>(object)?),
        _ => Report::default(),
    })
}

/// By itself, beside the others of its namespace, against the pods there, and against what it was; and whether a root
/// can be divided among the namespaces that there are.
fn of_config(
    config: &ShardingConfig,
    old: Option<&ShardingConfig>,
    snapshot: Option<&Snapshot>,
    labelling: &Labelling,
) -> Report {
    let mut report = match snapshot {
        Some(snapshot) => beside(config, snapshot),
        None => validate::sharding_config(config, &[], None),
    };
    if report.errors.is_empty() {
        let none = BTreeSet::new();
        let namespaces = snapshot.map_or(&none, |snapshot| &snapshot.namespaces);
        report.errors.extend(shard::undividable(config, labelling, namespaces));
    }
    if let Some(old) = old {
        let change = validate::change(old, config);
        report.errors.extend(change.errors);
        report.warnings.extend(change.warnings);
    }
    report
}

/// By itself, and beside what there is: other ShardingConfigs, pods, what is served, what is labelled.
fn beside(config: &ShardingConfig, snapshot: &Snapshot) -> Report {
    let namespace = config.metadata.namespace.as_deref().unwrap_or_default();
    let near = snapshot.configs.iter().filter(|other| {
        other.metadata.namespace.as_deref() == Some(namespace)
            && other.metadata.deletion_timestamp.is_none()
    });
    let near: Vec<ShardingConfig> = near.cloned().collect();
    let pods = snapshot.members.iter().filter(|pod| pod.name.namespace == namespace);
    let pods: Vec<&Member> = pods.collect();
    let mut report = validate::sharding_config(config, &near, Some(&pods));
    if report.errors.is_empty() {
        // Also by labels that are to come, or to go.
        let keys: Vec<&str> = snapshot.scheme.carried().map(|one| &*one.hash_key).collect();
        report.warnings.extend(validate::unowned(config, &near, &keys).warnings);
    }
    let served = |group: &str, resource: &str| snapshot.served.has(group, resource);
    report.warnings.extend(validate::served(config, &served).warnings);
    report.warnings.extend(unlabelled(config, snapshot).warnings);
    report
}

/// What is limited by labels that nobody gives. What is listed that cannot be read, or is not known, is said elsewhere.
fn unlabelled(config: &ShardingConfig, snapshot: &Snapshot) -> Report {
    let Some(Ok(listed)) = snapshot.listed.as_deref().map(Listed::read) else {
        return Report::default();
    };
    let labels = |group: &str, resource: &str| {
        let kind = snapshot.served.kind(group, resource);
        kind.is_none_or(|kind| listed.has(group, kind))
    };
    // Also by labels that are to come, or to go.
    let carried = snapshot.scheme.carried();
    let keys: Vec<&str> = carried.flat_map(|one| [&*one.hash_key, &*one.namespace_key]).collect();
    validate::labelled(config, &keys, &labels)
}

/// The pod as it will be.
fn member(asked: &Asked, pod: &Pod) -> Member {
    let mut member = Member::from(pod);
    member.name.namespace = asked.namespace.clone().unwrap_or_default();
    // It is about to be given what it needs.
    member.admitted = Admitted::Injected;
    member
}

/// The names of the shards that the pod would be of, beside those that are there and those that are `unseen` yet.
///
/// # Errors
/// Where it is of none, but perhaps of a ShardingConfig that is invalid: let through, it would see everything.
fn shards(member: &Member, snapshot: &Snapshot, unseen: &[Member]) -> Result<Vec<String>, String> {
    let namespace = &member.name.namespace;
    let configs: Vec<ShardingConfig> = snapshot
        .configs
        .iter()
        .filter(|config| config.metadata.namespace.as_ref() == Some(namespace))
        .cloned()
        .collect();
    let members: Vec<Member> = snapshot
        .members
        .iter()
        .chain(unseen)
        .filter(|member| member.name.namespace == *namespace)
        .cloned()
        .collect();
    let world = World { configs: &configs, members: &members, ..snapshot.world() };
    let (operators, troubles) = compile::operators(world);
    let places = operators.iter().enumerate();
    let places = places.filter_map(|(at, operator)| {
        Some((at, operator.shard_for(member, &members)?.metadata.name.clone()?))
    });
    let mut places: Vec<(usize, String)> = places.collect();
    if places.len() > 1 {
        let yielding = compile::yielding(&operators, world);
        places.retain(|(at, _)| !yielding.contains(at));
    }
    let shards: Vec<String> = places.into_iter().map(|(_, shard)| shard).collect();
    let Some(invalid) = operators.iter().find(|operator| operator.may_have(member, None)) else {
        return Ok(shards);
    };
    if !shards.is_empty() {
        return Ok(shards);
    }
    let name = invalid.full_name();
    let of_it = troubles.iter().filter(|trouble| trouble.configs.contains(&name));
    let why: Vec<&str> = of_it.map(|trouble| trouble.message.as_str()).collect();
    let why = why.join("; ");
    Err(format!(
        "the pod may be of ShardingConfig {name:?}, which is invalid; mend it first: {why}"
    ))
}

fn answer(response: AdmissionResponse, report: &Report) -> AdmissionResponse {
    let warnings = report.warnings.iter().map(ToString::to_string).collect();
    if report.errors.is_empty() {
        return warned(response, warnings);
    }
    let errors: Vec<String> = report.errors.iter().map(ToString::to_string).collect();
    warned(response.deny(errors.join("; ")), warnings)
}

fn warned(mut response: AdmissionResponse, mut warnings: Vec<String>) -> AdmissionResponse {
    warnings.truncate(MAX_WARNINGS);
    response.warnings = (!warnings.is_empty()).then_some(warnings);
    response
}

/// Fields of the pod that our types do not know are not in the difference, and so stay as they are.
fn patched(response: AdmissionResponse, asked: &DynamicObject, pod: &Pod) -> AdmissionResponse {
    let known = read::<Pod>(asked).and_then(serde_json::to_value);
    match (known, serde_json::to_value(pod)) {
        (Ok(before), Ok(after)) => {
            let failed = response.clone();
            response
                .with_patch(patch::between(&before, &after))
                .unwrap_or_else(|error| failed.deny(format!("cannot be patched: {error}")))
        }
        (Err(error), _) | (_, Err(error)) => response.deny(format!("cannot be patched: {error}")),
    }
}

fn read<T: DeserializeOwned>(object: &DynamicObject) -> Result<T, serde_json::Error> {
    serde_json::to_value(object).and_then(serde_json::from_value::<T>)
}

#[cfg(test)]
mod tests;
