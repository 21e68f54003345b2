//! Reads what a migration goes by, with the rights of the user.

use std::collections::BTreeSet;

use ctrlmesh_common::names::{GROUP, KRIDGE_GROUP, MANAGER_STATE, fake_kubeconfig, label, resource_list};
use kube::api::{DynamicObject, ListParams};
use kube::{Api, Client, Error, ResourceExt};

use super::args::CommonArgs;
use super::error::MigrateError;
use super::object::{
    CONFIG_MAP, DEPLOYMENT, MANAGER_STATE as STATES, MUTATING, NAMESPACE, ObjectRef, POD, Resource, SERVICE,
    VALIDATING, rules,
};
use super::snapshot::{KRIDGE_ENABLE_PROXY, Predecessor, Snapshot, targets};
use super::state::State;
use super::steps::guard;
use crate::cluster::paging;

/// Name of our managers' Deployment.
pub(super) const OUR_MANAGER: &str = "ctrlmesh-manager";

/// HTTP status of an object, or of a kind, that there is not.
const NOT_FOUND: u16 = 404;

/// # Errors
/// The API server does not say it.
pub(super) async fn snapshot(client: &Client, common: &CommonArgs, state: &State) -> Result<Snapshot, MigrateError> {
    let predecessor = common.predecessor(state.predecessor.as_ref())?;
    Box::pin(gather(client, &common.system_namespace, &predecessor)).await
}

async fn gather(client: &Client, system: &str, predecessor: &Predecessor) -> Result<Snapshot, MigrateError> {
    let manager = match &predecessor.deployment {
        Some(name) => get(client, &DEPLOYMENT.named(Some(&predecessor.namespace), name)).await?,
        None => None,
    };
    let mut webhooks = list(client, MUTATING, "").await?;
    webhooks.extend(list(client, VALIDATING, "").await?);
    let (mut ours, mut kridge) = (Vec::new(), Vec::new());
    for (group, all) in [(GROUP, &mut ours), (KRIDGE_GROUP, &mut kridge)] {
        for kind in rules(group) {
            all.extend(list(client, kind, "").await?);
        }
    }
    let mut pods = list(client, POD, &format!("{}=true", label::ENABLE_PROXY)).await?;
    let of_kridge_only = format!("{KRIDGE_ENABLE_PROXY}=true,{}!=true", label::ENABLE_PROXY);
    pods.extend(list(client, POD, &of_kridge_only).await?);
    let mut guard = BTreeSet::new();
    for (object, _) in guard::all() {
        if get(client, &object).await?.is_some() {
            guard.insert(object);
        }
    }
    let kinds = |namespace: &str| CONFIG_MAP.named(Some(namespace), resource_list::NAME);
    let mut snapshot = Snapshot {
        predecessor: predecessor.clone(),
        system: system.to_owned(),
        manager,
        our_manager: get(client, &DEPLOYMENT.named(Some(system), OUR_MANAGER)).await?,
        webhooks,
        services: list_in(client, &predecessor.namespace, SERVICE).await?,
        rules: ours,
        kridge,
        manager_state: get(client, &STATES.named(None, MANAGER_STATE)).await?,
        namespaces: list(client, NAMESPACE, "").await?,
        workloads: Vec::new(),
        pods,
        fake_kubeconfigs: Vec::new(),
        kinds: get(client, &kinds(&predecessor.namespace)).await?,
        has_own_kinds: get(client, &kinds(system)).await?.is_some(),
        guard,
    };
    of_namespaces(client, &mut snapshot).await?;
    Ok(snapshot)
}

/// Reads what is in the namespaces of operators: the targets of roots, and what the predecessor made there.
async fn of_namespaces(client: &Client, snapshot: &mut Snapshot) -> Result<(), MigrateError> {
    let all = snapshot.rules.iter().chain(&snapshot.kridge).chain(&snapshot.pods);
    let namespaces: BTreeSet<String> = all.filter_map(ResourceExt::namespace).collect();
    let roots = snapshot.rules.iter().chain(&snapshot.kridge);
    let targets: BTreeSet<ObjectRef> = roots.flat_map(targets).collect();
    for target in &targets {
        snapshot.workloads.extend(get(client, target).await?);
    }
    for namespace in &namespaces {
        let map = CONFIG_MAP.named(Some(namespace), fake_kubeconfig::NAME);
        snapshot.fake_kubeconfigs.extend(get(client, &map).await?);
    }
    Ok(())
}

/// The object, with its kind. `None`: neither it, nor perhaps its kind, exists.
pub(super) async fn get(client: &Client, object: &ObjectRef) -> Result<Option<DynamicObject>, MigrateError> {
    let found = match object.api(client).get_opt(&object.name).await {
        Err(Error::Api(status)) if status.code == NOT_FOUND => None,
        found => found.map_err(|source| MigrateError::Read { what: object.to_string(), source: Box::new(source) })?,
    };
    Ok(found.map(|found| DynamicObject { types: Some(object.types()), ..found }))
}

/// Objects of the kind in the whole cluster. There are none of a kind that the API server does not have.
pub(super) async fn list(client: &Client, kind: Resource, labels: &str) -> Result<Vec<DynamicObject>, MigrateError> {
    pages(&Api::all_with(client.clone(), &kind.api_resource()), kind, labels).await
}

/// Objects of the kind in one namespace.
async fn list_in(client: &Client, namespace: &str, kind: Resource) -> Result<Vec<DynamicObject>, MigrateError> {
    pages(&Api::namespaced_with(client.clone(), namespace, &kind.api_resource()), kind, "").await
}

async fn pages(api: &Api<DynamicObject>, kind: Resource, labels: &str) -> Result<Vec<DynamicObject>, MigrateError> {
    let params = ListParams::default();
    let params = if labels.is_empty() { params } else { params.labels(labels) };
    let all = match paging::list(api, params).await {
        Err(Error::Api(status)) if status.code == NOT_FOUND => Vec::new(),
        all => all.map_err(|source| {
            let group = if kind.group.is_empty() { String::new() } else { format!(".{}", kind.group) };
            MigrateError::Read { what: format!("{}{group}", kind.plural), source: Box::new(source) }
        })?,
    };
    // Items of a list do not say of which kind they are.
    Ok(all.into_iter().map(|one| DynamicObject { types: Some(kind.types()), ..one }).collect())
}
