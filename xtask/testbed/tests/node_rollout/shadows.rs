//! A version that shadows the objects of its first step: it reads them, and stores nothing.

use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{RolloutStatus, ShadowReport};
use ctrlmesh_runtime::sync::read;
use serde_json::json;

use crate::bed::{self, GOOD, Kind, LONG_PAUSE, MANAGERS, NEXT, Operator, PAUSE};
use crate::trial::RejectedTrial;

#[test]
fn a_shadow_that_deletes_is_caught_and_a_good_one_is_promoted() -> Result<()> {
    let _managers = read(&MANAGERS);
    let steps = json!([{"percent": 25, "pause": LONG_PAUSE, "shadow": true}, {"slots": 1, "pause": PAUSE},
        {"percent": 100, "pause": PAUSE}]);
    bed::case_with("shadow", Kind::Deployment, GOOD, &steps, |operator| {
        nothing_is_deleted(operator)?;
        shadow_is_promoted(operator)?;
        operator.witnessed()
    })
}

/// A version that deletes what the good one makes fails, is taken back, and has deleted nothing.
fn nothing_is_deleted(operator: Operator<'_>) -> Result<()> {
    let (good, pages) = (operator.revision()?, operator.pages()?);
    ensure!(pages.len() > 30, "{pages:?}");
    operator.change(&[GOOD, "--fault=deleter"])?;
    let bad = operator.revision()?;
    let status = operator.until_rollout("it to be taken back", |status| {
        status.trial.is_none() && status.rejected.first().is_some_and(|one| one.revision == bad)
    })?;
    ensure!(operator.pages()? == pages, "pages were deleted or made anew");
    RejectedTrial::of(operator, &bad)?.stored_nothing(operator)?;
    let report = report_of(&status, &bad)?;
    let deletes = report.differences.iter().filter(|one| one.verb == "delete" && one.resource == "configmaps");
    ensure!(deletes.count() > 0, "the report names no page that it would have deleted: {report:?}");
    ensure!(status.rejected[0].message.contains("it deleted "), "{:?}", status.rejected[0]);
    ensure!(status.promoted == good, "{status:?}");
    operator.owned_by(false)
}

/// A good version writes in its shadow what the other one writes, and then goes through all steps.
fn shadow_is_promoted(operator: Operator<'_>) -> Result<()> {
    operator.change(&[NEXT])?;
    let next = operator.revision()?;
    let in_shadow = operator.until_rollout("a check in its shadow", |status| {
        let trial = status.trial.as_ref().filter(|trial| trial.revision == next && trial.shadow);
        trial.is_some_and(|trial| trial.passed > 0)
    })?;
    let table = operator.config()?.status.and_then(|status| status.ownership).context("a table")?;
    ensure!(table.slots.values().all(|shard| shard.ends_with("-normal")), "it owns something: {table:?}");
    let report = report_of(&in_shadow, &next)?;
    ensure!(report.equal > 0 && report.different == 0, "{report:?}");
    operator.command(&format!("promote {next}"))?;
    let status = operator
        .until_rollout("the good version to be promoted", |status| status.promoted == next && status.trial.is_none())?;
    let report = report_of(&status, &next)?;
    writeln!(stderr(), "a good version in its shadow: {}", report.summary())?;
    operator.owned_by(true)
}

fn report_of<'s>(status: &'s RolloutStatus, revision: &str) -> Result<&'s ShadowReport> {
    let report = status.shadow.as_ref().filter(|report| report.revision == revision);
    report.with_context(|| format!("no report of {revision}: {status:?}"))
}
