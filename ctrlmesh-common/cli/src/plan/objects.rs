//! Lists the metadata of the objects that roots divide.

use ctrlmesh_common::selector::Labels;
use ctrlmesh_manager::rules::label_coverage::VERBS;
use kube::api::{DynamicObject, ListParams, ObjectMeta};
use kube::core::ApiResource;
use kube::core::discovery::v2::{APIGroupDiscovery, APIResourceDiscovery};
use kube::{Api, Client, Error};

use crate::cluster::{api_resource, paging};

/// Every resource that the manager can label, and namespaces, in the preferred version of its group.
pub(super) fn labelled(groups: &[APIGroupDiscovery]) -> Vec<ApiResource> {
    let of_group = |group: &APIGroupDiscovery| {
        let name = group.metadata.as_ref().and_then(|metadata| metadata.name.clone()).unwrap_or_default();
        let mut found: Vec<ApiResource> = Vec::new();
        for version in &group.versions {
            let of = version.version.as_deref().unwrap_or_default();
            for resource in version.resources.iter().filter(|one| supports(one)) {
                let Some(resource) = api_resource(&name, of, resource) else { continue };
                if found.iter().all(|known| known.plural != resource.plural) {
                    found.push(resource);
                }
            }
        }
        found
    };
    groups.iter().flat_map(of_group).collect()
}

/// An object, as far as it counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted<'a> {
    pub(super) namespace: Option<&'a str>,
    pub(super) name: &'a str,
    pub(super) labels: &'a Labels,
}

fn supports(resource: &APIResourceDiscovery) -> bool {
    VERBS.iter().all(|verb| resource.verbs.iter().any(|one| one == verb))
}

/// Calls `each` with namespace, name and labels of each object.
///
/// # Errors
/// The API server does not list them.
pub(super) async fn list(
    client: &Client,
    resource: &ApiResource,
    mut each: impl FnMut(Option<&str>, &str, &Labels),
) -> Result<(), Error> {
    let all: Api<DynamicObject> = Api::all_with(client.clone(), resource);
    let none = Labels::new();
    let each = |object: &ObjectMeta| {
        let labels = object.labels.as_ref().unwrap_or(&none);
        each(object.namespace.as_deref(), object.name.as_deref().unwrap_or_default(), labels);
    };
    paging::each_metadata(&all, ListParams::default(), each).await
}
