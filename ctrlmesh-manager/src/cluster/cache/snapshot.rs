//! The cached state at one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;

use crate::cluster::served_resources::ServedResources;
use crate::rules::balance::RootLoads;
use crate::rules::breaker::Breaker;
use crate::rules::compile::World;
use crate::rules::evidence::Evidences;
use crate::rules::injection::Injection;
use crate::rules::label_scheme::Scheme;
use crate::rules::pod::Member;

/// The cached state at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Sorted by namespace and name.
    pub configs: Vec<ShardingConfig>,
    /// Sorted in the same way.
    pub breakers: Vec<Breaker>,
    /// Sorted in the same way.
    pub injections: Vec<Injection>,
    /// Enrolled pods, sorted by namespace and name.
    pub members: Vec<Member>,
    pub namespaces: BTreeSet<String>,
    /// By `NAMESPACE/NAME` of the StatefulSet.
    pub first_ordinals: BTreeMap<String, u32>,
    /// The service account in the template, by `NAMESPACE/NAME` of the StatefulSet.
    pub set_accounts: BTreeMap<String, String>,
    /// The same, by `NAMESPACE/NAME` of the Deployment.
    pub deployment_accounts: BTreeMap<String, String>,
    /// Why a StatefulSet cannot hold a new version back, by `NAMESPACE/NAME`. Those that can are not here, nor are
    /// those whose pods do not ask for a proxy.
    pub set_obstacles: BTreeMap<String, String>,
    /// The same of Deployments.
    pub deployment_obstacles: BTreeMap<String, String>,
    /// After how many seconds without progress a Deployment says so, by `NAMESPACE/NAME`, where its pods ask for a
    /// proxy.
    pub progress_deadlines: BTreeMap<String, i32>,
    /// The revision of the template, by `NAMESPACE/NAME` of the StatefulSet, where its pods ask for a proxy.
    pub update_revisions: BTreeMap<String, String>,
    /// By the name of the `RuntimeClass`.
    pub runtime_handlers: BTreeMap<String, String>,
    /// Whose kernel does not let their proxy redirect connections, as that has said.
    pub unfit_nodes: BTreeSet<String>,
    pub served: Arc<ServedResources>,
    /// The list of labelled kinds, as it is in the ConfigMap; `None` until it is known.
    pub listed: Option<String>,
    pub scheme: Arc<Scheme>,
    /// Pods that do not ask for a proxy, by namespace: of namespaces with a root that is fenced.
    pub unenrolled: BTreeMap<String, Vec<Member>>,
    /// UIDs of pods that were seen to end lately.
    pub stopped: BTreeSet<String>,
    /// What is proved about roots that are fenced.
    pub evidence: Arc<Evidences>,
    /// Whether another replica leads. This one plans what stands in the ownership tables.
    pub follows: bool,
    /// UIDs of pods that have come back only just.
    pub held_back: BTreeSet<String>,
    /// UIDs of pods that wait for their lock.
    pub waiting: BTreeSet<String>,
    /// Of roots that are divided by load, where this replica leads.
    pub loads: Arc<RootLoads>,
}

impl Snapshot {
    pub fn world(&self) -> World<'_> {
        World {
            configs: &self.configs,
            breakers: &self.breakers,
            injections: &self.injections,
            members: &self.members,
            namespaces: &self.namespaces,
            first_ordinals: &self.first_ordinals,
            labelling: &self.scheme.in_force,
            unenrolled: &self.unenrolled,
            evidence: &self.evidence,
            leads: !self.follows,
            held_back: &self.held_back,
            waiting: &self.waiting,
            loads: &self.loads,
        }
    }
}

#[cfg(test)]
impl Snapshot {
    /// Leaves the served resources unknown.
    pub(crate) fn of_manifests(text: &str) -> Self {
        let mut manifests = crate::rules::manifest::Manifests::default();
        assert!(manifests.read(text).is_ok(), "{text}");
        Self {
            members: manifests.pods.iter().map(Member::from).collect(),
            unenrolled: manifests.unenrolled(),
            configs: manifests.configs,
            breakers: manifests.breakers,
            injections: manifests.injections,
            namespaces: manifests.namespaces,
            first_ordinals: manifests.first_ordinals,
            ..Self::default()
        }
    }
}
