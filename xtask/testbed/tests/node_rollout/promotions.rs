//! Good versions are promoted, step by step.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{RolloutStatus, TrialPhase};
use ctrlmesh_runtime::sync::read;

use crate::bed::{self, GOOD, Kind, MANAGERS, NEXT, Operator, PAUSE, REPLICAS};

/// A third good version.
const NEWEST: &str = "--resync=1800ms";

#[test]
fn a_good_version_is_promoted_step_by_step() -> Result<()> {
    let _managers = read(&MANAGERS);
    bed::case("good", Kind::Deployment, PAUSE, good_version)
}

#[test]
fn a_good_version_of_a_statefulset_is_promoted() -> Result<()> {
    if !bed::runs_in_full("a_good_version_of_a_statefulset_is_promoted")? {
        return Ok(());
    }
    let _managers = read(&MANAGERS);
    bed::case("good-set", Kind::StatefulSet, PAUSE, good_version)
}

/// Has the next version tried and promoted.
pub(crate) fn good_version(operator: Operator<'_>) -> Result<()> {
    operator.change(&[NEXT])?;
    let revision = operator.revision()?;
    for (step, slots) in [(1, 1), (2, 8)] {
        let status = operator.until_rollout("a step of the trial", |status| is_in(status, &revision, step))?;
        let trial = status.trial.context("a trial")?;
        ensure!(trial.slots.len() == slots, "step {step}: {trial:?}");
    }
    promoted(operator, &revision, REPLICAS)
}

/// Waits until the revision is promoted, the second one of this operator, and checks that all went well.
pub(crate) fn promoted(operator: Operator<'_>, revision: &str, replicas: usize) -> Result<()> {
    let status =
        operator.until_rollout("the promotion", |status| status.trial.is_none() && status.promoted == revision)?;
    ensure!(status.second, "the second version has the shards with the first names: {status:?}");
    ensure!(status.rejected.is_empty(), "{status:?}");
    operator.rolled_out()?;
    operator.all_ready(revision, replicas)?;
    operator.owned_by(true)?;
    operator.witnessed()
}

/// Whether the revision is in this step, from 1.
pub(crate) fn is_in(status: &RolloutStatus, revision: &str, step: i32) -> bool {
    status.trial.as_ref().is_some_and(|trial| {
        let is_last = trial.phase == TrialPhase::Promoting;
        trial.revision == revision && trial.step == step && (is_last || trial.phase == TrialPhase::Analysing)
    })
}

#[test]
fn the_newest_of_two_versions_is_tried() -> Result<()> {
    if !bed::runs_in_full("the_newest_of_two_versions_is_tried")? {
        return Ok(());
    }
    let _managers = read(&MANAGERS);
    bed::case("newest", Kind::Deployment, PAUSE, |operator| {
        ensure!(operator.has_arguments(&[GOOD])?);
        operator.change(&[NEXT])?;
        let former = operator.revision()?;
        operator.until_rollout("the first of both to be tried", |status| is_in(status, &former, 1))?;
        operator.change(&[NEWEST])?;
        let newest = operator.revision()?;
        operator.until_rollout("the newest to be tried", |status| is_in(status, &newest, 1))?;
        let pods = operator.pods_of(&newest)?;
        let canary = pods.first().and_then(|pod| pod["metadata"]["name"].as_str()).context("a pod to delete")?;
        operator.space.kubectl(&["delete", "pod", canary, "--wait=false"])?;
        // The fourth pod is a standby of a shard.
        let replicas = REPLICAS + 1;
        operator.space.kubectl(&["scale", &operator.target(), &format!("--replicas={replicas}")])?;
        promoted(operator, &newest, replicas)
    })
}
