//! Names objects as plans, conditions and metrics do: `NAMESPACE/NAME`; and says which version of one is newer.
//!
//! A part that an object does not have is empty.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// `NAMESPACE/NAME`.
pub fn full_name(meta: &ObjectMeta) -> String {
    format!("{}/{}", namespace(meta), name(meta))
}

/// The namespace in such a name; empty where it has none.
pub fn namespace_in(full_name: &str) -> &str {
    full_name.split_once('/').map_or("", |(namespace, _name)| namespace)
}

pub fn namespace(meta: &ObjectMeta) -> &str {
    meta.namespace.as_deref().unwrap_or_default()
}

pub fn name(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

/// The resourceVersion, which grows with each write; 0 if unknown.
pub fn resource_version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
}
