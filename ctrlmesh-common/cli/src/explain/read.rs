//! Reads what an explanation needs beside the owners, as far as the user may.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{self, label};
use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::status::cluster_writer::GRANTED;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::core::ObjectMeta;
use kube::{Api, Client, ResourceExt as _};

use super::object::{Facts, LockHolder, RootFacts};
use crate::cluster::paging;
use crate::failure::causes;
use crate::owner::owners::{Owners, RootOwner};

/// Reads what may be read. What may not is named in the facts.
pub(super) async fn facts(
    client: &Client,
    metadata: &ObjectMeta,
    owners: &Owners,
    configs: &[ShardingConfig],
) -> Facts {
    let mut not_known = Vec::new();
    let namespace_labels = match owners.object.namespace.as_deref().filter(|_| !owners.roots.is_empty()) {
        Some(namespace) => namespace_labels(client, namespace, &mut not_known).await,
        None => None,
    };
    let mut roots = BTreeMap::new();
    for owner in &owners.roots {
        let is_it = |config: &&ShardingConfig| {
            config.namespace().as_deref() == Some(&owner.namespace) && config.name_any() == owner.name
        };
        if let Some(root) = configs.iter().find(is_it) {
            let facts = root_facts(client, root, owner, &mut not_known).await;
            roots.insert((owner.namespace.clone(), owner.name.clone()), facts);
        }
    }
    Facts { managed_fields: metadata.managed_fields.clone().unwrap_or_default(), namespace_labels, roots, not_known }
}

/// The labels of a namespace. `None`: they cannot be read, and `not_known` says why.
pub(super) async fn namespace_labels(client: &Client, name: &str, not_known: &mut Vec<String>) -> Option<Labels> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let read = namespaces.get_metadata(name).await;
    let labels = read.map(|namespace| namespace.metadata.labels.unwrap_or_default());
    or_note(labels, &format!("the labels of namespace {name}"), not_known)
}

async fn root_facts(
    client: &Client,
    root: &ShardingConfig,
    owner: &RootOwner,
    not_known: &mut Vec<String>,
) -> RootFacts {
    let namespace = owner.namespace.as_str();
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let enrolled = ListParams::default().labels(&format!("{}=true", label::ENABLE_PROXY));
    let pods = paging::list(&pods, enrolled).await;
    let pods = or_note(pods, &format!("the pods of namespace {namespace}"), not_known).unwrap_or_default();
    let pods = pods.iter().map(Member::from).filter(|pod| pod.enrolled() && !pod.ended);
    let is_of_target = |pod: &Member| root.spec.root.as_ref().is_some_and(|rule| pod.is_of_target(rule));
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let of_root = format!("regarding.kind=ShardingConfig,regarding.name={},reason={GRANTED}", owner.name);
    let granted = paging::list(&events, ListParams::default().fields(&of_root)).await;
    let granted = or_note(granted, &format!("the events of namespace {namespace}"), not_known);
    RootFacts {
        pods: pods.filter(is_of_target).collect(),
        granted: granted.unwrap_or_default(),
        lock: lock_holder(client, root, owner, not_known).await,
    }
}

/// Who holds the Lease of the owning shard. `None`: the operator has no known lock, or no shard owns the object.
async fn lock_holder(
    client: &Client,
    root: &ShardingConfig,
    owner: &RootOwner,
    not_known: &mut Vec<String>,
) -> Option<LockHolder> {
    let controller = root.spec.controller.as_ref()?;
    let shard = owner.shard.as_ref()?;
    let is_unsharded = shard == UNSHARDED;
    let name = &controller.leader_election_name;
    let name = if is_unsharded { name.clone() } else { names::lock(name, shard) };
    let leases: Api<Lease> = Api::namespaced(client.clone(), &owner.namespace);
    let lease = leases.get_opt(&name).await;
    let spec = or_note(lease, &format!("Lease {}/{name}", owner.namespace), not_known)??.spec.unwrap_or_default();
    let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
    Some(LockHolder { lease: name, holder, renewed: spec.renew_time.map(|time| time.0) })
}

/// Takes what was read. Notes why it was not.
fn or_note<T>(read: kube::Result<T>, what: &str, not_known: &mut Vec<String>) -> Option<T> {
    read.map_err(|error| not_known.push(format!("{what}: {}", causes(&error)))).ok()
}
