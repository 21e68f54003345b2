//! Answers admission reviews: validates our resources, injects pods and labels objects.
//!
//! Each function takes the review and what is known of the cluster, and returns the answer. It neither writes nor
//! waits. Only admitted pods are remembered for a moment.

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

use crate::admission::inject::{self, SidecarSettings};
use crate::cluster::cache::Snapshot;
use crate::labels::{self, KindList, NamedResources, Scope};
use crate::rules::label_coverage::VERBS;
use crate::rules::label_scheme::Scheme;
use crate::rules::object_name;
use crate::rules::pod::Member;
use crate::rules::shard::{self, Labelling};
use crate::rules::shared::each;
use crate::rules::validate::{self, Report};

mod patch;
mod recent_pods;
mod pod_shard;

pub use pod_shard::{assign_shard, shared_pod};
pub use recent_pods::RecentPods;

pub type Review = AdmissionRequest<DynamicObject>;

/// Clients show every warning.
const MAX_WARNINGS: usize = 10;

/// Subresource of pods by which containers are added to one that runs.
const EPHEMERAL: &str = "ephemeralcontainers";

/// Marks pods that a kubelet runs from a file.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Validates one of our four kinds, or the ephemeral containers of an enrolled pod.
///
/// Without `snapshot` nothing is known of the cluster yet: the object is checked by itself, with the `configured`
/// labels.
pub fn validate(review: &Review, snapshot: Option<&Snapshot>, by_flags: &Labelling) -> AdmissionResponse {
    let labelling = snapshot.map_or(by_flags, |snapshot| &snapshot.scheme.in_force);
    let response = AdmissionResponse::from(review);
    let (Operation::Create | Operation::Update, Some(object)) = (&review.operation, &review.object) else {
        return response;
    };
    let skipped = object.metadata.labels.as_ref().and_then(|labels| labels.get(key::IGNORE_VALIDATE));
    if skipped.is_some_and(|value| value == "true") || object.metadata.deletion_timestamp.is_some() {
        return response;
    }
    if review.sub_resource.as_deref() == Some(EPHEMERAL) {
        return match read::<Pod>(object).map(|pod| inject::check_ephemeral(&pod)) {
            Ok(Ok(())) => response,
            Ok(Err(refusal)) => response.deny(refusal.to_string()),
            Err(error) => response.deny(format!("cannot be read: {error}")),
        };
    }
    match report(review, object, snapshot, labelling) {
        Ok(report) => answer(response, &report),
        Err(error) => response.deny(format!("cannot be read: {error}")),
    }
}

/// Injects a new pod with what its shard needs.
///
/// Without a snapshot nothing is known of the cluster yet, so the pod's shard is unknown, and it is denied.
pub fn inject(
    review: &Review,
    snapshot: Option<&Snapshot>,
    settings: &SidecarSettings,
    given: Option<String>,
    recent: &mut RecentPods,
    now: Instant,
) -> AdmissionResponse {
    let response = AdmissionResponse::from(review);
    let Some(object) = enrolled(review) else {
        return response;
    };
    let pod: Pod = match read(object) {
        Ok(pod) => pod,
        Err(error) => return response.deny(format!("cannot be read: {error}")),
    };
    let Some(snapshot) = snapshot else {
        return response.deny("the manager has not read the ShardingConfigs yet; try again");
    };
    let member = pod_shard::member(review, &pod);
    let shards = match given {
        Some(shard) => Ok(vec![shard]),
        None => pod_shard::shards(&member, snapshot, &recent.unseen(&snapshot.members, now)),
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
    let mut injected = match inject::inject(&pod, shard, settings, runtime_handler(&pod, snapshot)) {
        Ok(injected) => injected,
        Err(refusal) => return response.deny(refusal.to_string()),
    };
    if shard.is_some_and(|shard| pod_shard::has_rollout(&member, shard, snapshot)) {
        inject::add_readiness_gate(&mut injected);
    }
    let response = patched(response, object, &injected);
    let Some(shard) = shard else {
        // Its ShardingConfig may come later. Until then the pod sees nothing.
        let namespace = review.namespace.as_deref().unwrap_or_default();
        let warning =
            format!("no ShardingConfig of namespace {namespace:?} is for this pod: it sees nothing until one is");
        return warned(response, vec![warning]);
    };
    // A reinvocation, after another webhook changed the pod: it has its shard already.
    if !review.dry_run && member.labelled_shard().is_none() {
        recent.admitted(&member, shard, &snapshot.members, now);
    }
    response
}

fn runtime_handler<'a>(pod: &Pod, snapshot: &'a Snapshot) -> Option<&'a str> {
    let class = pod.spec.as_ref()?.runtime_class_name.as_ref()?;
    snapshot.runtime_handlers.get(class).map(String::as_str)
}

/// The new pod, where it asks for the proxy.
fn enrolled(review: &Review) -> Option<&DynamicObject> {
    let (Operation::Create, Some(object)) = (&review.operation, &review.object) else {
        return None;
    };
    let labels = object.metadata.labels.as_ref();
    let is_true = |key: &str| labels.and_then(|all| all.get(key)).is_some_and(|value| value == "true");
    let annotations = object.metadata.annotations.as_ref();
    // The API server only mirrors these, and cannot change them.
    let is_mirror = annotations.is_some_and(|all| all.contains_key(MIRROR));
    let asks = is_true(key::ENABLE_PROXY) && !is_true(key::IGNORE_VALIDATE) && !is_mirror;
    asks.then_some(object)
}

/// Adds missing labels to a written object, for API servers that cannot label by themselves.
///
/// Outdated labels stay: the watches remove them.
pub fn label(review: &Review, scheme: &Scheme) -> AdmissionResponse {
    let response = AdmissionResponse::from(review);
    let (Operation::Create | Operation::Update, Some(object)) = (&review.operation, &review.object) else {
        return response;
    };
    let is_namespace = review.kind.group.is_empty() && review.kind.kind == "Namespace";
    let (scope, namespace) = match review.namespace.as_deref() {
        _ if is_namespace => (Scope::Namespace, None),
        Some(namespace) if !namespace.is_empty() => (Scope::Namespaced, Some(namespace.to_owned())),
        _ => (Scope::Cluster, None),
    };
    // The namespace may stand in the URL only. A generated name is not known yet.
    let meta = ObjectMeta { namespace, ..object.metadata.clone() };
    let change = labels::change(&meta, scope, scheme).unwrap_or_default();
    let labels: Labels = change.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
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
        // The watches will label the object.
        Ok(Err(_)) | Err(_) => failed,
    }
}

fn report(
    review: &Review,
    object: &DynamicObject,
    snapshot: Option<&Snapshot>,
    labelling: &Labelling,
) -> Result<Report, serde_json::Error> {
    Ok(match review.kind.kind.as_str() {
        "ShardingConfig" => {
            let config: ShardingConfig = read(object)?;
            let old = review.old_object.as_ref().map(read::<ShardingConfig>).transpose()?;
            of_config(&config, old.as_ref(), snapshot, labelling)
        }
        "CircuitBreaker" => {
            let old = review.old_object.as_ref().map(read::<CircuitBreaker>).transpose()?;
            of_breaker(&read::<CircuitBreaker>(object)?, old.as_ref(), snapshot)
        }
        "FaultInjection" => validate::fault_injection(&read::<FaultInjection>(object)?),
        "ManagerState" => validate::manager_state(&read::<ManagerState>(object)?),
        _ => Report::default(),
    })
}

/// Checks a CircuitBreaker by itself, and whether what it counts is labelled. Limits that stand already are warned of
/// only, so that one that cannot be counted any more can be reset and switched off.
fn of_breaker(breaker: &CircuitBreaker, old: Option<&CircuitBreaker>, snapshot: Option<&Snapshot>) -> Report {
    let mut report = validate::circuit_breaker(breaker);
    if let Some(labels) = snapshot.and_then(|snapshot| labelled_by(snapshot, None)) {
        let uncounted = validate::counted(breaker, &labels).errors;
        let stands = old.is_some_and(|old| old.spec.rate_limitings == breaker.spec.rate_limitings);
        if stands { report.warnings.extend(uncounted) } else { report.errors.extend(uncounted) }
    }
    report
}

/// Checks a ShardingConfig by itself, against others and pods of its namespace, and against its old version. Also
/// checks whether the existing namespaces can be divided among its shards.
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

/// Checks a ShardingConfig by itself, and against other ShardingConfigs, pods, served and labelled resources.
fn beside(config: &ShardingConfig, snapshot: &Snapshot) -> Report {
    let namespace = object_name::namespace(&config.metadata);
    let near = each(&snapshot.configs).filter(|other| {
        other.metadata.namespace.as_deref() == Some(namespace) && other.metadata.deletion_timestamp.is_none()
    });
    let near: Vec<ShardingConfig> = near.cloned().collect();
    let pods = each(&snapshot.members).filter(|pod| pod.name.namespace == namespace);
    let pods: Vec<&Member> = pods.collect();
    let mut report = validate::sharding_config(config, &near, Some(&pods));
    if report.errors.is_empty() {
        // Includes labels of a running migration.
        let keys: Vec<&str> = snapshot.scheme.carried().map(|one| &*one.hash_key).collect();
        report.warnings.extend(validate::unowned(config, &near, &keys).warnings);
    }
    let served = |group: &str, resource: &str| snapshot.served.has(group, resource);
    report.warnings.extend(validate::served(config, &served).warnings);
    report.warnings.extend(unlabelled(config, snapshot).warnings);
    report
}

/// Warns of limits by labels that nobody sets.
fn unlabelled(config: &ShardingConfig, snapshot: &Snapshot) -> Report {
    let Some(labels) = labelled_by(snapshot, Some(config)) else { return Report::default() };
    // Includes labels of a running migration.
    let carried = snapshot.scheme.carried();
    let keys: Vec<&str> = carried.flat_map(|one| [&*one.hash_key, &*one.namespace_key]).collect();
    validate::labelled(config, &keys, &labels)
}

/// Whether the objects of a group and plural are labelled: a root, or `config`, names them, or the list of kinds has
/// them. What is not served is not known, and counts as labelled. `None` where the list is unknown or unreadable, which
/// is reported elsewhere.
fn labelled_by(snapshot: &Snapshot, config: Option<&ShardingConfig>) -> Option<impl Fn(&str, &str) -> bool> {
    let listed = snapshot.listed.as_deref().map(KindList::read)?.ok()?;
    let roots = each(&snapshot.configs).chain(config).filter_map(|config| config.spec.root.as_ref());
    let named: Vec<NamedResources> = roots.map(labels::named_resources).collect();
    Some(move |group: &str, resource: &str| {
        let Some(kind) = snapshot.served.kind(group, resource) else { return true };
        let is_named = named.iter().any(|named| labels::is_named(named, group, resource));
        let is_namespace = (group, resource) == ("", labels::NAMESPACES);
        is_namespace || listed.has(group, kind) || is_named && snapshot.served.supports(group, resource, &VERBS)
    })
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

/// The patch leaves fields alone that our types do not know.
fn patched(response: AdmissionResponse, review: &DynamicObject, pod: &Pod) -> AdmissionResponse {
    let known = read::<Pod>(review).and_then(serde_json::to_value);
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
