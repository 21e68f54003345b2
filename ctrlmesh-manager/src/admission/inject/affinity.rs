//! Has the scheduler prefer nodes whose kernel redirects connections, as their node proxies say.
//!
//! It is a preference: where nodes say nothing (`--announce` is off, or ctrlmesh is being installed), a demand would
//! leave pods unscheduled. The audit says which pods no proxy serves.

use ctrlmesh_common::names::label;
use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec, PreferredSchedulingTerm};

use super::Interception;

/// The greatest that Kubernetes takes: a pod on another node is not served at all.
const WEIGHT: i32 = 100;

pub(super) fn apply(spec: &mut PodSpec, interception: Interception) {
    if interception != Interception::Ebpf {
        return;
    }
    let affinity = spec.affinity.get_or_insert_default().node_affinity.get_or_insert_default();
    let terms = affinity.preferred_during_scheduling_ignored_during_execution.get_or_insert_default();
    let ours = preference();
    if !terms.contains(&ours) {
        terms.push(ours);
    }
}

fn preference() -> PreferredSchedulingTerm {
    let says_so = NodeSelectorRequirement {
        key: label::EBPF.to_owned(),
        operator: "In".to_owned(),
        values: Some(vec!["true".to_owned()]),
    };
    let preference = NodeSelectorTerm { match_expressions: Some(vec![says_so]), match_fields: None };
    PreferredSchedulingTerm { weight: WEIGHT, preference }
}
