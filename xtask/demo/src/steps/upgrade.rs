//! Steps in which a new version of the operator is rolled out: a bad one, and a good one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{RolloutStatus, ShadowReport};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::audit::Resource;
use crate::checks::{WHOLE_WITHIN, count, same_replicas, seconds, steady, touched};
use crate::environment::{Environment, configs};
use crate::install::{self, ROLLED_OUT_WITHIN};
use crate::view::Table;

/// The argument with which the example operator deletes every page that it sees.
const FAULT: &str = "--fault=deleter";

/// How long an upgrade through all steps may take.
const PROMOTED_WITHIN: Duration = Duration::from_mins(8);

/// Between two changes of the load.
const CHANGE_EVERY: Duration = Duration::from_millis(100);

pub(super) fn upgraded(environment: &Environment) -> Result<Vec<String>> {
    let (before, start) = (environment.observer.table(), Timestamp::now());
    let rule = json!({
        "steps": [{"percent": 25, "shadow": true, "pause": "Manual"}],
        "analysis": {"interval": "30s", "failureLimit": 0},
    });
    let promoted = try_versions(environment, &rule)?;
    let containers = containers(environment)?;
    let load = environment.load(CHANGE_EVERY);
    let clock = Instant::now();
    let mut bad = containers.clone();
    bad[0]["args"].as_array_mut().context("arguments of the operator")?.push(json!(FAULT));
    environment.api.merge(&environment.deployment(), &json!({"spec": {"template": {"spec": {"containers": bad}}}}))?;
    let status = environment.until("the bad version to be taken back", ROLLED_OUT_WITHIN, || {
        let status = rollout(environment)?;
        Ok(status.filter(|status| status.trial.is_none() && !status.rejected.is_empty()))
    })?;
    let (took, changed) = (clock.elapsed(), load.finish()?);
    let seen = done(environment)?;
    ensure!(self::containers(environment)? == containers, "the old template is not back");
    ensure!(status.promoted == promoted, "another version is promoted: {status:?}");
    same_replicas(&before, &environment.observer.table())?;
    let (written, report) = (nothing_stored(environment, start, &before)?, report(&status)?);
    set_back(environment)?;
    Ok(vec![
        format!("the bad version read a quarter of the slots and made dry runs only: {}", report.summary()),
        format!("it was found out, and the old template was back, {} after the change", seconds(took)),
        written,
        format!("{changed} objects were changed meanwhile, and followed by the old version; {seen}"),
        steady(environment, start)?,
    ])
}

/// Has new versions tried in these steps. The revision that is promoted.
fn try_versions(environment: &Environment, rule: &Value) -> Result<String> {
    let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}});
    environment.api.merge(&environment.deployment(), &json!({"spec": {"strategy": strategy}}))?;
    environment.api.merge(&root(environment), &json!({"spec": {"root": {"rollout": rule}}}))?;
    environment.until("the version to be promoted", WHOLE_WITHIN, || {
        Ok(rollout(environment)?.map(|status| status.promoted).filter(|promoted| !promoted.is_empty()))
    })
}

/// That no page was deleted, and that nothing was changed by a pod that was not there before.
fn nothing_stored(environment: &Environment, start: Timestamp, before: &Table) -> Result<String> {
    let (pages, websites) = (Resource::new("", "configmaps"), environment.observer.operator().resource.clone());
    let span = start..environment.observer.settle()?;
    let known: BTreeSet<&String> = before.replicas.keys().collect();
    environment.observer.history(|history| {
        let writes =
            history.writes(&span).filter(|one| one.object.resource == pages || one.object.resource == websites);
        let mut all = 0;
        for write in writes {
            ensure!(!(write.is_delete && write.object.resource == pages), "a page was deleted: {write:?}");
            ensure!(known.contains(&write.pod), "another pod than the old ones has written: {write:?}");
            all += 1;
        }
        Ok(format!("audit log: {}, none by the bad version; 0 pages deleted", count(all, "write", "writes")))
    })
}

fn report(status: &RolloutStatus) -> Result<&ShadowReport> {
    let report = status.shadow.as_ref().context("no report of the shadow")?;
    ensure!(report.differences.iter().any(|one| one.verb == "delete"), "the report names no delete: {report:?}");
    Ok(report)
}

/// An operator that is not ours gets its newer version, which goes through all steps.
pub(super) fn newer(environment: &Environment) -> Result<Vec<String>> {
    let pause = "15s";
    let rule = json!({
        "steps": [{"slots": 4, "shadow": true, "pause": "30s"}, {"slots": 8, "pause": pause},
            {"percent": 50, "pause": pause}, {"percent": 100, "pause": pause}],
        "analysis": {"interval": "10s"},
    });
    let promoted = try_versions(environment, &rule)?;
    let load = environment.load(CHANGE_EVERY);
    let clock = Instant::now();
    install::newer_prometheus_operator(&environment.cluster, environment.observer.table().replicas.len())?;
    let status = environment.until("the newer version to be promoted", PROMOTED_WITHIN, || {
        let status = rollout(environment)?.context("a rollout")?;
        ensure!(status.rejected.is_empty(), "it was rejected: {status:?}");
        Ok((status.promoted != promoted && status.trial.is_none()).then_some(status))
    })?;
    let (took, changed) = (clock.elapsed(), load.finish()?);
    let (seen, checks) = (done(environment)?, status.checks.len());
    let shadow = status.shadow.as_ref().map(ShadowReport::summary).context("a report of its shadow")?;
    Ok(vec![
        format!("promoted after {}, with {changed} objects changed meanwhile; {checks} checks are kept", seconds(took)),
        format!("in its shadow: {shadow}"),
        seen,
    ])
}

/// Waits for the workload's own rollout, and until all work is done and the operator follows it.
fn done(environment: &Environment) -> Result<String> {
    let operator = environment.observer.operator();
    install::rolled_out(&environment.cluster, operator.namespace, &format!("deployment/{}", operator.name))?;
    environment.observer.until("everything to be done", WHOLE_WITHIN, Table::is_whole)?;
    touched(environment)
}

fn set_back(environment: &Environment) -> Result<()> {
    environment.api.merge(&root(environment), &json!({"spec": {"root": {"rollout": null}}}))?;
    environment
        .until("no version to be tried any more", WHOLE_WITHIN, || Ok(rollout(environment)?.is_none().then_some(())))
}

fn rollout(environment: &Environment) -> Result<Option<RolloutStatus>> {
    let mut root = environment.api.get(&root(environment))?;
    let status = root["status"]["rollout"].take();
    Ok(serde_json::from_value(status)?)
}

/// Of the Deployment's template.
fn containers(environment: &Environment) -> Result<Value> {
    Ok(environment.api.get(&environment.deployment())?["spec"]["template"]["spec"]["containers"].take())
}

/// The path of the root.
fn root(environment: &Environment) -> String {
    let operator = environment.observer.operator();
    format!("{}/{}", configs(operator.namespace), operator.name)
}
