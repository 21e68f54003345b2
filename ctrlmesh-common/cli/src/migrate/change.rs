//! One change of one object, and the change that takes it back.
//!
//! Pure.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::object::ObjectRef;

/// What is done to an object. Each can be done twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Action {
    /// It is made, as it stands here.
    Create(Value),
    Delete,
    /// A merge patch.
    Merge(Value),
    /// A merge patch of its status.
    MergeStatus(Value),
    AddFinalizer(String),
    RemoveFinalizer(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Change {
    pub(super) object: ObjectRef,
    pub(super) action: Action,
}

/// A change, and what takes it back. `None`: nothing does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Reversible {
    pub(super) change: Change,
    pub(super) inverse: Option<Change>,
}

impl Change {
    pub(super) fn new(object: ObjectRef, action: Action) -> Self {
        Self { object, action }
    }

    /// Whether both do the same thing to the same object, whatever the values.
    pub(super) fn replaces(&self, other: &Self) -> bool {
        self.object == other.object && std::mem::discriminant(&self.action) == std::mem::discriminant(&other.action)
    }
}

impl Reversible {
    /// Makes an object; the inverse deletes it.
    pub(super) fn create(object: ObjectRef, content: Value) -> Self {
        let inverse = Change::new(object.clone(), Action::Delete);
        Self { change: Change::new(object, Action::Create(content)), inverse: Some(inverse) }
    }

    /// Deletes an object; the inverse makes it as it was, where that is known.
    pub(super) fn delete(object: ObjectRef, before: Option<Value>) -> Self {
        let inverse = before.map(|before| Change::new(object.clone(), Action::Create(before)));
        Self { change: Change::new(object, Action::Delete), inverse }
    }

    pub(super) fn merge(object: ObjectRef, patch: Value, before: Value) -> Self {
        let inverse = Change::new(object.clone(), Action::Merge(before));
        Self { change: Change::new(object, Action::Merge(patch)), inverse: Some(inverse) }
    }

    pub(super) fn remove_finalizer(object: ObjectRef, finalizer: &str) -> Self {
        let inverse = Change::new(object.clone(), Action::AddFinalizer(finalizer.to_owned()));
        Self { change: Change::new(object, Action::RemoveFinalizer(finalizer.to_owned())), inverse: Some(inverse) }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object = &self.object;
        match &self.action {
            Action::Create(_) => write!(out, "create {object}"),
            Action::Delete => write!(out, "delete {object}"),
            Action::Merge(patch) => write!(out, "patch {object}: {patch}"),
            Action::MergeStatus(patch) => write!(out, "patch the status of {object}: {patch}"),
            Action::AddFinalizer(finalizer) => write!(out, "give {object} the finalizer {finalizer} again"),
            Action::RemoveFinalizer(finalizer) => write!(out, "take the finalizer {finalizer} from {object}"),
        }
    }
}
