//! The cached state at one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;

use crate::cluster::plan::Changed;
use crate::cluster::served_resources::ServedResources;
use crate::rules::balance::RootLoads;
use crate::rules::breaker::Breaker;
use crate::rules::compile::World;
use crate::rules::evidence::Evidences;
use crate::rules::injection::Injection;
use crate::rules::label_scheme::Scheme;
use crate::rules::object_name::namespace;
use crate::rules::pod::Member;
use crate::rules::shared::{Shared, each};

/// The cached state at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Sorted by namespace and name.
    pub configs: Vec<Shared<ShardingConfig>>,
    /// Sorted in the same way.
    pub breakers: Vec<Breaker>,
    /// Sorted in the same way.
    pub injections: Vec<Injection>,
    /// Enrolled pods, sorted by namespace and name.
    pub members: Vec<Shared<Member>>,
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
    pub unenrolled: BTreeMap<String, Vec<Shared<Member>>>,
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

/// What a snapshot has in some namespaces.
#[derive(Debug, Default)]
pub struct SnapshotPart {
    configs: Vec<Shared<ShardingConfig>>,
    breakers: Vec<Breaker>,
    injections: Vec<Injection>,
    members: Vec<Shared<Member>>,
}

impl SnapshotPart {
    /// The world of these namespaces alone.
    pub fn world<'a>(&'a self, whole: World<'a>) -> World<'a> {
        World {
            configs: &self.configs,
            breakers: &self.breakers,
            injections: &self.injections,
            members: &self.members,
            ..whole
        }
    }
}

impl Snapshot {
    /// The namespaces with something that policies follow from.
    pub fn all_namespaces(&self) -> BTreeSet<String> {
        let configs = self.configs.iter().map(|config| namespace(&config.metadata));
        let breakers = self.breakers.iter().map(|breaker| breaker.selection.namespace.as_str());
        let injections = self.injections.iter().map(|injection| injection.selection.namespace.as_str());
        let members = self.members.iter().map(|pod| pod.name.namespace.as_str());
        configs.chain(breakers).chain(injections).chain(members).map(str::to_owned).collect()
    }

    pub fn part(&self, namespaces: &BTreeSet<String>) -> SnapshotPart {
        fn within<'a, T: Clone>(all: &'a [T], is_within: impl Fn(&&'a T) -> bool) -> Vec<T> {
            all.iter().filter(is_within).cloned().collect()
        }
        let is_within = |namespace: &str| namespaces.contains(namespace);
        SnapshotPart {
            configs: within(&self.configs, |config| is_within(namespace(&config.metadata))),
            breakers: within(&self.breakers, |breaker| is_within(&breaker.selection.namespace)),
            injections: within(&self.injections, |injection| is_within(&injection.selection.namespace)),
            members: within(&self.members, |pod| is_within(&pod.name.namespace)),
        }
    }

    /// The ShardingConfigs in these namespaces.
    pub fn configs_in<'a>(&'a self, within: &Changed) -> impl Iterator<Item = &'a ShardingConfig> {
        each(&self.configs).filter(|config| within.has(namespace(&config.metadata)))
    }

    /// The roots among them.
    pub fn roots_in<'a>(&'a self, within: &Changed) -> impl Iterator<Item = &'a ShardingConfig> {
        self.configs_in(within).filter(|config| config.spec.root.is_some())
    }

    /// The enrolled pods of a namespace.
    pub fn members_in(&self, namespace: &str) -> &[Shared<Member>] {
        debug_assert!(self.members.is_sorted_by_key(|pod| &pod.name), "pods of a snapshot that are in no order");
        let from = self.members.partition_point(|pod| *pod.name.namespace < *namespace);
        let rest = self.members.get(from..).unwrap_or_default();
        let count = rest.partition_point(|pod| pod.name.namespace == namespace);
        rest.get(..count).unwrap_or_default()
    }

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
            members: manifests.pods.iter().map(|pod| Member::from(pod).into()).collect(),
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
