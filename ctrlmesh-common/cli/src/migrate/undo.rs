//! Takes steps back, the last one first.

use std::collections::BTreeMap;

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::args::{ChangeArgs, UndoArgs};
use super::carry_out::Purpose;
use super::change::{Action, Change, Reversible};
use super::error::MigrateError;
use super::object::{DEPLOYMENT, ObjectRef, SHARDING_CONFIG, WEBHOOKS, portable};
use super::snapshot::{Snapshot, is_fenced, is_to_be_fenced, replicas, rule};
use super::state::Step;
use super::steps::guard::GUARD;
use super::steps::webhooks::OUR_WEBHOOKS;
use super::store::Store;
use super::wait::{self, Waiter};
use super::{perform, read, say, steps};
use crate::cluster::Connection;
use crate::text;

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
    let waiter = Waiter::new(client.clone(), *timeout);
    for step in steps {
        say(&format!("undo {}:", step.name()))?;
        // From here on the step is not done: a run after a cut takes it again.
        store.state.done.remove(&step);
        store.save().await?;
        // What managers that run have done until then is in the snapshot.
        let is_running = waiter.leads(&common.system_namespace).await?;
        let snapshot = read::snapshot(&client, common, &store.state).await?;
        TakingBack { step, snapshot: &snapshot, store: &mut store, waiter: &waiter, is_running }.run().await?;
        store.state.forget(step);
        store.save().await?;
    }
    if store.state.undo.is_empty() && store.state.resume.is_empty() { store.remove().await } else { Ok(()) }
}

/// A step that is taken back.
struct TakingBack<'a> {
    step: Step,
    snapshot: &'a Snapshot,
    store: &'a mut Store,
    waiter: &'a Waiter,
    /// Whether managers of ours run.
    is_running: bool,
}

impl TakingBack<'_> {
    async fn run(&mut self) -> Result<(), MigrateError> {
        // Our managers and the predecessor's never write at once.
        // Without our managers, our webhooks refuse what an undo writes.
        let is_installed = self.is_running || self.snapshot.has_own_managers() || has_our_webhooks(self.snapshot);
        if self.step == Step::Managers || (self.step < Step::Managers && is_installed) {
            self.stop_ours().await?;
        }
        let inverses = self.store.state.inverses(self.step);
        perform(&inverses, Purpose::Undo, self.waiter).await?;
        match (self.step, &self.snapshot.manager) {
            // Not after `stop`: the predecessor's manager ends where its webhook configurations are missing. The guard
            // goes only once it runs.
            (Step::Webhooks, Some(manager)) if replicas(manager) > 0 => {
                self.waiter.rolled_out(&DEPLOYMENT.of_object(manager)).await
            }
            (Step::Enrol, _) => {
                for (workload, root) in wait::targets(self.snapshot)
                    .iter()
                    .filter(|(workload, _)| inverses.iter().any(|one| one.object == *workload))
                {
                    self.waiter.rolled_out(workload).await?;
                    self.waiter.handed_back(root).await?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Takes the fences of roots out, and stops our managers. What starts them again is noted before.
    async fn stop_ours(&mut self) -> Result<(), MigrateError> {
        // A pod that is made while nobody injects it would work beside the shards.
        let guard = self.store.state.inverses(Step::Managers);
        let guard: Vec<Change> = guard.into_iter().filter(|one| matches!(one.action, Action::Create(_))).collect();
        perform(&guard, Purpose::Step, self.waiter).await?;
        if !guard.is_empty() {
            self.waiter.enforced(GUARD, &self.snapshot.system).await?;
        }
        // Managers that run may fence a root that they have not fenced so far.
        let is_kept = |root: &&DynamicObject| is_fenced(root) || self.is_running && is_to_be_fenced(root);
        let fenced: Vec<&DynamicObject> = self.snapshot.roots().filter(is_kept).collect();
        if !fenced.is_empty() && !self.is_running {
            let roots =
                fenced.iter().map(|root| SHARDING_CONFIG.of_object(root).to_string()).collect::<Vec<_>>().join(", ");
            return Err(MigrateError::NoManager { roots, namespace: self.snapshot.system.clone() });
        }
        let mut changes: Vec<Change> = Vec::new();
        for root in fenced {
            let (off, before) = unfence(root);
            // Under the step that is taken back now: no other one may be to come.
            self.store.state.note(self.step, before);
            changes.push(off);
        }
        self.store.save().await?;
        perform(&changes, Purpose::Undo, self.waiter).await?;
        if self.is_running {
            self.waiter.unfenced().await?;
        }
        self.stop_programs().await
    }

    async fn stop_programs(&mut self) -> Result<(), MigrateError> {
        let ours = self.snapshot.webhooks.iter().filter(|one| one.name_any() == OUR_WEBHOOKS);
        let deleted = ours.filter_map(|one| Some(Reversible::delete(ObjectRef::among(one, &WEBHOOKS)?, portable(one))));
        let stopped: Vec<Reversible> =
            deleted.chain(self.snapshot.our_manager.as_ref().and_then(steps::scaled_to_zero)).collect();
        stopped.iter().filter_map(|one| one.inverse.clone()).for_each(|inverse| self.store.state.note_resume(inverse));
        self.store.save().await?;
        perform(stopped.iter().map(|one| &one.change), Purpose::Step, self.waiter).await?;
        if let Some(manager) = &self.snapshot.our_manager {
            self.waiter.stopped(manager).await?;
        }
        self.waiter.leading(&self.snapshot.system, false).await
    }
}

fn has_our_webhooks(snapshot: &Snapshot) -> bool {
    snapshot.webhooks.iter().any(|one| one.name_any() == OUR_WEBHOOKS)
}

/// Takes the fence of a root out, and puts it in again. A root with a rollout has to have a fence, so both go.
fn unfence(root: &DynamicObject) -> (Change, Change) {
    let fields = ["fence", "rollout"].into_iter().filter_map(|field| Some((field, rule(root)?.get(field)?.clone())));
    let before: BTreeMap<&str, Value> = [("fence", Value::Null)].into_iter().chain(fields).collect();
    let off: BTreeMap<&str, Value> =
        before.keys().map(|field| (*field, if *field == "fence" { json!("Off") } else { Value::Null })).collect();
    let merge = |fields| Change::new(SHARDING_CONFIG.of_object(root), Action::Merge(json!({"spec": {"root": fields}})));
    (merge(off), merge(before))
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::ShardingConfig;
    use ctrlmesh_manager::rules::validate;

    use super::*;

    /// A root with these fields beside those that each has to have.
    fn root(more: &Value) -> Value {
        let auto = json!({"shardingSize": 1, "everyShardReplicas": 1});
        let mut rule = json!({"prefix": "op", "targetDeployment": "op", "auto": auto});
        json_patch::merge(&mut rule, more);
        json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"name": "r", "namespace": "ops"}, "spec": {"root": rule}})
    }

    #[test]
    fn a_root_is_unfenced_before_managers_that_run_may_fence_it() {
        for (more, expected) in [
            (json!({}), true),
            (json!({"fence": "Proxy"}), true),
            (json!({"fence": "Off"}), false),
            (json!({"disable": true}), false),
        ] {
            assert_eq!(is_to_be_fenced(&serde_json::from_value(root(&more)).unwrap()), expected, "{more}");
        }
    }

    #[test]
    fn a_root_with_a_rollout_is_unfenced_and_fenced_again() {
        for rule in [json!({}), json!({"fence": "Proxy"}), json!({"rollout": {"steps": [{"percent": 50}]}})] {
            let root = root(&rule);
            let (off, before) = unfence(&serde_json::from_value(root.clone()).unwrap());
            let (Action::Merge(off), Action::Merge(before)) = (off.action, before.action) else { panic!("{rule}") };
            let mut unfenced = root.clone();
            json_patch::merge(&mut unfenced, &off);
            assert_eq!(unfenced["spec"]["root"]["fence"], "Off");
            let config: ShardingConfig = serde_json::from_value(unfenced.clone()).unwrap();
            assert_eq!(validate::sharding_config(&config, &[], None).errors, [], "{unfenced}");
            json_patch::merge(&mut unfenced, &before);
            assert_eq!(unfenced, root);
        }
    }
}
