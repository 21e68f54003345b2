//! Parses one line of an audit log: who wrote what, when, and which version that made.

use std::fmt;

use ctrlmesh_common::slots::Slot;
use jiff::Timestamp;
use serde_json::Value;

use crate::audit_log::AuditEvent;

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
    pub(super) is_delete: bool,
    pub(super) received: Timestamp,
    pub(super) answered: Timestamp,
    /// The version that it made; none where the answer says none.
    pub(super) version: Option<u64>,
    /// The slot that the object's own label says.
    pub(super) slot: Option<Slot>,
    /// What it made; null where the log does not say.
    pub(super) made: Value,
}

impl fmt::Display for Object {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}/{}", self.resource, self.namespace, self.name)
    }
}

/// Reads a line; nothing where it is none, or where the request is not over.
pub(super) fn parse(line: &str) -> Option<Event> {
    let event = AuditEvent::parse(line).filter(|event| event.stage == "ResponseComplete")?;
    Some(Event { answered: event.at, write: write(event) })
}

fn write(event: AuditEvent) -> Option<Write> {
    if !event.is_write() || !(200..300).contains(&event.response_status.code) {
        return None;
    }
    let made = event.response_object;
    // After the last of a delete the answer is a Status, with no version.
    let version = made["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok());
    let slot = made["metadata"]["labels"][SLOT].as_str().and_then(|slot| slot.parse().ok());
    let reference = event.object;
    let name = match &*reference.name {
        "" => made["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        given => given.to_owned(),
    };
    let dot = if reference.api_group.is_empty() { "" } else { "." };
    let resource = format!("{}{dot}{}", reference.resource, reference.api_group);
    // Letting go of an object that is being deleted deletes it, too.
    let meta = &made["metadata"];
    let is_let_go = meta["deletionTimestamp"].is_string() && !meta["finalizers"].is_array();
    let is_delete = event.verb == "delete" || is_let_go;
    // A host asks a member in its user's name.
    let is_impersonated = !event.impersonated_user.username.is_empty();
    let user = if is_impersonated { event.impersonated_user } else { event.user };
    let author = user.pod_name().zip(user.pod_uid());
    let author = author.map(|(pod, uid)| Author { pod: pod.to_owned(), uid: uid.to_owned() });
    Some(Write {
        object: Object { resource, namespace: reference.namespace, name },
        user: user.username,
        author,
        is_delete,
        received: event.received,
        answered: event.at,
        version,
        slot,
        made,
    })
}
