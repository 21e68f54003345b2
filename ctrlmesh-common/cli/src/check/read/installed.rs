//! Reads what an installation consists of.

use std::collections::BTreeMap;

use ctrlmesh_common::api;
use ctrlmesh_common::names::{MANAGER_STATE, api_server, root_ca};
use ctrlmesh_manager::install::rbac;
use ctrlmesh_manager::labels::POLICY;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ApiResource, DynamicObject, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;

use super::super::checks::asks_about;
use super::super::dry_run::DryRun;
use super::super::snapshot::{Installed, Webhooks};
use super::expected;
use crate::cluster::answer::{self, Answer};
use crate::cluster::resource_name;
use crate::version::part;

/// Of the node proxies.
const DAEMON_SET: &str = "ctrlmesh-node";

/// Reads everything. The dry runs are made in `namespace`.
pub(in super::super) async fn installed(client: &Client, namespace: &str) -> Installed {
    let own = rbac::NAMESPACE;
    let mut definitions = BTreeMap::new();
    for definition in api::definitions() {
        let name = definition.name_any();
        let live = answer::get_global(client, &name).await;
        definitions.insert(name, live);
    }
    let mut roles = Vec::new();
    for wanted in expected::rights() {
        roles.push(role(client, &wanted).await);
    }
    Installed {
        definitions,
        deployment: answer::get(client, own, rbac::ACCOUNT).await,
        managers: answer::list(client, own, part::MANAGERS).await,
        lease: answer::get(client, own, rbac::ACCOUNT).await,
        manager_state: answer::get_global(client, MANAGER_STATE).await,
        daemon_set: answer::get(client, own, DAEMON_SET).await,
        node_proxies: answer::list(client, own, part::NODE_PROXIES).await,
        webhooks: Box::pin(webhooks(client, namespace)).await,
        roles,
        configs: answer::list_all(client, "").await,
        enrolled: answer::list_all(client, &part::enrolled()).await,
        trust_bundle: answer::get(client, own, root_ca::MESH).await,
    }
}

/// An account, a role or a binding.
async fn role(client: &Client, wanted: &DynamicObject) -> Answer<Option<DynamicObject>> {
    let (types, name) = (wanted.types.clone().unwrap_or_default(), wanted.name_any());
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: types.api_version.clone(),
        plural: format!("{}s", types.kind.to_lowercase()),
        kind: types.kind.clone(),
    };
    let right = format!("get {}", resource_name(group, &resource.plural));
    let (api, right): (Api<DynamicObject>, String) = match wanted.namespace() {
        Some(namespace) => {
            let right = format!("{right} in namespace {namespace}");
            (Api::namespaced_with(client.clone(), &namespace, &resource), right)
        }
        None => (Api::all_with(client.clone(), &resource), right),
    };
    answer::found(api.get_opt(&name).await, &right)
}

async fn webhooks(client: &Client, namespace: &str) -> Webhooks {
    let slices = format!("{}={}", api_server::SLICE_LABEL, rbac::ACCOUNT);
    let breaker = |valid| dry_run(client, namespace, expected::breaker(namespace, valid), "circuitbreakers");
    Webhooks {
        validating: answer::get_global(client, rbac::WEBHOOKS).await,
        mutating: answer::get_global(client, rbac::WEBHOOKS).await,
        labelling: answer::get_global(client, POLICY).await,
        slices: answer::list::<EndpointSlice>(client, rbac::NAMESPACE, &slices).await,
        namespace: namespace.to_owned(),
        invalid: breaker(false).await,
        valid: breaker(true).await,
        pod: dry_run(client, namespace, expected::pod(namespace), "pods").await,
    }
}

/// Creates the object in a dry run: the API server does everything but store it.
async fn dry_run(client: &Client, namespace: &str, object: Value, plural: &str) -> DryRun {
    if !asks_about(namespace) {
        return DryRun::NotAsked;
    }
    let text = |field: &str| object[field].as_str().unwrap_or_default().to_owned();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    let resource = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: api_version.clone(),
        kind,
        plural: plural.to_owned(),
    };
    let right = format!("create {} in namespace {namespace}", resource_name(group, plural));
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let object = serde_json::from_value(object).map_err(kube::Error::SerdeError);
    let answer = match object {
        Ok(object) => api.create(&params, &object).await,
        Err(error) => Err(error),
    };
    DryRun::of(&right, answer)
}
