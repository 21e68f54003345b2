//! `ctrlmesh explain`: says step by step to whom an object belongs, who may write it, and what becomes of a request.
//!
//! It asks the API server only, with the rights of whoever calls it. It sends no request that it explains.

mod args;
mod error;
mod steps;
mod target;
mod hashing;
mod since;
mod writes;
mod fencing;
mod object;
mod read;
mod render;
mod request;

use std::io::{Write as _, stdout};

use jiff::Timestamp;
use kube::core::ApiResource;
use serde::Serialize;

pub(crate) use self::args::Arguments;
pub(crate) use self::error::ExplainError;
use self::object::Explanation;
use self::request::RequestExplanation;
use self::steps::Step;
use crate::cluster::labelling::labelling;
use crate::cluster::{self, Connection};
use crate::owner;
use crate::owner::object::Object;
use crate::owner::owners::owners;
use crate::text::{self, Document};

/// Kind of the document about an object.
const KIND: &str = "Explanation";

/// Kind of the document about a request.
const REQUEST_KIND: &str = "RequestExplanation";

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), ExplainError> {
    let printed = cluster::block_on(Box::pin(explain(arguments)))?;
    Ok(write!(stdout().lock(), "{printed}")?)
}

async fn explain(arguments: &Arguments) -> Result<String, ExplainError> {
    let connection = Connection::of(&arguments.cluster).await?;
    let format = arguments.output.format();
    if let (Some(pod), Some(verb)) = (&arguments.request.as_pod, arguments.request.verb) {
        let explanation: RequestExplanation = request::explain(&connection, arguments, pod, verb).await?;
        return Ok(match format {
            Some(format) => text::document(format, &Document::new(REQUEST_KIND, &explanation))?,
            None => request::screen(&explanation),
        });
    }
    let name = arguments.name.as_deref().unwrap_or_default();
    let explanation = of_object(&connection, &arguments.resource, name, arguments.for_pod.as_deref()).await?;
    Ok(match format {
        Some(format) => text::document(format, &Document::new(KIND, &explanation))?,
        None => render::screen(&explanation, Timestamp::now()),
    })
}

/// An object, and the steps by which its owner is explained.
#[derive(Debug, Serialize)]
pub(crate) struct Explained {
    object: String,
    steps: Vec<Step>,
}

/// Explains an object of the connection's namespace.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) async fn explained(connection: &Connection, resource: &str, name: &str) -> Result<Explained, ExplainError> {
    let explanation = of_object(connection, resource, name, None).await?;
    Ok(Explained { object: render::title(&explanation), steps: render::all_steps(&explanation, Timestamp::now()) })
}

async fn of_object(
    connection: &Connection,
    resource: &str,
    name: &str,
    for_pod: Option<&str>,
) -> Result<Explanation, ExplainError> {
    let (client, name) = (&connection.client, name.to_owned());
    let resource = owner::resource(client, resource).await?;
    let namespace = resource.namespaced.then(|| connection.namespace.clone());
    let metadata = owner::metadata(client, &resource, namespace.as_deref(), &name).await?;
    let (configs, labelling) = (owner::configs(client).await?, labelling(client).await?);
    let labels = metadata.labels.clone().unwrap_or_default();
    let ApiResource { group, plural, .. } = resource.api;
    let owners = owners(Object { group, resource: plural, namespace, name, labels }, &configs, &labelling);
    let mut facts = read::facts(client, &metadata, &owners, &configs).await;
    if let Some(pod) = for_pod {
        let mut all = facts.roots.iter_mut();
        if !all.any(|(_, root)| root.pods.iter().any(|one| one.name.name == pod)) {
            return Err(ExplainError::NotOfTheWorkload { pod: pod.to_owned() });
        }
        facts.roots.values_mut().for_each(|root| root.pods.retain(|one| one.name.name == pod));
    }
    Ok(object::explanation(owners, &configs, &labelling, facts))
}
