//! The resources of `ctrlmesh.kusionstack.io/v1alpha1`, as users write and read them.
//!
//! The kinds and fields are the predecessors', so that their manifests apply unchanged. What the schema can check is
//! checked in the API server (OpenAPI bounds and CEL); what it cannot see is `ctrlmesh-manager`'s admission.
//! Every doc comment here becomes `kubectl explain`.
#![expect(unreachable_pub, reason = "`KubeSchema` repeats each type inside a function")]

mod rules;
mod condition;
mod duration;
mod label_selector;
mod target_status;
mod circuit_breaker;
mod fault_injection;
mod manager_state;
mod webhook;
mod rollout;
mod sharding_config;
mod strict;
mod yaml;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

pub use circuit_breaker::*;
pub use condition::is_problem;
pub use duration::parse_duration;
pub use fault_injection::*;
pub use label_selector::{Expression, LabelSelector, SelectorOperator};
pub use manager_state::*;
pub use rollout::*;
pub use sharding_config::*;
pub use target_status::TargetStatus;
pub use webhook::*;
pub use yaml::{ReadError, documents, read_sharding_configs};

/// The definitions of all our resources, as they are installed into a cluster.
pub fn definitions() -> [CustomResourceDefinition; 4] {
    [ShardingConfig::crd(), CircuitBreaker::crd(), FaultInjection::crd(), ManagerState::crd()]
}

#[cfg(test)]
mod tests;
