//! What is known of a namespace?

use ctrlmesh_common::selector::Labels;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// A namespace. Two that differ only in which one, or in which version, was seen are the same: nothing is decided by that.
#[derive(Clone, Debug, Default)]
pub struct NamespaceInfo {
    /// Its labels.
    pub labels: Labels,
    /// Whether it is being deleted.
    pub terminating: bool,
    /// Its UID.
    pub uid: Option<String>,
    /// Its resourceVersion.
    pub version: Option<String>,
}

// === impl NamespaceInfo ===

impl PartialEq for NamespaceInfo {
    fn eq(&self, other: &Self) -> bool {
        (&self.labels, self.terminating) == (&other.labels, other.terminating)
    }
}

impl From<ObjectMeta> for NamespaceInfo {
    fn from(meta: ObjectMeta) -> Self {
        Self {
            labels: meta.labels.unwrap_or_default(),
            terminating: meta.deletion_timestamp.is_some(),
            uid: meta.uid,
            version: meta.resource_version,
        }
    }
}
