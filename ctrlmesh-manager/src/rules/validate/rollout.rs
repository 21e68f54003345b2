//! Validates rollouts.

use std::time::Duration;

use ctrlmesh_common::api::{FenceMode, MANUAL, Rollout, RolloutMetric, RolloutStep, Root, parse_duration};

use super::Report;
use crate::rules::metric::{Address, Placeholders, Range};

/// How long an `interval` may be.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(10), Duration::from_mins(10));

pub(super) fn check(root: &Root, report: &mut Report) {
    let Some(rollout) = &root.rollout else { return };
    if root.fence_mode() == FenceMode::Off {
        report.error(
            "spec.root.rollout",
            "needs fence Server or Proxy; without a fence, what moves could have two writers",
        );
    }
    let last = rollout.steps.len().saturating_sub(1);
    for (at, step) in rollout.steps.iter().enumerate() {
        let field = format!("spec.root.rollout.steps[{at}]");
        check_step(&field, step, at == last, report);
        if step.shadow && at > 0 {
            report.error(format!("{field}.shadow"), "only the first step may say shadow");
        }
    }
    check_analysis(rollout, report);
}

fn check_step(field: &str, step: &RolloutStep, is_last: bool, report: &mut Report) {
    if step.slots.is_some() && step.percent.is_some() {
        report.error(format!("{field}.slots"), "at most one of slots and percent is allowed");
    }
    if step.slots.is_none() && step.percent.is_none() && step.namespaces.is_empty() {
        let message = "one of slots, percent and namespaces is required; the new version would own nothing";
        report.error(format!("{field}.slots"), message);
    }
    if step.is_everything() && !is_last {
        report.error(format!("{field}.percent"), "only the last step may say 100 percent");
    }
    if step.shadow && step.is_everything() {
        let message = "is not allowed with 100 percent, where nobody else would own anything";
        report.error(format!("{field}.shadow"), message);
    }
    let pause = step.pause.as_deref().filter(|pause| *pause != MANUAL);
    if pause.is_some_and(|pause| parse_duration(pause).is_none_or(|pause| pause.is_zero())) {
        let message = "must be Manual, or a duration greater than zero, such as 90s or 10m";
        report.error(format!("{field}.pause"), message);
    }
}

fn check_analysis(rollout: &Rollout, report: &mut Report) {
    let interval = rollout.analysis.as_ref().and_then(|analysis| analysis.interval.as_deref());
    let (shortest, longest) = INTERVAL;
    let is_wrong = |text: &str| parse_duration(text).is_none_or(|interval| interval < shortest || interval > longest);
    if interval.is_some_and(is_wrong) {
        report.error("spec.root.rollout.analysis.interval", "must be a duration from 10s to 10m");
    }
    for (at, metric) in rollout.metrics().iter().enumerate() {
        check_metric(&format!("spec.root.rollout.analysis.metrics[{at}]"), metric, report);
    }
}

fn check_metric(field: &str, metric: &RolloutMetric, report: &mut Report) {
    let prometheus = &metric.provider.prometheus;
    if Address::parse(&prometheus.address).is_none() {
        let message =
            "must be an http URL without user, query and fragment, such as http://prometheus.monitoring.svc:9090";
        report.error(format!("{field}.provider.prometheus.address"), message);
    }
    if let Err(unknown) = Placeholders::default().render(&prometheus.query) {
        report.error(format!("{field}.provider.prometheus.query"), unknown.to_string());
    }
    match Range::parse(&metric.threshold_range) {
        Some(Range { min: None, max: None }) => {
            report.error(format!("{field}.thresholdRange.min"), "at least one of min and max is required");
        }
        Some(Range { min: Some(min), max: Some(max) }) if min > max => {
            report.error(format!("{field}.thresholdRange.min"), "must not be greater than max");
        }
        // The schema refuses what is no number.
        Some(_) | None => {}
    }
}
