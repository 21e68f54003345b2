//! An object that somebody owns, as far as ownership goes by it.

use ctrlmesh_common::selector::Labels;
use serde::Serialize;

use crate::cluster::NAMESPACES;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Object {
    pub(crate) group: String,
    /// Plural.
    pub(crate) resource: String,
    /// Absent for one of cluster scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) namespace: Option<String>,
    pub(crate) name: String,
    #[serde(skip)]
    pub(crate) labels: Labels,
}

impl Object {
    /// The namespace that counts for it. A namespace is in itself.
    pub(crate) fn counted_namespace(&self) -> Option<&str> {
        let is_namespace = (self.group.as_str(), self.resource.as_str()) == NAMESPACES;
        if is_namespace { Some(&self.name) } else { self.namespace.as_deref() }
    }
}
