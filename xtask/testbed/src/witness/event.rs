//! Parses one line of an audit log: who wrote what, when, and which version that made.

use std::collections::BTreeMap;
use std::fmt;

use ctrlmesh_common::slots::Slot;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

/// Where the API server says which pod a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// The label with the slot of an object of cluster scope.
const SLOT: &str = "ctrlmesh.kusionstack.io/sharding-hash";

/// An object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Object {
    /// Its kind, as `plural.group`.
    pub resource: String,
    /// Its namespace; empty where it is in none.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// A pod that wrote.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Author {
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
}

/// Something in a log that is over.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) answered: Timestamp,
    /// Where it is a write that came about.
    pub(super) write: Option<Write>,
}

/// A write that came about.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub(super) object: Object,
    /// The user that wrote.
    pub(super) user: String,
    /// The pod that wrote; none where it was none.
    pub(super) author: Option<Author>,
    pub(super) received: Timestamp,
    pub(super) answered: Timestamp,
    /// The version that it made; none where the answer says none.
    pub(super) version: Option<u64>,
    /// The slot that the object's own label says.
    pub(super) slot: Option<Slot>,
    /// What it made; null where the log does not say.
    pub(super) made: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    stage: String,
    verb: String,
    #[serde(rename = "requestURI", default)]
    uri: String,
    #[serde(default)]
    user: User,
    #[serde(default)]
    object_ref: Option<Reference>,
    #[serde(default)]
    response_status: Status,
    #[serde(default)]
    response_object: Value,
    request_received_timestamp: Timestamp,
    stage_timestamp: Timestamp,
}

#[derive(Default, Deserialize)]
struct User {
    #[serde(default)]
    username: String,
    #[serde(default)]
    extra: BTreeMap<String, Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Reference {
    resource: String,
    namespace: String,
    name: String,
    api_group: String,
    subresource: String,
}

#[derive(Default, Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
}

impl fmt::Display for Object {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}/{}", self.resource, self.namespace, self.name)
    }
}

/// Reads a line; nothing where it is none, or where the request is not over.
pub(super) fn parse(line: &str) -> Option<Event> {
    let line: Line = serde_json::from_str(line).ok()?;
    if line.stage != "ResponseComplete" {
        return None;
    }
    Some(Event { answered: line.stage_timestamp, write: write(line) })
}

fn write(line: Line) -> Option<Write> {
    let reference = line.object_ref?;
    let writes = match line.verb.as_str() {
        // What is asked of an object and changes nothing of it: a pod's exec, a token.
        "create" => reference.subresource.is_empty(),
        "update" | "patch" | "delete" => true,
        _ => false,
    };
    let is_dry = line.uri.split(['?', '&']).any(|part| part.starts_with("dryRun="));
    if !writes || is_dry || !(200..300).contains(&line.response_status.code) {
        return None;
    }
    let made = line.response_object;
    // After the last of a delete the answer is a Status, with no version.
    let version = made["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok());
    let slot = made["metadata"]["labels"][SLOT].as_str().and_then(|slot| slot.parse().ok());
    let name = match &*reference.name {
        "" => made["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        given => given.to_owned(),
    };
    let dot = if reference.api_group.is_empty() { "" } else { "." };
    let resource = format!("{}{dot}{}", reference.resource, reference.api_group);
    let mut extra = line.user.extra;
    let mut first = |key: &str| extra.remove(key)?.into_iter().next();
    let author = first(POD_NAME).zip(first(POD_UID)).map(|(pod, uid)| Author { pod, uid });
    Some(Write {
        object: Object { resource, namespace: reference.namespace, name },
        user: line.user.username,
        author,
        received: line.request_received_timestamp,
        answered: line.stage_timestamp,
        version,
        slot,
        made,
    })
}
