//! Which kinds are listed, and which of them does the API server serve?

use std::collections::BTreeMap;
use std::str::FromStr as _;

use ctrlmesh_common::names::resource_list;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::{ApiResource, GroupVersion};
use kube::discovery::{self, ApiCapabilities, verbs};
use kube::{Api, Client};

use super::{Listed, Scope};

/// A kind that is listed and served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// How it is asked for.
    pub resource: ApiResource,
    /// Whether its objects are in namespaces.
    pub scope: Scope,
}

/// What is listed cannot be found out.
#[derive(Debug, thiserror::Error)]
pub enum KindsError {
    /// The ConfigMap cannot be read.
    #[error("read the ConfigMap `{}` in namespace {namespace:?}", resource_list::NAME)]
    Read {
        /// Where it should be.
        namespace: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// It does not say what it should.
    #[error("parse `{}` of the ConfigMap `{}`", resource_list::KEY, resource_list::NAME)]
    Parse(#[source] Box<serde_saphyr::Error>),
    /// A key is no group and version.
    #[error("{name:?} is not GROUP/VERSION, or v1")]
    GroupVersion {
        /// The key.
        name: String,
    },
    /// The API server does not say what it serves.
    #[error("ask what the API server serves of {group_version}")]
    Discover {
        /// Of what.
        group_version: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
}

/// The kinds that are listed in the ConfigMap of `namespace`, as far as the API server serves them, by their name in
/// URLs. No ConfigMap is an empty list.
///
/// # Errors
/// Where what is listed or served cannot be found out: then what was found out last holds.
pub async fn served(
    client: &Client,
    namespace: &str,
) -> Result<BTreeMap<String, Kind>, KindsError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get_opt(resource_list::NAME).await;
    let map = map.map_err(|source| KindsError::Read { namespace: namespace.to_owned(), source })?;
    let text = map.and_then(|map| map.data?.remove(resource_list::KEY)).unwrap_or_default();
    let mut kinds = BTreeMap::new();
    for (group_version, names) in listed(&text)?.group_version_kinds {
        let parsed = GroupVersion::from_str(&group_version);
        let parsed =
            parsed.map_err(|_error| KindsError::GroupVersion { name: group_version.clone() })?;
        let found = match discovery::pinned_group(client, &parsed).await {
            Ok(group) => group.versioned_resources(&parsed.version),
            // A definition that is not there, or not yet.
            Err(kube::Error::Api(status)) if status.code == 404 => continue,
            Err(kube::Error::Discovery(_)) => continue,
            Err(source) => return Err(KindsError::Discover { group_version, source }),
        };
        let wanted = found.into_iter().filter(|(resource, can)| is_wanted(resource, can, &names));
        kinds.extend(wanted.map(|(resource, can)| {
            let scope = scope(&can);
            let name = format!("{}.{}/{}", resource.plural, resource.group, resource.version);
            (name, Kind { resource, scope })
        }));
    }
    Ok(kinds)
}

fn listed(text: &str) -> Result<Listed, KindsError> {
    if text.trim().is_empty() {
        return Ok(Listed::default());
    }
    serde_saphyr::from_str(text).map_err(|error| KindsError::Parse(Box::new(error)))
}

/// What cannot be listed, watched and patched cannot be labelled; namespaces are labelled anyway.
fn is_wanted(resource: &ApiResource, can: &ApiCapabilities, names: &[String]) -> bool {
    let is_namespace = resource.group.is_empty() && resource.kind == "Namespace";
    let possible = [verbs::LIST, verbs::WATCH, verbs::PATCH]
        .into_iter()
        .all(|verb| can.supports_operation(verb));
    possible && !is_namespace && names.iter().any(|name| name == "*" || *name == resource.kind)
}

fn scope(can: &ApiCapabilities) -> Scope {
    match can.scope {
        discovery::Scope::Cluster => Scope::Cluster,
        discovery::Scope::Namespaced => Scope::Namespaced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_predecessors_list_is_read() {
        let found = listed("groupVersionKinds:\n  v1: [Pod, Service]\n  apps/v1: ['*']\n").unwrap();
        assert_eq!(found.group_version_kinds["apps/v1"], ["*"]);
        assert_eq!(found.group_version_kinds["v1"], ["Pod", "Service"]);
        assert_eq!(listed("\n").unwrap(), Listed::default());
        assert!(listed("groupVersions: {}").is_err());
    }
}
