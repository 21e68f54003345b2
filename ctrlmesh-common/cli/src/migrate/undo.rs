//! Takes steps back, the last one first.

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::args::{ChangeArgs, UndoArgs};
use super::change::{Action, Change};
use super::error::MigrateError;
use super::object::{DEPLOYMENT, MUTATING, SHARDING_CONFIG, VALIDATING, portable};
use super::snapshot::{Snapshot, is_fenced, replicas, rule};
use super::state::Step;
use super::store::Store;
use super::wait::{self, Waiter};
use super::{perform, read, say};
use crate::cluster::Connection;
use crate::text;

/// Name of our webhook configurations.
const OUR_WEBHOOKS: &str = "ctrlmesh";

/// # Errors
/// Why not, and what to do about it.
pub(super) async fn run(arguments: &UndoArgs) -> Result<(), MigrateError> {
    let ChangeArgs { dry_run, timeout, common } = &arguments.changes;
    let client = Connection::of(&common.cluster).await?.client;
    let mut store = Store::open(&client, &common.system_namespace).await?;
    if store.state.undo.contains_key(&Step::Finish) {
        return Err(MigrateError::Finishing);
    }
    let steps = store.state.to_undo(arguments.until);
    if steps.is_empty() {
        return say("there is nothing to take back");
    }
    if *dry_run {
        for step in steps {
            say(&format!("{}:", step.name()))?;
            for change in store.state.inverses(step) {
                say(&format!("  {}", text::cut(&change.to_string(), 200)))?;
            }
        }
        return Ok(());
    }
    let waiter = Waiter { client: client.clone(), timeout: *timeout };
    for step in steps {
        say(&format!("undo {}:", step.name()))?;
        // From here on the step is not done: a run after a cut takes it again.
        store.state.done.remove(&step);
        store.save().await?;
        let snapshot = read::snapshot(&client, common).await?;
        take_back(step, &snapshot, &mut store, &waiter).await?;
        store.state.forget(step);
        store.save().await?;
    }
    if store.state.undo.is_empty() && store.state.resume.is_empty() { store.remove().await } else { Ok(()) }
}

async fn take_back(step: Step, snapshot: &Snapshot, store: &mut Store, waiter: &Waiter) -> Result<(), MigrateError> {
    let is_ours_running = wait::leads(&waiter.client, &snapshot.system).await?;
    // Our managers and the predecessor's never write at once.
    let has_replicas = snapshot.our_manager.as_ref().is_some_and(|manager| replicas(manager) > 0);
    if step == Step::Managers || (step < Step::Managers && (is_ours_running || has_replicas)) {
        stop_ours(snapshot, store, waiter, is_ours_running).await?;
    }
    let targets = wait::targets(snapshot);
    let inverses = store.state.inverses(step);
    perform(&inverses, waiter).await?;
    match (step, &snapshot.manager) {
        // Not after `stop`: the predecessor's manager ends where its webhook configurations are missing. The guard goes
        // only once it runs.
        (Step::Webhooks, Some(manager)) if replicas(manager) > 0 => {
            waiter.rolled_out(&DEPLOYMENT.of_object(manager)).await
        }
        (Step::Enrol, _) => {
            for (workload, root) in
                targets.iter().filter(|(workload, _)| inverses.iter().any(|one| one.object == *workload))
            {
                waiter.rolled_out(workload).await?;
                waiter.handed_back(root).await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Takes the fences of roots out, and stops our managers. What starts them again is noted before.
async fn stop_ours(
    snapshot: &Snapshot,
    store: &mut Store,
    waiter: &Waiter,
    is_running: bool,
) -> Result<(), MigrateError> {
    // A pod that is made while nobody injects it would work beside the shards.
    let guard = store.state.inverses(Step::Managers);
    let guard: Vec<Change> = guard.into_iter().filter(|one| matches!(one.action, Action::Create(_))).collect();
    perform(&guard, waiter).await?;
    let fenced: Vec<&DynamicObject> = snapshot.roots().filter(|root| is_fenced(root)).collect();
    if !fenced.is_empty() && !is_running {
        let roots =
            fenced.iter().map(|root| SHARDING_CONFIG.of_object(root).to_string()).collect::<Vec<_>>().join(", ");
        return Err(MigrateError::NoManager { roots, namespace: snapshot.system.clone() });
    }
    let mut changes: Vec<Change> = Vec::new();
    for root in fenced {
        let fence = |mode: Value| Action::Merge(json!({"spec": {"root": {"fence": mode}}}));
        let before = rule(root).and_then(|rule| rule.get("fence")).cloned().unwrap_or(Value::Null);
        let target = SHARDING_CONFIG.of_object(root);
        store.state.note(Step::Managers, Change::new(target.clone(), fence(before)));
        changes.push(Change::new(target, fence(json!("Off"))));
    }
    store.save().await?;
    perform(&changes, waiter).await?;
    if is_running {
        waiter.unfenced().await?;
    }
    stop_programs(snapshot, store, waiter).await
}

async fn stop_programs(snapshot: &Snapshot, store: &mut Store, waiter: &Waiter) -> Result<(), MigrateError> {
    let mut changes = Vec::new();
    let ours = snapshot.webhooks.iter().filter(|one| one.name_any() == OUR_WEBHOOKS);
    for (kind, webhook) in
        ours.filter_map(|one| [MUTATING, VALIDATING].into_iter().find(|kind| kind.is(one)).zip(Some(one)))
    {
        let target = kind.of_object(webhook);
        if let Some(content) = portable(webhook) {
            store.state.note_resume(Change::new(target.clone(), Action::Create(content)));
        }
        changes.push(Change::new(target, Action::Delete));
    }
    if let Some(manager) = &snapshot.our_manager {
        let replicas = replicas(manager);
        let scale = |replicas: i64| Action::Merge(json!({"spec": {"replicas": replicas}}));
        if replicas != 0 {
            store.state.note_resume(Change::new(DEPLOYMENT.of_object(manager), scale(replicas)));
            changes.push(Change::new(DEPLOYMENT.of_object(manager), scale(0)));
        }
    }
    store.save().await?;
    perform(&changes, waiter).await?;
    waiter.leading(&snapshot.system, false).await
}
