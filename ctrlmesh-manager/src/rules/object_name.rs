//! Names objects as plans, conditions and metrics do: `NAMESPACE/NAME`.
//!
//! A part that an object does not have is empty.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// `NAMESPACE/NAME`.
pub fn full_name(meta: &ObjectMeta) -> String {
    format!("{}/{}", namespace(meta), name(meta))
}

pub fn namespace(meta: &ObjectMeta) -> &str {
    meta.namespace.as_deref().unwrap_or_default()
}

pub fn name(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}
