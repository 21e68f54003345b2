//! How a new version of an operator is tried before it owns everything: `spec.root.rollout`, and its status.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{parse_duration, rules};

mod metric;

pub use metric::*;

/// The `pause` of a step that waits for somebody to promote it.
pub const MANUAL: &str = "Manual";

/// How long a step lasts that does not say so.
pub const DEFAULT_PAUSE: Duration = Duration::from_mins(5);

/// The `interval` of an analysis that does not say so.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(30);

/// The `failureLimit` of an analysis that does not say so.
pub const DEFAULT_FAILURE_LIMIT: i32 = 1;

/// How a new version of the operator earns its objects, step by step. The workload is changed as always, such as with
/// `kubectl set image`. Its new pods are not Ready before they are promoted, so that the workload's own rollout waits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// What the new version owns at each step. In the last step it takes over everything, pod by pod; where the last
    /// step does not say 100 percent, such a step follows. Absent or empty: 1 slot, 25 percent, 100 percent, each for
    /// 5 minutes. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub steps: Vec<RolloutStep>,
    /// How the new version is compared with the old one. Absent: every 30 s, and the second check that fails in one
    /// step ends the trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub analysis: Option<RolloutAnalysis>,
    /// What follows when a new version fails. In any case all that it owns goes back to the old one at once. Absent:
    /// `Rollback`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<OnFailure>,
}

/// One step of a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.slots) && has(self.percent))")
        .message("slots: at most one of slots and percent is allowed"),
    validation = Rule::new("has(self.slots) || has(self.percent) || has(self.namespaces) && size(self.namespaces) > 0")
        .message("slots: one of slots, percent and namespaces is required; the new version would own nothing"),
    validation = Rule::new("!(has(self.shadow) && self.shadow && has(self.percent) && self.percent == 100)")
        .message("shadow: is not allowed with 100 percent, where nobody else would own anything")
)]
pub struct RolloutStep {
    /// How many of the 32 slots the new version owns, 1 to 31. Absent where `percent` is there, or where `namespaces`
    /// is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31))]
    pub slots: Option<i32>,
    /// How many percent of the slots it owns, rounded up to whole slots, 1 to 100. With 100 it takes over everything,
    /// pod by pod; only the last step may say so. Absent where `slots` is there, or where `namespaces` is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub percent: Option<i32>,
    /// Namespaces that it owns besides, whatever their slot. Later steps keep them. Absent or empty: none. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")), extend("x-kubernetes-list-type" = "set"))]
    pub namespaces: Vec<String>,
    /// Whether the new version owns nothing in this step: it reads the objects that it would own, and what it writes is
    /// a dry run. Nothing moves, and nothing of what it does is stored. The status says how its writes compare with
    /// those of the old version. Only the first step may say so, and not with 100 percent. Absent: no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shadow: bool,
    /// How long the step lasts, such as 90s or 10m, or `Manual`: until somebody promotes the new version. A step never
    /// ends well without a check that passed, and a check that fails begins the pause anew. Absent: 5m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == 'Manual' || self.matches('^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$') && duration(self) > duration('0s')")
        .message("must be Manual, or a duration greater than zero, such as 90s or 10m"))]
    #[schemars(length(max = 32))]
    pub pause: Option<String>,
}

/// How the new version is compared with the old one: by the requests that the proxies see of both in the same time, and
/// by metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutAnalysis {
    /// How often both are compared, 10s to 10m: each check goes by what was seen since the last one. Absent: 30s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(rules::ANALYSIS_INTERVAL).message(rules::ANALYSIS_INTERVAL_MESSAGE))]
    #[schemars(length(max = 32))]
    pub interval: Option<String>,
    /// How many failed checks of one step are put up with, 0 to 100. Absent: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub failure_limit: Option<i32>,
    /// Metrics that have to be in their range at each check, besides. A check is inconclusive where one of them cannot
    /// be had. Absent or empty: none. At most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub metrics: Vec<RolloutMetric>,
}

/// What follows when a new version fails. `Rollback`: the workload gets back the pod template of the promoted version,
/// as by `kubectl rollout undo`, and the failed one is not tried again. `Hold`: the workload stays as it is, and its
/// new pods own nothing, until somebody decides. Default `Rollback`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnFailure {
    /// The workload gets back the promoted template.
    #[default]
    Rollback,
    /// The workload stays as it is.
    Hold,
}

/// How the versions of an operator stand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// The revision that owns whatever no trial owns: of a Deployment the value of `pod-template-hash`, of a
    /// StatefulSet that of `controller-revision-hash`. Empty while the root tries no versions.
    #[schemars(length(max = 253))]
    pub promoted: String,
    /// Whether its pods are of the shards with the second names, such as `web-1-second`. Each promotion changes it.
    /// Default false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub second: bool,
    /// The revision that is tried. Absent: none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<Trial>,
    /// Revisions that failed, the newest first. Absent or empty: none has. At most 5.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5), extend("x-kubernetes-list-type" = "atomic"))]
    pub rejected: Vec<RejectedRevision>,
    /// What a revision would have written in a step with `shadow`. Absent: none has been in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowReport>,
    /// The last checks, the newest first. Absent or empty: there was none. At most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "atomic"))]
    pub checks: Vec<RolloutCheck>,
    /// The value of the annotation `ctrlmesh.kusionstack.io/rollout` that was carried out last. Absent: none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub handled: Option<String>,
}

/// A revision that is tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trial {
    /// The revision.
    #[schemars(length(max = 253))]
    pub revision: String,
    /// What happens to it.
    pub phase: TrialPhase,
    /// The step, from 1 to 17.
    #[schemars(range(min = 1, max = 17))]
    pub step: i32,
    /// Whether it owns nothing in this step, and its writes are dry runs. Default false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shadow: bool,
    /// The slots that it owns in this step, or reads where it owns nothing, "0" to "31". Absent or empty: none. At most
    /// 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 2), regex(pattern = rules::SLOT)), extend("x-kubernetes-list-type" = "set"))]
    pub slots: Vec<String>,
    /// The namespaces that it owns besides, or reads. Absent or empty: none. At most 2048.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2048), inner(length(max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub namespaces: Vec<String>,
    /// When the step began, or last failed a check: from then on its pause counts.
    pub step_started_at: Time,
    /// The checks of this step that passed.
    #[schemars(range(min = 0))]
    pub passed: i32,
    /// The checks of this step that failed.
    #[schemars(range(min = 0))]
    pub failed: i32,
    /// Since when no pod of the promoted revision has been there. Absent: there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alone_since: Option<Time>,
    /// Why it is in this phase. Absent or empty: nothing is to be said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 4096))]
    pub message: String,
}

/// What a revision would have written in a step with `shadow`, compared with what there is 10 s later at the latest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShadowReport {
    /// The revision.
    #[schemars(length(max = 253))]
    pub revision: String,
    /// The writes that it meant, without those of its leader-election lock and of events. They are the sum of the
    /// following numbers, and of writes that are being compared.
    #[schemars(range(min = 0))]
    pub intended: i64,
    /// Those after which the object is as it meant it: the old version has written the same, or it was so before.
    #[schemars(range(min = 0))]
    pub equal: i64,
    /// Those after which the object is not as it meant it.
    #[schemars(range(min = 0))]
    pub different: i64,
    /// Those that the API server refused, other than as a conflict.
    #[schemars(range(min = 0))]
    pub refused: i64,
    /// Those of which it is not known, such as those that came too late and conflicted.
    #[schemars(range(min = 0))]
    pub unknown: i64,
    /// Objects that are not as it meant them. Absent or empty: none. At most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), extend("x-kubernetes-list-type" = "atomic"))]
    pub differences: Vec<ShadowDifference>,
}

/// An object that is not as a revision meant it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShadowDifference {
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    #[schemars(length(max = 32))]
    pub verb: String,
    /// The resource with its API group, and the subresource if there is one, such as `deployments.apps/status`.
    #[schemars(length(max = 512))]
    pub resource: String,
    /// Its namespace. Absent or empty: it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub namespace: String,
    /// Its name. Absent or empty: several objects are meant.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub name: String,
    /// Each field that differs, with what it is and what it was meant to be. Values that may be secret are left out.
    /// Absent or empty: the object was to be deleted. At most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), inner(length(max = 512)), extend("x-kubernetes-list-type" = "atomic"))]
    pub fields: Vec<String>,
}

/// What happens to a revision that is tried. `Starting`: its pods do not run yet. `Analysing`: it owns the slots of its
/// step, or shadows them, and is compared. `Waiting`: its step passed, and waits for somebody to promote it.
/// `Promoting`: it takes over everything, pod by pod. `Held`: it failed, owns nothing, and stays. `RollingBack`: it
/// failed, owns nothing, and its pods are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrialPhase {
    /// Its pods do not run yet.
    Starting,
    /// It owns the slots of its step.
    Analysing,
    /// It waits to be promoted.
    Waiting,
    /// It takes over everything.
    Promoting,
    /// It failed, and stays.
    Held,
    /// It failed, and its pods are replaced.
    RollingBack,
}

/// A revision that failed. It gets nothing until somebody promotes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RejectedRevision {
    /// The revision.
    #[schemars(length(max = 253))]
    pub revision: String,
    /// Why.
    #[schemars(length(max = 4096))]
    pub message: String,
    /// When.
    pub at: Time,
}

/// A comparison of the revision that is tried with the promoted one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutCheck {
    /// The revision that is tried.
    #[schemars(length(max = 253))]
    pub revision: String,
    /// The step, from 1 to 17.
    #[schemars(range(min = 1, max = 17))]
    pub step: i32,
    /// What came of it.
    pub verdict: CheckVerdict,
    /// The numbers of both, and each metric with its value.
    #[schemars(length(max = 4096))]
    pub message: String,
    /// When.
    pub at: Time,
}

/// What came of a check. `Inconclusive`: there was too little to compare, or a metric could not be had, which is no
/// success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CheckVerdict {
    /// The new version is no worse, and its metrics are in their ranges.
    Passed,
    /// It is worse, or one of its metrics is out of its range.
    Failed,
    /// There was too little to compare, or a metric could not be had.
    Inconclusive,
}

impl ShadowReport {
    /// In one sentence.
    pub fn summary(&self) -> String {
        let Self { intended, equal, different, refused, unknown, .. } = self;
        let being_compared = intended - equal - different - refused - unknown;
        let others = [(*refused, "refused"), (*unknown, "unknown"), (being_compared, "being compared")];
        let others =
            others.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!(", {count} {what}"));
        format!("of {intended} intended writes {equal} equal, {different} different{}", others.collect::<String>())
    }
}

impl RolloutStep {
    /// How long it lasts; `None`: until somebody promotes the new version.
    pub fn pause(&self) -> Option<Duration> {
        match self.pause.as_deref() {
            Some(MANUAL) => None,
            pause => Some(pause.and_then(parse_duration).unwrap_or(DEFAULT_PAUSE)),
        }
    }

    /// Whether the new version takes over everything.
    pub fn is_everything(&self) -> bool {
        self.percent == Some(100)
    }
}

impl Rollout {
    /// The steps, with the last one, which is everything.
    pub fn steps(&self) -> Vec<RolloutStep> {
        let slots = RolloutStep { slots: Some(1), ..RolloutStep::default() };
        let percent = |percent| RolloutStep { percent: Some(percent), ..RolloutStep::default() };
        if self.steps.is_empty() {
            return vec![slots, percent(25), percent(100)];
        }
        let mut steps = self.steps.clone();
        if !steps.last().is_some_and(RolloutStep::is_everything) {
            steps.push(percent(100));
        }
        steps
    }

    /// How long a new version works on a part at least: the pauses of all steps but the last. `None`: some step lasts
    /// until somebody promotes it.
    pub fn lasts(&self) -> Option<Duration> {
        let steps = self.steps();
        let parts = steps.iter().filter(|step| !step.is_everything());
        parts.map(RolloutStep::pause).try_fold(Duration::ZERO, |all, pause| Some(all.saturating_add(pause?)))
    }

    /// How often both versions are compared.
    pub fn interval(&self) -> Duration {
        let interval = self.analysis.as_ref().and_then(|analysis| analysis.interval.as_deref());
        interval.and_then(parse_duration).unwrap_or(DEFAULT_INTERVAL)
    }

    /// What each check goes by besides the requests.
    pub fn metrics(&self) -> &[RolloutMetric] {
        self.analysis.as_ref().map_or(&[], |analysis| &analysis.metrics)
    }

    /// How many failed checks of one step are put up with.
    pub fn failure_limit(&self) -> i32 {
        self.analysis.as_ref().and_then(|analysis| analysis.failure_limit).unwrap_or(DEFAULT_FAILURE_LIMIT)
    }
}
