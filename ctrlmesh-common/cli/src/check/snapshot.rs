//! What checks go by: everything that was read of a cluster.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{ManagerState, ShardingConfig};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::DynamicObject;

use super::dry_run::DryRun;
use super::right::Right;
use crate::cluster::answer::Answer;

/// What was read before and after an installation.
pub(super) struct Snapshot {
    pub(super) server: Server,
    /// Resources of `admissionregistration.k8s.io/v1`.
    pub(super) admission: Answer<BTreeSet<String>>,
    pub(super) nodes: Answer<Vec<Node>>,
    /// The Leases that kubelets renew.
    pub(super) node_leases: Answer<Vec<Lease>>,
    /// What the user may do, of what this program or an installation needs.
    pub(super) rights: Vec<(Right, Answer<bool>)>,
}

/// The API server's answer to a request for its version.
pub(super) struct Server {
    pub(super) url: String,
    /// As `v1.36.1`.
    pub(super) version: String,
    /// When this program asked, and had the answer, by its own clock.
    pub(super) asked: Timestamp,
    pub(super) answered: Timestamp,
    /// Header `Date` of the answer, in whole seconds. `None`: it has none.
    pub(super) date: Option<Timestamp>,
}

/// What was read of an installation.
pub(super) struct Installed {
    /// Those of our group that exist, by their name.
    pub(super) definitions: BTreeMap<String, Answer<Option<CustomResourceDefinition>>>,
    pub(super) deployment: Answer<Option<Deployment>>,
    pub(super) managers: Answer<Vec<Pod>>,
    pub(super) lease: Answer<Option<Lease>>,
    pub(super) manager_state: Answer<Option<ManagerState>>,
    pub(super) daemon_set: Answer<Option<DaemonSet>>,
    pub(super) node_proxies: Answer<Vec<Pod>>,
    pub(super) webhooks: Webhooks,
    /// Accounts, roles and bindings, in the order of [`super::expected::rights`].
    pub(super) roles: Vec<Answer<Option<DynamicObject>>>,
    pub(super) configs: Answer<Vec<ShardingConfig>>,
    pub(super) enrolled: Answer<Vec<Pod>>,
    pub(super) trust_bundle: Answer<Option<ConfigMap>>,
}

/// How the API server asks the managers.
pub(super) struct Webhooks {
    pub(super) validating: Answer<Option<ValidatingWebhookConfiguration>>,
    pub(super) mutating: Answer<Option<MutatingWebhookConfiguration>>,
    pub(super) labelling: Answer<Option<MutatingWebhookConfiguration>>,
    /// Of the managers' Service.
    pub(super) slices: Answer<Vec<EndpointSlice>>,
    /// The namespace of the dry runs.
    pub(super) namespace: String,
    /// Creation of an object of ours that is valid, and of one that only the managers refuse.
    pub(super) valid: DryRun,
    pub(super) invalid: DryRun,
    /// Creation of an enrolled pod.
    pub(super) pod: DryRun,
}

#[cfg(test)]
pub(super) mod samples;
