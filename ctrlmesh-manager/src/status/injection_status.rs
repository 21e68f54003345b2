//! Computes the status of a FaultInjection from what the proxies acknowledge.

use ctrlmesh_common::api::{FaultInjection, FaultInjectionStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::cluster::cache::{Cache, CachedInjection};
use crate::rules::injection::Injection;
use crate::status::cluster_writer::EventNote;
use crate::status::finding::condition;
use crate::status::interception::{not_intercepted, path_not_visible};
use crate::status::rules_writer::RulesKind;
use crate::status::targets::{self, MAX_PODS, Observed};

impl RulesKind for FaultInjection {
    type Read = Injection;

    fn cached(cache: &Cache) -> Vec<CachedInjection> {
        cache.injections()
    }

    fn counts_objects(_: &Injection) -> bool {
        false
    }

    fn set_written(status: &mut FaultInjectionStatus, at: Time) {
        status.last_updated_time = Some(at);
    }

    /// Everything but the time of the write.
    fn compute(cached: &CachedInjection, observed: Observed<'_>) -> FaultInjectionStatus {
        let CachedInjection { object, read } = cached;
        let nothing = FaultInjectionStatus::default();
        let before = object.status.as_ref().unwrap_or(&nothing);
        let hash = read.selection.selector.as_ref().map(|_| targets::hash(&read.faults));
        let is_planned = observed.plan.snapshot.injections.contains(read);
        let targets = observed.targets(&read.selection, is_planned, &before.target_status);
        let programmed = targets::obstacle(&read.selection, &targets, observed.plan);
        let outside = || not_intercepted("faults of requests to other servers", &targets);
        let programmed = programmed.or_else(|| if read.ports.is_empty() { None } else { outside() });
        let programmed = programmed.unwrap_or_else(|| targets::acknowledged(&targets, hash.as_ref()));
        let (generation, known) = (object.metadata.generation, &before.conditions);
        let conditions = [("Accepted", targets::accepted(&read.selection)), ("Programmed", programmed)];
        let hidden = "paths, methods and headers of fault";
        let path_not_visible = path_not_visible(hidden, &read.hidden, "port 80 is taken for HTTP in the clear");
        let conditions = conditions.into_iter().chain(path_not_visible.map(|finding| ("PathNotVisible", finding)));
        let conditions = conditions.map(|(kind, finding)| condition(kind, finding, generation, known, observed.now));
        FaultInjectionStatus {
            observed_generation: generation,
            last_updated_time: before.last_updated_time.clone(),
            current_spec_hash: hash.clone(),
            conditions: conditions.collect(),
            target_status: targets.iter().take(MAX_PODS).map(|target| target.status(hash.as_ref())).collect(),
        }
    }

    fn differ_in_counts_only(_before: &FaultInjectionStatus, _after: &FaultInjectionStatus) -> bool {
        false
    }

    fn events(_before: &FaultInjectionStatus, _after: &FaultInjectionStatus) -> Vec<EventNote> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
