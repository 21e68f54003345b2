//! Decides what each step changes, by what is there.
//!
//! Pure. A step that was cut is decided anew: what it did is there already, and is not done again.

mod adopt;
mod enrol;
pub(super) mod guard;
mod labels;
pub(super) mod webhooks;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{FINALIZER, label};
use ctrlmesh_manager::rules::validate;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::{Value, json};

use super::change::{Action, Change, Reversible};
use super::copy;
use super::flags;
use super::kridge;
use super::labels::Labels;
use super::object::{CONFIG_MAP, DEPLOYMENT, ObjectRef, SHARDING_CONFIG, rules};
use super::snapshot::{Snapshot, in_both_groups, replicas};
use super::state::{State, Step};

/// How large the record may become by what is known before the first step. A ConfigMap ends at 1 MiB; the rest is for
/// what an undo notes.
const RECORD_BYTES: usize = 900 * 1024;

/// Objects that are named where it is too large.
const NAMED: usize = 3;

/// On objects of Kridge's group.
const KRIDGES_FINALIZER: &str = "finalizer.kridge.kusionstack.io/protected";

/// What a step does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Planned {
    pub(super) changes: Vec<Reversible>,
    /// What a full undo does at its very end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) undone_last: Vec<Change>,
    /// What step `managers` does first, in a later run, too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) resumed: Vec<Change>,
    /// Why the step cannot be taken, and what to do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) problems: Vec<String>,
    /// What one should know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<String>,
}

impl Planned {
    /// Notes what takes the step back, and what is done behind it.
    pub(super) fn note(&self, step: Step, state: &mut State) {
        state.record(step, &self.changes);
        self.undone_last.iter().for_each(|change| state.note_last(change.clone()));
        self.resumed.iter().for_each(|change| state.note_resume(change.clone()));
    }
}

pub(super) fn plan(step: Step, snapshot: &Snapshot) -> Planned {
    match step {
        Step::Guard => first(snapshot),
        Step::Webhooks => webhooks::plan(snapshot),
        Step::Stop => stop(snapshot),
        Step::Convert => convert(snapshot),
        Step::Finalizers => finalizers(snapshot),
        Step::Adopt => adopt::plan(snapshot),
        Step::Labels => labels::plan(snapshot),
        Step::Managers => managers(snapshot),
        Step::Enrol => enrol::plan(snapshot),
        Step::Finish => finish(snapshot),
    }
}

/// What would hold up a later step is said before anything is changed.
fn first(snapshot: &Snapshot) -> Planned {
    let mut planned = guard::create();
    let (mut copy, mut record) = (snapshot.clone(), State::default());
    planned.note(Step::Guard, &mut record);
    for step in Step::all().filter(|step| (Step::Webhooks..=Step::Enrol).contains(step)) {
        let later = plan(step, &copy);
        later.note(step, &mut record);
        later.changes.iter().for_each(|one| copy::apply(&mut copy, &one.change));
        // Our managers may come between these steps and the others.
        planned.problems.extend(later.problems.into_iter().filter(|_| step <= Step::Labels));
    }
    planned.problems.extend(two_managers(snapshot));
    planned.problems.extend(too_large(&record));
    planned
}

/// The record would not fit into a ConfigMap.
fn too_large(record: &State) -> Option<String> {
    let kilobytes = |bytes: usize| bytes.div_ceil(1024);
    let size = record.size();
    (size > RECORD_BYTES).then(|| {
        let largest = record.largest().into_iter().take(NAMED);
        let largest = largest.map(|(object, size)| format!("{object} ({} KiB)", kilobytes(size)));
        format!(
            "the record of the migration would have {} KiB, and at most {} KiB are possible. The largest objects in it are {}: take out what they do not need, such as the annotation kubectl.kubernetes.io/last-applied-configuration, or let roots have fewer shards",
            kilobytes(size),
            kilobytes(RECORD_BYTES),
            largest.collect::<Vec<_>>().join(", ")
        )
    })
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

/// `None` where it has no replicas.
pub(super) fn scaled_to_zero(deployment: &DynamicObject) -> Option<Reversible> {
    let scale = |replicas: i64| json!({"spec": {"replicas": replicas}});
    let replicas = replicas(deployment);
    (replicas != 0).then(|| Reversible::merge(DEPLOYMENT.of_object(deployment), scale(0), scale(replicas)))
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
    Planned { changes: scaled_to_zero(manager).into_iter().collect(), ..Planned::default() }
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
        let is_there = snapshot.rules.iter().any(|one| target.is(one));
        let is_child = snapshot.kridge.iter().any(|root| adopt::is_child_of(root, object));
        match kridge::convert(object) {
            Some(content) if !is_there && !is_child => {
                let refused = refused(&target, &content);
                if refused.is_empty() {
                    planned.changes.push(Reversible::create(target, content));
                }
                planned.problems.extend(refused);
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
        let Some(target) = ObjectRef::among(object, &rules(ctrlmesh_common::names::GROUP)) else { continue };
        if !object.finalizers().iter().any(|one| one == FINALIZER) {
            continue;
        }
        if object.metadata.deletion_timestamp.is_some() {
            planned.notes.push(format!("{target} is being deleted, and goes with its finalizer: it cannot come back"));
        }
        planned.changes.push(Reversible::remove_finalizer(target, FINALIZER));
    }
    planned
}

fn managers(snapshot: &Snapshot) -> Planned {
    let mut planned = guard::delete(snapshot);
    let in_force = snapshot.manager_state.as_ref().and_then(|state| state.data.pointer("/status/labels/inForce"));
    let found = Labels::of(&snapshot.namespaces, snapshot.manager.as_ref());
    let is_taken_over =
        in_force.is_none_or(|labels| labels.get("shardingHash") == Some(&json!(found.labelling.hash_key)));
    let Some(manager) = &snapshot.our_manager else {
        let flags = found.flags().join(" ");
        planned.notes.push(format!("apply deploy/ with these arguments for the managers: {flags}"));
        return planned;
    };
    let missing: Vec<String> = found.flags().into_iter().filter(|flag| !flags::has(manager, flag)).collect();
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
        let Some(target) = ObjectRef::among(object, &rules(ctrlmesh_common::names::KRIDGE_GROUP)) else { continue };
        // Others are served by somebody, who is waited for.
        let served = object.finalizers().iter().filter(|one| [FINALIZER, KRIDGES_FINALIZER].contains(&one.as_str()));
        let finalizers = served.map(|one| Change::new(target.clone(), Action::RemoveFinalizer(one.clone())));
        let changes = finalizers.chain([Change::new(target.clone(), Action::Delete)]);
        planned.changes.extend(changes.map(|change| Reversible { change, inverse: None }));
    }
    let (theirs, others): (Vec<_>, Vec<_>) = snapshot.fake_kubeconfigs.iter().partition(|map| is_predecessors_map(map));
    planned.notes.extend(
        others
            .into_iter()
            .map(|map| format!("{} stays: it has no label watching of the predecessor's", CONFIG_MAP.of_object(map))),
    );
    let maps = theirs.into_iter().map(|map| CONFIG_MAP.of_object(map));
    let manager = snapshot.manager.iter().map(|manager| DEPLOYMENT.of_object(manager));
    planned.changes.extend(maps.chain(manager).map(|object| Reversible::delete(object, None)));
    planned.changes.extend(guard::delete_kridges(snapshot));
    planned
}

/// Whether a ConfigMap is one that the predecessor made. It gives them a label.
fn is_predecessors_map(map: &DynamicObject) -> bool {
    in_both_groups("watching").iter().any(|key| map.labels().get(key).is_some_and(|value| value == "true"))
}
