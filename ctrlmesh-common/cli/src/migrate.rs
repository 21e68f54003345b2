//! `ctrlmesh migrate`: takes a cluster over from KusionStack Controller Mesh or Kridge, step by step, and back.
//!
//! Steps are decided by pure functions. The record of what was there before stands in a ConfigMap, which is written
//! before the first change of a step.

mod object;
mod change;
mod state;
mod kridge;
mod snapshot;
mod copy;
mod flags;
mod labels;
mod leftovers;
mod members;
mod steps;
mod args;
mod error;
mod carry_out;
mod store;
mod read;
mod wait;
mod undo;
mod render;
#[cfg(test)]
mod fake_server;

use std::io::{Write as _, stdout};

use serde::Serialize;

pub(crate) use self::args::Arguments;
use self::args::{ChangeArgs, Command, PlanArgs, RunArgs};
use self::carry_out::{Outcome, Purpose};
use self::change::Change;
use self::error::MigrateError;
use self::leftovers::{Leftover, leftovers};
use self::object::{ObjectRef, WEBHOOKS};
use self::snapshot::Snapshot;
use self::state::{State, Step};
use self::steps::Planned;
use self::steps::guard::{GUARD, KRIDGES_GUARD};
use self::store::Store;
use self::wait::Waiter;
use crate::cluster::{self, Connection};
use crate::text::{self, Document};

/// Kind of the document about a plan.
const KIND: &str = "MigrationPlan";

/// A step as it would be taken now.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PlannedStep {
    step: Step,
    done: bool,
    #[serde(flatten)]
    planned: Planned,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MigrationPlan {
    steps: Vec<PlannedStep>,
    leftovers: Vec<Leftover>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), MigrateError> {
    cluster::block_on(async {
        match &arguments.command {
            Command::Plan(plan) => show(plan).await,
            Command::Run(run) => Box::pin(take_steps(run)).await,
            Command::Undo(undo) => Box::pin(undo::run(undo)).await,
        }
    })
}

async fn show(arguments: &PlanArgs) -> Result<(), MigrateError> {
    let client = Connection::of(&arguments.common.cluster).await?.client;
    let store = Store::open(&client, &arguments.common.system_namespace).await?;
    let snapshot = read::snapshot(&client, &arguments.common, &store.state).await?;
    let plan = MigrationPlan { steps: planned(&snapshot, &store.state, Step::Finish), leftovers: leftovers(&snapshot) };
    let printed = match arguments.output {
        Some(format) => text::document(format, &Document::new(KIND, &plan))?,
        None => render::plan(&plan.steps, &plan.leftovers),
    };
    write!(stdout().lock(), "{printed}")?;
    Ok(())
}

/// The steps up to `until`, each as the earlier ones leave the cluster. What is done is not decided again.
fn planned(snapshot: &Snapshot, state: &State, until: Step) -> Vec<PlannedStep> {
    let mut copy = snapshot.clone();
    let plan = |step: Step| {
        let done = state.done.contains(&step);
        let planned = if done { Planned::default() } else { steps::plan(step, &copy) };
        planned.changes.iter().for_each(|one| copy::apply(&mut copy, &one.change));
        PlannedStep { step, done, planned }
    };
    Step::all().filter(|step| *step <= until).map(plan).collect()
}

async fn take_steps(arguments: &RunArgs) -> Result<(), MigrateError> {
    let ChangeArgs { dry_run, timeout, common } = &arguments.changes;
    let client = Connection::of(&common.cluster).await?.client;
    let mut store = Store::open(&client, &common.system_namespace).await?;
    if *dry_run {
        let snapshot = read::snapshot(&client, common, &store.state).await?;
        write!(stdout().lock(), "{}", render::plan(&planned(&snapshot, &store.state, arguments.until), &[]))?;
        return Ok(());
    }
    let waiter = Waiter::new(client.clone(), *timeout);
    for step in Step::all().filter(|step| *step <= arguments.until) {
        if store.state.done.contains(&step) {
            continue;
        }
        say(&format!("{}:", step.name()))?;
        let snapshot = read::snapshot(&client, common, &store.state).await?;
        take(step, &snapshot, &mut store, &waiter).await?;
        store.state.done.insert(step);
        if step == Step::Finish {
            // The record stays, so that a later run does not begin anew.
            store.state.undo.clear();
        }
        store.save().await?;
    }
    Ok(())
}

/// Takes one step, from what is there, to its end.
async fn take(step: Step, snapshot: &Snapshot, store: &mut Store, waiter: &Waiter) -> Result<(), MigrateError> {
    let mut planned = steps::plan(step, snapshot);
    // Theirs and ours never write at once.
    planned.problems.extend(if step > Step::Stop { steps::is_back(snapshot) } else { None });
    for note in &planned.notes {
        say(&format!("  note: {note}"))?;
    }
    if !planned.problems.is_empty() {
        return Err(MigrateError::Problems { step, problems: planned.problems });
    }
    store.state.predecessor.get_or_insert_with(|| snapshot.predecessor.clone());
    planned.note(step, &mut store.state);
    store.save().await?;
    before(step, snapshot, store, waiter).await?;
    perform(planned.changes.iter().map(|one| &one.change), Purpose::Step, waiter).await?;
    after(step, snapshot, waiter).await
}

/// What has to be so before the changes of a step.
async fn before(step: Step, snapshot: &Snapshot, store: &mut Store, waiter: &Waiter) -> Result<(), MigrateError> {
    match step {
        Step::Managers => {
            perform(&store.state.to_resume(&webhooks(snapshot)), Purpose::Undo, waiter).await?;
            store.state.resume.clear();
            store.save().await?;
            waiter.leading(&snapshot.system, true).await?;
            waiter.trusted_webhook().await
        }
        Step::Enrol => {
            for one in wait::enrolled(snapshot) {
                waiter.condition(&one.root, "Labelled").await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The webhook configurations that are there.
fn webhooks(snapshot: &Snapshot) -> Vec<ObjectRef> {
    snapshot.webhooks.iter().filter_map(|one| ObjectRef::among(one, &WEBHOOKS)).collect()
}

/// What has to be so before the next step.
async fn after(step: Step, snapshot: &Snapshot, waiter: &Waiter) -> Result<(), MigrateError> {
    match (step, &snapshot.manager) {
        (Step::Guard, _) => {
            for policy in [GUARD, KRIDGES_GUARD] {
                waiter.enforced(policy, &snapshot.system).await?;
            }
            Ok(())
        }
        (Step::Stop, Some(manager)) => waiter.stopped(manager).await,
        (Step::Enrol, _) => {
            for one in wait::enrolled(snapshot) {
                waiter.rolled_out(&one.workload).await?;
                // Pods that stay own what they own.
                if one.is_whole {
                    waiter.condition(&one.root, "Settled").await?;
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Carries changes out, one after the other, and says each.
async fn perform(
    changes: impl IntoIterator<Item = &Change>,
    purpose: Purpose,
    waiter: &Waiter,
) -> Result<(), MigrateError> {
    for change in changes {
        let outcome = match carry_out::carry_out(&waiter.client, change, purpose, waiter.timeout).await? {
            Outcome::Done => "",
            Outcome::Unchanged => " (it was so already)",
            Outcome::Absent => " (it is not there any more)",
            Outcome::Foreign => " (not done: somebody else has made it)",
        };
        say(&format!("  {}{outcome}", text::cut(&change.to_string(), 200)))?;
    }
    Ok(())
}

/// Says at once what was done: a later step may take long.
fn say(line: &str) -> Result<(), MigrateError> {
    let mut out = stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
