//! Decides what each step changes, by what is there.
//!
//! Pure. A step that was cut is decided anew: what it did is there already, and is not done again.

mod adopt;
mod enrol;
mod guard;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{FINALIZER, MANAGER_STATE, label, resource_list};
use ctrlmesh_manager::rules::validate;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::{Value, json};

pub(super) use self::guard::GUARD;
use super::change::{Action, Change, Reversible};
use super::kridge;
use super::labels::Labels;
use super::object::{
    CONFIG_MAP, DEPLOYMENT, MANAGER_STATE as STATES, MUTATING, ObjectRef, Resource, SHARDING_CONFIG, VALIDATING,
    portable, rules,
};
use super::snapshot::{Snapshot, replicas};
use super::state::Step;

/// What a step does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Planned {
    pub(super) changes: Vec<Reversible>,
    /// What a full undo does at its very end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) undone_last: Vec<Change>,
    /// Why the step cannot be taken, and what to do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) problems: Vec<String>,
    /// What one should know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<String>,
}

pub(super) fn plan(step: Step, snapshot: &Snapshot) -> Planned {
    match step {
        Step::Guard => first(snapshot),
        Step::Webhooks => webhooks(snapshot),
        Step::Stop => stop(snapshot),
        Step::Convert => convert(snapshot),
        Step::Finalizers => finalizers(snapshot),
        Step::Adopt => adopt::plan(snapshot),
        Step::Labels => labels(snapshot),
        Step::Managers => managers(snapshot),
        Step::Enrol => enrol::plan(snapshot),
        Step::Finish => finish(snapshot),
    }
}

/// What would hold up a later step is said before anything is changed.
fn first(snapshot: &Snapshot) -> Planned {
    let later = [stop(snapshot), convert(snapshot), adopt::plan(snapshot), labels(snapshot)];
    let problems = later.into_iter().flat_map(|step| step.problems).chain(two_managers(snapshot));
    Planned { problems: problems.collect(), ..guard::create() }
}

/// Somebody started the predecessor's manager again.
pub(super) fn is_back(snapshot: &Snapshot) -> Option<String> {
    let manager = snapshot.manager.as_ref().filter(|manager| replicas(manager) > 0)?;
    let (namespace, name) = (manager.namespace().unwrap_or_default(), manager.name_any());
    Some(format!("Deployment {namespace}/{name} has replicas again: stop what scales it, and undo down to step stop"))
}

/// Ours and the predecessor's would write at once.
fn two_managers(snapshot: &Snapshot) -> Option<String> {
    let [ours, theirs] = [snapshot.our_manager.as_ref()?, snapshot.manager.as_ref()?];
    (replicas(ours) > 0 && replicas(theirs) > 0).then(|| {
        format!(
            "our managers run beside the predecessor's: scale Deployment {}/{} to 0 until step labels is done",
            snapshot.system,
            ours.name_any()
        )
    })
}

/// The kind of an object, among some.
fn kind_of(object: &DynamicObject, kinds: &[Resource]) -> Option<Resource> {
    kinds.iter().copied().find(|kind| kind.is(object))
}

fn webhooks(snapshot: &Snapshot) -> Planned {
    let theirs = snapshot.webhooks.iter().filter(|one| snapshot.is_predecessors(one));
    let delete = |one: &DynamicObject| {
        let kind = kind_of(one, &[MUTATING, VALIDATING])?;
        Some(Reversible::delete(kind.of_object(one), portable(one)))
    };
    Planned { changes: theirs.filter_map(delete).collect(), ..Planned::default() }
}

fn stop(snapshot: &Snapshot) -> Planned {
    let Some(name) = &snapshot.predecessor.deployment else { return Planned::default() };
    let namespace = &snapshot.predecessor.namespace;
    let Some(manager) = &snapshot.manager else {
        let problem = format!(
            "there is no Deployment {namespace}/{name}: name the predecessor's manager with --predecessor NAMESPACE/DEPLOYMENT, or say --predecessor none where it is gone"
        );
        return Planned { problems: vec![problem], ..Planned::default() };
    };
    let replicas = replicas(manager);
    let scale = |replicas: i64| json!({"spec": {"replicas": replicas}});
    let merge = Reversible::merge(DEPLOYMENT.of_object(manager), scale(0), scale(replicas));
    Planned { changes: (replicas != 0).then_some(merge).into_iter().collect(), ..Planned::default() }
}

/// Objects that a root of Kridge's made are not copied: the root makes its own.
fn convert(snapshot: &Snapshot) -> Planned {
    let ours = rules(ctrlmesh_common::names::GROUP);
    let mut planned = Planned::default();
    for object in &snapshot.kridge {
        let Some(kind) =
            ours.into_iter().find(|kind| object.types.as_ref().is_some_and(|types| types.kind == kind.kind))
        else {
            continue;
        };
        let target = kind.named(object.metadata.namespace.as_deref(), &object.name_any());
        let is_there = snapshot.rules.iter().any(|one| kind.is(one) && kind.of_object(one) == target);
        let is_child = snapshot.kridge.iter().any(|root| adopt::is_child_of(root, object));
        match kridge::convert(object) {
            Some(content) if !is_there && !is_child => {
                planned.problems.extend(refused(&target, &content));
                planned.changes.push(Reversible::create(target, content));
            }
            _ => {}
        }
    }
    planned
}

/// Why our managers would refuse a copy.
fn refused(target: &ObjectRef, content: &Value) -> Vec<String> {
    if target.kind != SHARDING_CONFIG.kind {
        return Vec::new();
    }
    let errors: Vec<String> = match serde_json::from_value::<ShardingConfig>(content.clone()) {
        Ok(config) => {
            let problems = validate::sharding_config(&config, &[], None).errors;
            problems.iter().map(ToString::to_string).collect()
        }
        Err(error) => vec![error.to_string()],
    };
    errors
        .into_iter()
        .map(|error| format!("the copy of Kridge's {target} would be refused, change it first: {error}"))
        .collect()
}

fn finalizers(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    for object in &snapshot.rules {
        let Some(kind) = kind_of(object, &rules(ctrlmesh_common::names::GROUP)) else { continue };
        if !object.finalizers().iter().any(|one| one == FINALIZER) {
            continue;
        }
        let target = kind.of_object(object);
        if object.metadata.deletion_timestamp.is_some() {
            planned.notes.push(format!("{target} is being deleted, and goes with its finalizer: it cannot come back"));
        }
        planned.changes.push(Reversible::remove_finalizer(target, FINALIZER));
    }
    planned
}

fn labels(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    if let Some(kinds) = snapshot.kinds.as_ref().filter(|_| !snapshot.has_own_kinds) {
        let target = CONFIG_MAP.named(Some(&snapshot.system), resource_list::NAME);
        let content = json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": resource_list::NAME, "namespace": snapshot.system}, "data": kinds.data.get("data")});
        planned.changes.push(Reversible::create(target, content));
    }
    let found = Labels::of(&snapshot.namespaces);
    if !found.different.is_empty() {
        let (count, key) = (found.different.len(), &found.labelling.hash_key);
        planned.notes.push(format!(
            "{count} of {} namespaces have another value in {key} than the predecessor's hash says, such as {}; our managers repair them",
            found.labelled, found.different[0]
        ));
    }
    let wanted = json!({"shardingHash": found.labelling.hash_key, "namespace": found.labelling.namespace_key,
        "control": found.labelling.control_key, "hash": found.labelling.hash.to_string()});
    let in_force = snapshot.manager_state.as_ref().and_then(|state| state.data.pointer("/status/labels/inForce"));
    match in_force {
        Some(in_force) if *in_force == wanted => {}
        Some(in_force) if in_force.get("shardingHash") == wanted.get("shardingHash") => planned.problems.push(format!(
            "our managers run already and write another hash into {}, by which the predecessor's pods still go: start them with {}",
            found.labelling.hash_key,
            found.flags().join(" ")
        )),
        Some(in_force) => planned.notes.push(format!(
            "our managers run already, and have labels of their own in force, {in_force}; those of the predecessor stay on the objects"
        )),
        None => take_over(snapshot, &wanted, &mut planned),
    }
    planned
}

/// Writes down which labels are in force, before our managers start.
fn take_over(snapshot: &Snapshot, wanted: &Value, planned: &mut Planned) {
    let state = STATES.named(None, MANAGER_STATE);
    if snapshot.manager_state.is_none() {
        let content =
            json!({"apiVersion": STATES.api_version(), "kind": STATES.kind, "metadata": {"name": MANAGER_STATE}});
        planned.changes.push(Reversible::create(state.clone(), content));
    }
    let status = |labels: Value| Action::MergeStatus(json!({"status": {"labels": labels}}));
    planned.changes.push(Reversible {
        change: Change::new(state.clone(), status(json!({ "inForce": wanted }))),
        inverse: Some(Change::new(state, status(Value::Null))),
    });
}

fn managers(snapshot: &Snapshot) -> Planned {
    let mut planned = guard::delete(snapshot);
    let in_force = snapshot.manager_state.as_ref().and_then(|state| state.data.pointer("/status/labels/inForce"));
    let found = Labels::of(&snapshot.namespaces);
    let is_taken_over =
        in_force.is_none_or(|labels| labels.get("shardingHash") == Some(&json!(found.labelling.hash_key)));
    let Some(manager) = &snapshot.our_manager else {
        let flags = found.flags().join(" ");
        planned.notes.push(format!("apply deploy/ with these arguments for the managers: {flags}"));
        return planned;
    };
    let missing: Vec<String> = found.flags().into_iter().filter(|flag| !has_flag(manager, flag)).collect();
    if is_taken_over && !missing.is_empty() {
        planned.problems.push(format!(
            "Deployment {}/{} lacks the arguments {}: without them the managers would take labels from the objects by which the predecessor's pods still go",
            snapshot.system,
            manager.name_any(),
            missing.join(" ")
        ));
    }
    planned
}

/// Whether a container has the flag, as `--FLAG=VALUE`, in two arguments, or in its variable.
fn has_flag(deployment: &DynamicObject, flag: &str) -> bool {
    let containers = deployment.data.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let Some((name, value)) = flag.split_once('=') else { return false };
    let variable = format!("CTRLMESH_MANAGER_{}", name.trim_start_matches('-').replace('-', "_").to_uppercase());
    containers.into_iter().flatten().any(|container| {
        let arguments: Vec<&str> = ["command", "args"]
            .into_iter()
            .flat_map(|field| container.get(field).and_then(Value::as_array).into_iter().flatten())
            .filter_map(Value::as_str)
            .collect();
        let variables = container.get("env").and_then(Value::as_array).into_iter().flatten();
        arguments.contains(&flag)
            || arguments.windows(2).any(|two| two == [name, value])
            || variables.into_iter().any(|one| one["name"] == json!(variable) && one["value"] == json!(value))
    })
}

fn finish(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    let mut left: BTreeMap<String, usize> = BTreeMap::new();
    for pod in snapshot.predecessors_pods() {
        *left.entry(pod.namespace().unwrap_or_default()).or_default() += 1;
    }
    for (namespace, count) in left {
        planned.problems.push(format!(
            "{count} pods in namespace {namespace} have label {} and are the predecessor's still: restart their workloads first",
            label::ENABLE_PROXY
        ));
    }
    for object in &snapshot.kridge {
        let Some(kind) = kind_of(object, &rules(ctrlmesh_common::names::KRIDGE_GROUP)) else { continue };
        let target = kind.of_object(object);
        let served = object.finalizers().iter();
        let finalizers = served.map(|one| Change::new(target.clone(), Action::RemoveFinalizer(one.clone())));
        let changes = finalizers.chain([Change::new(target.clone(), Action::Delete)]);
        planned.changes.extend(changes.map(|change| Reversible { change, inverse: None }));
    }
    let maps = snapshot.fake_kubeconfigs.iter().map(|map| CONFIG_MAP.of_object(map));
    let manager = snapshot.manager.iter().map(|manager| DEPLOYMENT.of_object(manager));
    planned.changes.extend(maps.chain(manager).map(|object| Reversible::delete(object, None)));
    planned
}
