//! What the cache keeps of a namespace.

use ctrlmesh_common::selector::Labels;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Equality ignores UID and version, because no decision depends on them.
#[derive(Clone, Debug, Default)]
pub struct NamespaceInfo {
    pub labels: Labels,
    pub terminating: bool,
    pub uid: Option<String>,
    pub version: Option<String>,
}

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
