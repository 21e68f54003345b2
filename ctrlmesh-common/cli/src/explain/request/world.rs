//! Reads what the manager compiles policies from, of one namespace.

use std::collections::BTreeSet;
use std::sync::Arc;

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ShardingConfig};
use ctrlmesh_manager::cluster::cache::Snapshot;
use ctrlmesh_manager::rules::breaker::Breaker;
use ctrlmesh_manager::rules::injection::Injection;
use ctrlmesh_manager::rules::pod::{self, Member};
use ctrlmesh_manager::rules::shared::{Shared, each};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{ListParams, ObjectMeta};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::cluster::labelling::scheme;
use crate::cluster::paging;
use crate::explain::error::ExplainError;

/// What policies of the pods of one namespace are compiled from.
#[derive(Debug, Default)]
pub(super) struct NamespaceWorld {
    /// As the manager has it. What is proved of moves is not known here, so nothing counts as proved.
    pub(super) snapshot: Snapshot,
    pub(super) breakers: Vec<CircuitBreaker>,
    pods: Vec<Member>,
}

impl NamespaceWorld {
    pub(super) fn new(snapshot: Snapshot, breakers: Vec<CircuitBreaker>, pods: Vec<Member>, namespace: &str) -> Self {
        let all = pods.iter().cloned().map(Shared::from);
        let (members, unenrolled) = all.partition(|pod| pod.wants_proxy());
        let unenrolled = [(namespace.to_owned(), unenrolled)].into();
        let of_pods = breakers.iter().map(Breaker::from).collect();
        Self { snapshot: Snapshot { breakers: of_pods, members, unenrolled, ..snapshot }, breakers, pods }
    }

    /// The pod with this name, enrolled or not.
    pub(super) fn member(&self, name: &str) -> Option<&Member> {
        self.pods.iter().find(|pod| pod.name.name == name)
    }

    /// The ShardingConfig with this `NAMESPACE/NAME`.
    pub(super) fn config(&self, full_name: &str) -> Option<&ShardingConfig> {
        let is_it = |config: &&ShardingConfig| {
            full_name.split_once('/') == Some((&config.namespace().unwrap_or_default(), &config.name_any()))
        };
        each(&self.snapshot.configs).find(is_it)
    }
}

/// # Errors
/// What the user may not read.
pub(super) async fn read(client: &Client, namespace: &str) -> Result<NamespaceWorld, ExplainError> {
    let configs: Vec<ShardingConfig> = list(client, namespace, "shardingconfigs").await?;
    let breakers: Vec<CircuitBreaker> = list(client, namespace, "circuitbreakers").await?;
    let injections: Vec<FaultInjection> = list(client, namespace, "faultinjections").await?;
    let pods: Vec<Pod> = list(client, namespace, "pods").await?;
    let sets: Vec<StatefulSet> = list(client, namespace, "statefulsets").await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let failed = |source| ExplainError::Read { kind: "namespaces", place: "the cluster".to_owned(), source };
    let mut names = BTreeSet::new();
    let each = |namespace: &ObjectMeta| names.extend(namespace.name.clone());
    paging::each_metadata(&namespaces, ListParams::default(), each).await.map_err(failed)?;
    let snapshot = Snapshot {
        configs: configs.into_iter().map(Shared::from).collect(),
        injections: injections.iter().map(Injection::from).collect(),
        namespaces: names,
        first_ordinals: sets.iter().map(pod::first_ordinal).collect(),
        scheme: Arc::new(scheme(client).await?),
        ..Snapshot::default()
    };
    Ok(NamespaceWorld::new(snapshot, breakers, pods.iter().map(Member::from).collect(), namespace))
}

async fn list<K>(client: &Client, namespace: &str, kind: &'static str) -> Result<Vec<K>, ExplainError>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let place = format!("namespace {namespace:?}");
    let failed = |source| ExplainError::Read { kind, place, source };
    paging::list(&api, ListParams::default()).await.map_err(failed)
}
