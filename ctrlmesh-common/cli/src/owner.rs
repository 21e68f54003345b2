//! `ctrlmesh owner`: shows which shard an object belongs to, and who works for that shard.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
pub(crate) mod resource;
pub(crate) mod object;
pub(crate) mod alone;
pub(crate) mod owners;
mod render;

use std::io;
use std::io::{Write as _, stderr, stdout};

use ctrlmesh_common::api::ShardingConfig;
use jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use kube::core::{ApiResource, ObjectMeta};
use kube::{Api, Client};

pub(crate) use self::args::Arguments;
use self::object::Object;
use self::owners::Owners;
use self::resource::{FoundResource, Meanings};
use crate::cluster::labelling::{LabellingError, labelling};
use crate::cluster::{self, ClusterError, Connection, paging};
use crate::text::{self, Document, DocumentError};

/// Kind of the document about the owners of an object.
const KIND: &str = "Owner";

/// Why an owner cannot be shown, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnerError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("ask the API server which resources it has (does `kubectl api-resources` work?)")]
    Discovery(#[source] kube::Error),
    #[error("the API server has no resource {word:?}: `kubectl api-resources` lists them")]
    NoSuchResource { word: String },
    #[error("read {resource} {name:?} (does `kubectl get {resource} {name}` work?)")]
    Object { resource: String, name: String, source: kube::Error },
    #[error(
        "there are no {resource} with the name {name:?}{}",
        namespace.as_ref().map_or_else(String::new, |it| format!(" in namespace {it:?}; --namespace names another one"))
    )]
    NoSuchObject { resource: String, name: String, namespace: Option<String> },
    #[error("read the ShardingConfigs of all namespaces (does `kubectl get shardingconfigs -A` work?)")]
    Roots(#[source] kube::Error),
    #[error(transparent)]
    Labelling(#[from] LabellingError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), OwnerError> {
    let owners = cluster::block_on(find(arguments))?;
    let printed = match arguments.output {
        Some(format) => text::document(format, &Document::new(KIND, &owners))?,
        None => render::screen(&owners, Timestamp::now()),
    };
    Ok(write!(stdout().lock(), "{printed}")?)
}

async fn find(arguments: &Arguments) -> Result<Owners, OwnerError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let resource = resource(&client, &arguments.resource).await?;
    let namespace = resource.namespaced.then_some(namespace);
    let (name, metadata) =
        (arguments.name.clone(), metadata(&client, &resource, namespace.as_deref(), &arguments.name));
    let labels = metadata.await?.labels.unwrap_or_default();
    let ApiResource { group, plural, .. } = resource.api;
    let object = Object { group, resource: plural, namespace, name, labels };
    Ok(owners::owners(object, &configs(&client).await?, &labelling(&client).await?))
}

/// The resource that `word` means. Warns where it may mean others.
///
/// # Errors
/// The API server does not say what it has, or has no such resource.
pub(crate) async fn resource(client: &Client, word: &str) -> Result<FoundResource, OwnerError> {
    let found = resource::find(client, word).await.map_err(OwnerError::Discovery)?;
    let Meanings { first, others } = found.ok_or_else(|| OwnerError::NoSuchResource { word: word.to_owned() })?;
    if !others.is_empty() {
        let dot = if first.api.group.is_empty() { "" } else { "." };
        let (plural, group) = (&first.api.plural, &first.api.group);
        let others = others.join(", ");
        writeln!(stderr(), "Warning: {word:?} is taken as {plural}{dot}{group}; it could also be {others}")?;
    }
    Ok(first)
}

/// The metadata of an object. `namespace` is that of an object which is in one.
///
/// # Errors
/// It cannot be read, or is not there.
pub(crate) async fn metadata(
    client: &Client,
    resource: &FoundResource,
    namespace: Option<&str>,
    name: &str,
) -> Result<ObjectMeta, OwnerError> {
    let objects: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource.api),
        None => Api::all_with(client.clone(), &resource.api),
    };
    let (plural, name) = (resource.api.plural.clone(), name.to_owned());
    match objects.get_metadata_opt(&name).await {
        Ok(Some(object)) => Ok(object.metadata),
        Ok(None) => Err(OwnerError::NoSuchObject { resource: plural, name, namespace: namespace.map(str::to_owned) }),
        Err(source) => Err(OwnerError::Object { resource: plural, name, source }),
    }
}

/// The ShardingConfigs of all namespaces.
///
/// # Errors
/// They cannot be read.
pub(crate) async fn configs(client: &Client) -> Result<Vec<ShardingConfig>, OwnerError> {
    let configs: Api<ShardingConfig> = Api::all(client.clone());
    paging::list(&configs, ListParams::default()).await.map_err(OwnerError::Roots)
}
