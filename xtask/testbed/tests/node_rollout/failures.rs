//! Bad versions get no further than their first step, and are taken back.

use std::io::{Write as _, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use ctrlmesh_common::api::{RolloutStatus, TrialPhase};
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::is_full;
use serde_json::json;

use crate::bed::{self, Kind, LONG_PAUSE, MANAGERS, Operator, PAUSE, QUIET, REPLICAS};
use crate::mesh::until;
use crate::pods::has;
use crate::trial::RejectedTrial;

/// A fault with which the operator writes nothing at all.
const DEAF: &str = "deaf";

/// What a version owns that is late.
const LATE_SLOTS: usize = 8;

/// The faults that ordinary runs try, and those of full runs.
const FEW: [&str; 3] = ["hot", DEAF, "crash"];
const ALL: [&str; 5] = ["garbage-status", "hot", DEAF, "deleter", "crash"];

#[test]
fn each_bad_version_is_caught_and_taken_back() -> Result<()> {
    let _managers = read(&MANAGERS);
    let faults = if is_full() { &ALL[..] } else { &FEW[..] };
    bed::case("bad", Kind::Deployment, LONG_PAUSE, |operator| all_are_taken_back(operator, faults))
}

#[test]
fn each_bad_version_of_a_statefulset_is_taken_back() -> Result<()> {
    if !bed::runs_in_full("each_bad_version_of_a_statefulset_is_taken_back")? {
        return Ok(());
    }
    let _managers = read(&MANAGERS);
    bed::case("bad-set", Kind::StatefulSet, LONG_PAUSE, |operator| all_are_taken_back(operator, &["hot", "crash"]))
}

#[test]
fn a_version_that_is_late_is_taken_back() -> Result<()> {
    if !bed::runs_in_full("a_version_that_is_late_is_taken_back")? {
        return Ok(());
    }
    let _managers = read(&MANAGERS);
    // It takes changes of some objects to know.
    let steps = json!([{"slots": LATE_SLOTS, "pause": "300s"}, {"percent": 100, "pause": PAUSE}]);
    bed::case_with("late", Kind::Deployment, QUIET, &steps, |operator| {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let load = scope.spawn(|| operator.change_websites(&over));
            let ends = EndsLoad(&over);
            let late = is_late(operator);
            drop(ends);
            load.join().map_err(|_panic| anyhow!("the load panicked"))?.context("the load")?;
            late
        })?;
        operator.witnessed()
    })
}

/// Ends the load, also where the test panics.
struct EndsLoad<'a>(&'a AtomicBool);

impl Drop for EndsLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn is_late(operator: Operator<'_>) -> Result<()> {
    let good = operator.revision()?;
    let bad = spoil(operator, "slow")?;
    taken_back(operator, &good, &bad)?;
    RejectedTrial::of(operator, &bad)?.stayed_in_first_step(operator, LATE_SLOTS)?;
    let status = operator.until_rollout("a status", |_| true)?;
    let message = &status.rejected[0].message;
    ensure!(
        message.contains("it wrote half of what changed up to "),
        "it was taken back for something else: {message}"
    );
    Ok(writeln!(stderr(), "late: {message}")?)
}

fn all_are_taken_back(operator: Operator<'_>, faults: &[&str]) -> Result<()> {
    let good = operator.revision()?;
    for fault in faults {
        let bad = spoil(operator, fault)?;
        taken_back(operator, &good, &bad)?;
        let trial = RejectedTrial::of(operator, &bad)?;
        let writes = trial.stayed_in_first_step(operator, 1)?;
        ensure!(writes > 0 || *fault == DEAF, "nobody saw what {fault} does: it wrote nothing");
        let (kind, took) = (operator.kind, trial.returned_within());
        writeln!(
            stderr(),
            "{kind:?}, {fault}: {writes} writes in its first slice; given back {took:?} after the verdict"
        )?;
    }
    operator.witnessed()
}

/// Gives the operator a fault: the bad revision.
fn spoil(operator: Operator<'_>, fault: &str) -> Result<String> {
    operator.change(&[operator.good, &format!("--fault={fault}")])?;
    operator.revision()
}

/// Waits until the bad revision is rejected and its pods are gone, and checks that all is as it was.
fn taken_back(operator: Operator<'_>, good: &str, bad: &str) -> Result<()> {
    operator.until_rollout("the bad version to be taken back", |status| {
        status.trial.is_none() && is_rejected(status, bad)
    })?;
    all_is_well(operator, good)
}

fn is_rejected(status: &RolloutStatus, revision: &str) -> bool {
    status.rejected.first().is_some_and(|rejected| rejected.revision == revision)
}

/// Requires that the good version has everything.
fn all_is_well(operator: Operator<'_>, good: &str) -> Result<()> {
    ensure!(operator.has_arguments(&[operator.good])?, "the template is not the good one");
    operator.rolled_out()?;
    operator.all_ready(good, REPLICAS)?;
    operator.owned_by(false)?;
    let status = operator.until_rollout("a status", |_| true)?;
    ensure!(status.promoted == good && status.trial.is_none(), "{status:?}");
    Ok(())
}

#[test]
fn a_version_that_was_rejected_is_refused_until_promoted() -> Result<()> {
    if !bed::runs_in_full("a_version_that_was_rejected_is_refused_until_promoted")? {
        return Ok(());
    }
    let _managers = read(&MANAGERS);
    bed::case("refused", Kind::Deployment, PAUSE, |operator| {
        let good = operator.revision()?;
        let bad = spoil(operator, "hot")?;
        taken_back(operator, &good, &bad)?;
        is_refused(operator, &bad)?;
        operator.space.kubectl(&["rollout", "undo", &operator.target()])?;
        operator.until_rollout("the trial to end", |status| status.trial.is_none())?;
        all_is_well(operator, &good)?;
        // Whoever promotes it has it tried again, from the first step on.
        is_refused(operator, &bad)?;
        operator.command(&format!("promote {bad}"))?;
        operator.until_rollout("it to be tried again", |status| {
            let is_tried = |phase| phase == TrialPhase::Analysing;
            status.trial.as_ref().is_some_and(|trial| is_tried(trial.phase) && trial.slots.len() == 1)
        })?;
        taken_back(operator, &good, &bad)?;
        operator.witnessed()
    })
}

/// Applies the rejected template once more, and checks that its pods run, own nothing, and are not Ready.
fn is_refused(operator: Operator<'_>, bad: &str) -> Result<()> {
    let again = spoil(operator, "hot")?;
    ensure!(again == bad, "the same template is of revision {again}, once {bad}");
    let status = operator.until_rollout("it to be held", |status| {
        status.trial.as_ref().is_some_and(|trial| trial.revision == bad && trial.phase == TrialPhase::Held)
    })?;
    ensure!(status.trial.iter().all(|trial| trial.slots.is_empty() && trial.namespaces.is_empty()), "{status:?}");
    let pods = until("a pod of it whose containers are ready", || {
        let pods = operator.pods_of(bad)?;
        Ok(pods.iter().any(|pod| has(pod, "ContainersReady")).then_some(pods))
    })?;
    ensure!(!pods.iter().any(|pod| has(pod, "Ready")), "a pod of it is Ready");
    let table = operator.config()?.status.and_then(|status| status.ownership);
    let is_its = |shard: &String| shard.ends_with("-second");
    ensure!(table.iter().all(|table| table.is_total() && !table.slots.values().any(is_its)), "{table:?}");
    Ok(())
}
