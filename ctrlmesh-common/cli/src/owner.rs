//! `ctrlmesh owner`: shows which shard an object belongs to, and who works for that shard.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
mod resource;
mod object;
mod alone;
mod owners;
mod render;

use std::io;
use std::io::{Write as _, stderr, stdout};

use ctrlmesh_common::api::ShardingConfig;
use jiff::Timestamp;
use kube::Api;
use kube::api::{DynamicObject, ListParams};

pub(crate) use self::args::Arguments;
use self::object::Object;
use self::owners::Owners;
use self::resource::Meanings;
use crate::cluster::labelling::{LabellingError, labelling};
use crate::cluster::{self, ClusterError, Connection};
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
        namespace.as_ref().map_or_else(String::new, |it| format!(" in namespace {it:?}"))
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
    let word = &arguments.resource;
    let found = resource::find(&client, word).await.map_err(OwnerError::Discovery)?;
    let Meanings { first: resource, others } =
        found.ok_or_else(|| OwnerError::NoSuchResource { word: word.clone() })?;
    if !others.is_empty() {
        let dot = if resource.api.group.is_empty() { "" } else { "." };
        let (plural, group) = (&resource.api.plural, &resource.api.group);
        writeln!(
            stderr(),
            "Warning: {word:?} is taken as {plural}{dot}{group}; it could also be {}",
            others.join(", ")
        )?;
    }
    let namespace = resource.namespaced.then_some(namespace);
    let (plural, name) = (resource.api.plural.clone(), arguments.name.clone());
    let objects: Api<DynamicObject> = match &namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource.api),
        None => Api::all_with(client.clone(), &resource.api),
    };
    let read = objects.get_metadata_opt(&name).await;
    let read = read.map_err(|source| OwnerError::Object { resource: plural.clone(), name: name.clone(), source })?;
    let Some(object) = read else {
        return Err(OwnerError::NoSuchObject { resource: plural, name, namespace });
    };
    let labels = object.metadata.labels.unwrap_or_default();
    let object = Object { group: resource.api.group, resource: plural, namespace, name, labels };
    let configs: Api<ShardingConfig> = Api::all(client.clone());
    let configs = configs.list(&ListParams::default()).await.map_err(OwnerError::Roots)?.items;
    Ok(owners::owners(object, &configs, &labelling(&client).await?))
}
