//! `ctrlmesh migrate`: takes a cluster over from KusionStack Controller Mesh or Kridge, step by step, and back.
//!
//! Steps are decided by pure functions. The record of what was there before stands in a ConfigMap, which is written
//! before the first change of a step.

mod object;
mod change;
mod state;
mod kridge;
mod snapshot;
mod labels;
mod leftovers;
mod steps;
mod args;
mod error;
mod carry_out;
mod store;
mod read;
mod wait;
mod undo;
mod render;

use std::io::{Write as _, stdout};

use serde::Serialize;

pub(crate) use self::args::Arguments;
use self::args::{ChangeArgs, Command, PlanArgs, RunArgs};
use self::carry_out::Outcome;
use self::change::Change;
use self::error::MigrateError;
use self::leftovers::{Leftover, leftovers};
use self::snapshot::Snapshot;
use self::state::{State, Step};
use self::steps::Planned;
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
    let snapshot = read::snapshot(&client, &arguments.common).await?;
    let plan = MigrationPlan { steps: planned(&snapshot, &store.state, Step::Finish), leftovers: leftovers(&snapshot) };
    let printed = match arguments.output {
        Some(format) => text::document(format, &Document::new(KIND, &plan))?,
        None => render::plan(&plan.steps, &plan.leftovers),
    };
    write!(stdout().lock(), "{printed}")?;
    Ok(())
}

/// The steps up to `until`. What is done is not decided again.
fn planned(snapshot: &Snapshot, state: &State, until: Step) -> Vec<PlannedStep> {
    let steps = Step::ALL.into_iter().filter(|step| *step <= until);
    let plan = |step: Step| {
        let done = state.done.contains(&step);
        PlannedStep { step, done, planned: if done { Planned::default() } else { steps::plan(step, snapshot) } }
    };
    steps.map(plan).collect()
}

async fn take_steps(arguments: &RunArgs) -> Result<(), MigrateError> {
    let ChangeArgs { dry_run, timeout, common } = &arguments.changes;
    let client = Connection::of(&common.cluster).await?.client;
    let mut store = Store::open(&client, &common.system_namespace).await?;
    if *dry_run {
        let snapshot = read::snapshot(&client, common).await?;
        write!(stdout().lock(), "{}", render::plan(&planned(&snapshot, &store.state, arguments.until), &[]))?;
        return Ok(());
    }
    let waiter = Waiter { client: client.clone(), timeout: *timeout };
    for step in Step::ALL.into_iter().filter(|step| *step <= arguments.until) {
        if store.state.done.contains(&step) {
            continue;
        }
        say(&format!("{}:", step.name()))?;
        let snapshot = read::snapshot(&client, common).await?;
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
    let fresh = planned.changes.iter().filter(|one| one.inverse.is_some());
    store.state.record(step, &fresh.cloned().collect::<Vec<_>>());
    for change in &planned.undone_last {
        store.state.note_last(change.clone());
    }
    store.save().await?;
    before(step, snapshot, store, waiter).await?;
    perform(planned.changes.iter().map(|one| &one.change), waiter).await?;
    after(step, snapshot, waiter).await
}

/// What has to be so before the changes of a step.
async fn before(step: Step, snapshot: &Snapshot, store: &mut Store, waiter: &Waiter) -> Result<(), MigrateError> {
    match step {
        Step::Managers => {
            perform(&store.state.resume, waiter).await?;
            store.state.resume.clear();
            store.save().await?;
            waiter.leading(&snapshot.system, true).await
        }
        Step::Enrol => {
            for (_, root) in wait::enrolled(snapshot) {
                waiter.condition(&root, "Labelled").await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// What has to be so before the next step.
async fn after(step: Step, snapshot: &Snapshot, waiter: &Waiter) -> Result<(), MigrateError> {
    match (step, &snapshot.manager) {
        (Step::Stop, Some(manager)) => waiter.stopped(manager).await,
        (Step::Enrol, _) => {
            for (workload, root) in wait::enrolled(snapshot) {
                waiter.rolled_out(&workload).await?;
                waiter.condition(&root, "Settled").await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Carries changes out, one after the other, and says each.
async fn perform(changes: impl IntoIterator<Item = &Change>, waiter: &Waiter) -> Result<(), MigrateError> {
    for change in changes {
        let outcome = match carry_out::carry_out(&waiter.client, change, waiter.timeout).await? {
            Outcome::Done => "",
            Outcome::Unchanged => " (it was so already)",
            Outcome::Absent => " (it is not there)",
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
