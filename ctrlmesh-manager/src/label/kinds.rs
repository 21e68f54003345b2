//! Which kinds are listed, and which of them does the API server serve?

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::time::Duration;

use ctrlmesh_common::names::resource_list;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::{ApiResource, GroupVersion};
use kube::discovery::{self, ApiCapabilities, verbs};
use kube::{Api, Client};
use tokio::time;

use super::{Listed, Scope};

/// How long the API server may take to say what it serves of one group: of one whose own server is away it may never.
const DEADLINE: Duration = Duration::from_secs(3);

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
    /// The API server does not say in time what it serves.
    #[error("ask within {DEADLINE:?} what the API server serves of {group_version}")]
    Late {
        /// Of what.
        group_version: String,
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

/// Kinds by their name in URLs.
pub type Kinds = BTreeMap<String, Kind>;

/// The kinds that are listed in the ConfigMap of `namespace`, as far as the API server serves them, and what it does not
/// say what it serves of: of that, what was `known` holds. No ConfigMap is an empty list.
///
/// # Errors
/// Where what is listed cannot be found out: then what was found out last holds.
pub async fn served(
    client: &Client,
    namespace: &str,
    known: &Kinds,
) -> Result<(Kinds, Vec<KindsError>), KindsError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get_opt(resource_list::NAME).await;
    let map = map.map_err(|source| KindsError::Read { namespace: namespace.to_owned(), source })?;
    let text = map.and_then(|map| map.data?.remove(resource_list::KEY)).unwrap_or_default();
    let mut listed: Vec<(GroupVersion, Vec<String>)> = Vec::new();
    for (name, kinds) in self::listed(&text)?.group_version_kinds {
        match GroupVersion::from_str(&name) {
            Ok(group_version) => listed.push((group_version, kinds)),
            Err(_error) => return Err(KindsError::GroupVersion { name }),
        }
    }
    let asked = listed.iter().map(|(group_version, _)| found(client, group_version));
    let found = futures::future::join_all(asked).await;
    let (mut kinds, mut unknown) = (Kinds::new(), Vec::new());
    for ((group_version, names), found) in listed.into_iter().zip(found) {
        let found = match found {
            Ok(found) => found,
            // A server behind the API server that is down: it takes nothing from the others.
            Err(error) => {
                let of_it = known.iter().filter(|(_, kind)| {
                    kind.resource.group == group_version.group
                        && kind.resource.version == group_version.version
                });
                kinds.extend(of_it.map(|(name, kind)| (name.clone(), kind.clone())));
                unknown.push(error);
                continue;
            }
        };
        let wanted = found.into_iter().filter(|(resource, can)| is_wanted(resource, can, &names));
        kinds.extend(wanted.map(|(resource, can)| {
            let scope = scope(&can);
            let name = format!("{}.{}/{}", resource.plural, resource.group, resource.version);
            (name, Kind { resource, scope })
        }));
    }
    Ok((kinds, unknown))
}

/// What the API server serves of a group and version.
async fn found(
    client: &Client,
    group_version: &GroupVersion,
) -> Result<Vec<(ApiResource, ApiCapabilities)>, KindsError> {
    let found = discovery::pinned_group(client, group_version);
    match time::timeout(DEADLINE, found).await {
        Ok(Ok(group)) => Ok(group.versioned_resources(&group_version.version)),
        // A definition that is not there, or not yet.
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(Vec::new()),
        Ok(Err(kube::Error::Discovery(_))) => Ok(Vec::new()),
        Ok(Err(source)) => {
            Err(KindsError::Discover { group_version: group_version.api_version(), source })
        }
        Err(_elapsed) => Err(KindsError::Late { group_version: group_version.api_version() }),
    }
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
