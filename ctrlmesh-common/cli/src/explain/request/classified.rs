//! Says how the API server classifies a request.
//!
//! Pure.

use ctrlmesh_request::request::RequestInfo;
use serde::Serialize;

use crate::cluster::resource_name;

/// What kube-apiserver's RequestInfo has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Classified {
    /// Absent: the request is for the API server itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cluster: Option<String>,
    pub(super) verb: String,
    pub(super) group: String,
    pub(super) version: String,
    pub(super) resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) subresource: String,
    /// Absent: across namespaces, or of cluster scope.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) namespace: String,
    /// Absent: none is named.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) name: String,
}

impl From<&RequestInfo<'_>> for Classified {
    fn from(info: &RequestInfo<'_>) -> Self {
        let text = str::to_owned;
        Self {
            cluster: info.cluster().map(text),
            verb: text(info.verb()),
            group: text(info.api_group()),
            version: text(info.api_version()),
            resource: text(info.resource()),
            subresource: text(info.subresource()),
            namespace: text(info.namespace()),
            name: text(info.name()),
        }
    }
}

impl Classified {
    /// In one sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { cluster, verb, group, resource, subresource, namespace, name, .. } = self;
        let reader = cluster.as_ref().map_or("The API server".to_owned(), |name| format!("Member cluster {name:?}"));
        let of = if subresource.is_empty() { String::new() } else { format!("{subresource} of ") };
        let resource = resource_name(group, resource);
        let name = if name.is_empty() { String::new() } else { format!(" {name:?}") };
        let place = if namespace.is_empty() { String::new() } else { format!(" in namespace {namespace:?}") };
        format!("{reader} classifies it as {verb}: {of}{resource}{name}{place}.")
    }
}
