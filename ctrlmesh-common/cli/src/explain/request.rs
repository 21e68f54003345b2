//! Explains what becomes of a request that a pod might send. Nothing is sent but reads.

mod world;
mod classified;
mod policy;
mod breakers;
mod faults;
mod passage;
mod render;

use ctrlmesh_common::member_path::is_word;
use ctrlmesh_common::selector::Labels;
use jiff::Timestamp;

pub(super) use self::passage::RequestExplanation;
use self::passage::{Asking, passage};
pub(super) use self::render::screen;
use super::args::{Arguments, Verb};
use super::error::ExplainError;
use super::read;
use super::target::Asked;
use crate::cluster::Connection;
use crate::failure::causes;
use crate::owner;
use crate::owner::resource::FoundResource;

/// Reads what is needed, and explains.
pub(super) async fn explain(
    connection: &Connection,
    arguments: &Arguments,
    pod: &str,
    verb: Verb,
) -> Result<RequestExplanation, ExplainError> {
    check(arguments, verb)?;
    let client = &connection.client;
    let behind = arguments.request.member_path.as_deref().unwrap_or_default();
    let resource = if behind.is_empty() {
        owner::resource(client, &arguments.resource).await?
    } else {
        // A member may serve what the API server does not.
        let there = Connection::behind(&arguments.cluster, behind).await?;
        let failed = |source| ExplainError::Member { path: behind.to_owned(), source: Box::new(source) };
        owner::resource(&there.client, &arguments.resource).await.map_err(failed)?
    };
    let pod_namespace = arguments.request.as_namespace.as_ref().unwrap_or(&connection.namespace);
    let world = world::read(client, pod_namespace).await?;
    let member = world.member(pod).ok_or_else(|| {
        let (name, namespace) = (pod.to_owned(), pod_namespace.clone());
        ExplainError::NoSuchPod { name, namespace }
    })?;
    let is_named = resource.namespaced && !arguments.request.all_namespaces;
    let namespace = is_named.then_some(connection.namespace.as_str());
    let asked = Asked {
        behind,
        verb,
        api: &resource.api,
        namespace,
        name: arguments.name.as_deref(),
        subresource: arguments.request.subresource.as_deref(),
        labels: arguments.request.selector.as_deref(),
        fields: arguments.request.field_selector.as_deref(),
    };
    let mut not_known = Vec::new();
    let labels = fenced_labels(connection, &resource, &asked, &mut not_known).await;
    let asking = Asking { asked, labels: labels.as_ref(), now: Timestamp::now() };
    let mut explanation = passage(&world, member, &asking);
    explanation.not_known.extend(not_known);
    Ok(explanation)
}

/// The labels by which the API server fences: those of the namespace, or of an object of cluster scope. `None`: they
/// are not known.
async fn fenced_labels(
    connection: &Connection,
    resource: &FoundResource,
    asked: &Asked<'_>,
    not_known: &mut Vec<String>,
) -> Option<Labels> {
    let client = &connection.client;
    // The API server does not fence what a member has.
    if matches!(asked.verb, Verb::Get | Verb::List | Verb::Watch) || !asked.behind.is_empty() {
        return None;
    }
    if let Some(namespace) = asked.namespace {
        return read::namespace_labels(client, namespace, not_known).await;
    }
    let name = asked.name.filter(|_| !resource.namespaced && asked.verb != Verb::Create)?;
    match owner::metadata(client, resource, None, name).await {
        Ok(metadata) => Some(metadata.labels.unwrap_or_default()),
        Err(error) => {
            not_known.push(format!("the labels of the object: {}", causes(&error)));
            None
        }
    }
}

/// Whether the flags fit together.
fn check(arguments: &Arguments, verb: Verb) -> Result<(), ExplainError> {
    let (request, name) = (&arguments.request, arguments.name.as_deref());
    let verb_name = verb.name();
    if let Some(name) = name.filter(|_| verb.is_of_collection()) {
        return Err(ExplainError::NameNotAllowed { verb: verb_name, name: name.to_owned() });
    }
    if name.is_none() && !verb.is_of_collection() && verb != Verb::Create {
        return Err(ExplainError::NameNeeded { verb: verb_name });
    }
    if name.is_none() && request.subresource.is_some() {
        return Err(ExplainError::SubresourceWithoutName);
    }
    if request.all_namespaces && !verb.is_of_collection() {
        return Err(ExplainError::AllNamespaces { verb: verb_name });
    }
    for (flag, value) in [("selector", &request.selector), ("field-selector", &request.field_selector)] {
        if value.is_some() && !verb.is_of_collection() {
            return Err(ExplainError::NotACollection { flag, verb: verb_name });
        }
    }
    if let Some(path) = request.member_path.as_deref().filter(|path| !is_path(path)) {
        return Err(ExplainError::NotAMemberPath { value: path.to_owned() });
    }
    let is_name = |text: &str| !text.is_empty() && !text.contains('/') && !matches!(text, "." | "..");
    for (flag, value) in [("NAME", name), ("--subresource", request.subresource.as_deref())] {
        if let Some(value) = value.filter(|value| !is_name(value)) {
            return Err(ExplainError::NotAName { flag, value: value.to_owned() });
        }
    }
    Ok(())
}

/// Whether it can be put before another path.
fn is_path(text: &str) -> bool {
    let is_segment = |segment: &str| !segment.is_empty() && is_word(segment);
    text.strip_prefix('/').is_some_and(|text| text.split('/').all(is_segment))
}

#[cfg(test)]
mod tests;
