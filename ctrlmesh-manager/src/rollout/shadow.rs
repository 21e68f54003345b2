//! Adds up what the pods of a version on trial would have written.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{ShadowDifference, ShadowReport, Trial};
use ctrlmesh_common::wire::{MAX_SHADOW_DIFFERENCES, Shadow};

use crate::push::policy_store::PodTraffic;
use crate::rules::pod::PodName;
use crate::rules::rollout::Workload;

/// What the pods of `trial` have reported; `None` where it is no shadow.
pub(super) fn report(
    workload: &Workload<'_>,
    trial: &Trial,
    traffic: &BTreeMap<PodName, PodTraffic>,
) -> Option<ShadowReport> {
    let mut report = ShadowReport { revision: trial.revision.clone(), ..ShadowReport::default() };
    for pod in workload.pods.iter().filter(|pod| trial.shadow && workload.is_on_trial(pod)) {
        let known = traffic.get(&pod.name).filter(|known| known.uid == pod.uid);
        if let Some(shadow) = known.and_then(|known| known.state.shadow.as_ref()) {
            add(&mut report, shadow);
        }
    }
    trial.shadow.then_some(report)
}

fn add(report: &mut ShadowReport, pod: &Shadow) {
    let add = |sum: &mut i64, count: u64| *sum = sum.saturating_add(i64::try_from(count).unwrap_or(i64::MAX));
    add(&mut report.intended, pod.intended);
    add(&mut report.equal, pod.equal);
    add(&mut report.different, pod.different);
    add(&mut report.refused, pod.refused);
    add(&mut report.unknown, pod.unknown);
    let room = MAX_SHADOW_DIFFERENCES.saturating_sub(report.differences.len());
    report.differences.extend(pod.differences.iter().take(room).map(|one| ShadowDifference {
        verb: one.verb.clone(),
        resource: one.resource.clone(),
        namespace: one.namespace.clone(),
        name: one.name.clone(),
        fields: one.fields.clone(),
    }));
}
