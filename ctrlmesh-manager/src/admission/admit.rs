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

use crate::admission::inject::{self, Settings};
use crate::cluster::cache::Snapshot;
use crate::labels::{self, Listed, Scope};
use crate::rules::label_scheme::Scheme;
use crate::rules::pod::Member;
use crate::rules::shard::{self, Labelling};
use crate::rules::validate::{self, Report};

mod patch;
mod recent;
mod seat;

pub use recent::Recent;
pub use seat::{seat, shared};

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
/// it is not admitted. `recent` are those that were admitted and that it does not have yet; the pod is added. `given` is the
/// shard that another replica has given it, which knows of more pods.
pub fn inject(
    asked: &Asked,
    snapshot: Option<&Snapshot>,
    settings: &Settings,
    given: Option<String>,
    (recent, now): (&mut Recent, Instant),
) -> AdmissionResponse {
    let response = AdmissionResponse::from(asked);
    let Some(object) = enrolled(asked) else {
        return response;
    };
    let pod: Pod = match read(object) {
        Ok(pod) => pod,
        Err(error) => return response.deny(format!("cannot be read: {error}")),
    };
    let Some(snapshot) = snapshot else {
        return response.deny("the manager has not read the ShardingConfigs yet; try again");
    };
    let member = seat::member(asked, &pod);
    let shards = match given {
        Some(shard) => Ok(vec![shard]),
        None => seat::shards(&member, snapshot, &recent.unseen(&snapshot.members, now)),
    };
    let shard = match shards.as_deref() {
        Ok([]) => None,
        Ok([shard]) => Some(shard.as_str()),
        Ok([one, other, ..]) => {
            return response.deny(format!(
                "the pod is of ShardingConfig {one:?} and of {other:?}; a pod can be in one shard only"
            ));
        }
        Err(why) => return response.deny(why),
    };
    let injected = match inject::inject(&pod, shard, settings) {
        Ok(injected) => injected,
        Err(refusal) => return response.deny(refusal.to_string()),
    };
    let response = patched(response, object, &injected);
    let Some(shard) = shard else {
        // Its ShardingConfig may come later; until then it sees nothing.
        let namespace = asked.namespace.as_deref().unwrap_or_default();
        let warning = format!(
            "no ShardingConfig of namespace {namespace:?} is for this pod: it sees nothing until one is"
        );
        return warned(response, vec![warning]);
    };
    // Asked again, because another webhook has changed it, it has its shard already.
    if !asked.dry_run && member.recorded().is_none() {
        recent.admitted(&member, shard, &snapshot.members, now);
    }
    response
}

/// The pod that is created, where it asks to be served.
fn enrolled(asked: &Asked) -> Option<&DynamicObject> {
    let (Operation::Create, Some(object)) = (&asked.operation, &asked.object) else {
        return None;
    };
    let labels = object.metadata.labels.as_ref();
    let is_true =
        |key: &str| labels.and_then(|all| all.get(key)).is_some_and(|value| value == "true");
    let annotations = object.metadata.annotations.as_ref();
    // The kubelet's own pods are shown, not made, by the API server: it can change nothing about them.
    let is_mirror = annotations.is_some_and(|all| all.contains_key(MIRROR));
    let asks = is_true(key::ENABLE_PROXY) && !is_true(key::IGNORE_VALIDATE) && !is_mirror;
    asks.then_some(object)
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
    let change = labels::change(&meta, scope, scheme).unwrap_or_default();
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
