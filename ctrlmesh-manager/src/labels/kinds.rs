//! Finds out which of the listed kinds the API server serves.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::time::Duration;

use ctrlmesh_common::names::resource_list;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::{ApiResource, GroupVersion};
use kube::discovery::{self, ApiCapabilities, verbs};
use kube::{Api, Client};
use tokio::time;
use tracing::warn;

use super::{ALL, KindList, NAMESPACE, Scope};
use crate::telemetry;

/// For one group: if its own server is down, the answer may never come.
const DEADLINE: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    pub resource: ApiResource,
    pub scope: Scope,
}

#[derive(Debug, thiserror::Error)]
pub enum KindsError {
    #[error("read the ConfigMap `{}` in namespace {namespace:?}", resource_list::NAME)]
    Read { namespace: String, source: kube::Error },
    #[error("parse `{}` of the ConfigMap `{}`", resource_list::KEY, resource_list::NAME)]
    Parse(#[source] Box<serde_saphyr::Error>),
    #[error("{name:?} is not GROUP/VERSION, or v1")]
    GroupVersion { name: String },
    /// The API server does not say in time what it serves.
    #[error("ask within {DEADLINE:?} what the API server serves of {group_version}")]
    Late {
        /// Such as `apps/v1`.
        group_version: String,
    },
    #[error("ask what the API server serves of {group_version}")]
    Discover {
        /// Such as `apps/v1`.
        group_version: String,
        source: kube::Error,
    },
}

/// By their name in URLs.
pub type Kinds = BTreeMap<String, Kind>;

#[derive(Debug, Default)]
pub struct Served {
    pub kinds: Kinds,
    /// Listed groups that cannot be discovered, and have not been before.
    pub unknown: Vec<KindsError>,
    /// Listed kinds that are not served, or lack a verb that labelling needs.
    pub missing: Vec<String>,
}

/// Listed kinds of one group and version.
type Names = Vec<String>;

/// The listed kinds that the API server serves. For a group that cannot be discovered, the `known` ones stay. Without
/// ConfigMap the list is empty.
///
/// # Errors
/// Where the list cannot be read.
pub async fn served(client: &Client, namespace: &str, known: &Kinds) -> Result<Served, KindsError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get_opt(resource_list::NAME).await;
    let map = map.map_err(|source| KindsError::Read { namespace: namespace.to_owned(), source })?;
    let text = map.and_then(|map| map.data?.remove(resource_list::KEY)).unwrap_or_default();
    let mut served = Served::default();
    let listed = listed(&text, &mut served.unknown)?;
    let asked = listed.iter().map(|(group_version, _)| found(client, group_version));
    let found = futures::future::join_all(asked).await;
    for ((group_version, names), found) in listed.into_iter().zip(found) {
        match found {
            Ok(found) => served.add(&group_version, &names, found),
            // An aggregated API server that is down does not affect other groups.
            Err(error) => {
                let text = telemetry::chain(&error);
                warn!(error = text, "what is served of it is not known; what was known holds");
                let of_it = known.iter().filter(|(_, kind)| {
                    kind.resource.group == group_version.group && kind.resource.version == group_version.version
                });
                let before = served.kinds.len();
                served.kinds.extend(of_it.map(|(name, kind)| (name.clone(), kind.clone())));
                if served.kinds.len() == before {
                    served.unknown.push(error);
                }
            }
        }
    }
    Ok(served)
}

impl Served {
    /// Adds the kinds in `names` that were `found` in a group and version.
    fn add(&mut self, group_version: &GroupVersion, names: &[String], found: Vec<(ApiResource, ApiCapabilities)>) {
        for name in names {
            let is_it = |(one, can): &(ApiResource, ApiCapabilities)| {
                name == ALL || *name == one.kind && (can_be_labelled(can) || is_namespace(one))
            };
            if !found.iter().any(is_it) {
                self.missing.push(format!("{} {name}", group_version.api_version()));
            }
        }
        let wanted = found.into_iter().filter(|(resource, can)| {
            let is_listed = names.iter().any(|name| name == ALL || *name == resource.kind);
            is_listed && can_be_labelled(can) && !is_namespace(resource)
        });
        self.kinds.extend(wanted.map(|(resource, can)| {
            let scope = scope(&can);
            (name(&resource), Kind { resource, scope })
        }));
    }
}

/// The name of a kind in [`Kinds`].
pub(super) fn name(resource: &ApiResource) -> String {
    format!("{}.{}/{}", resource.plural, resource.group, resource.version)
}

/// Discovers a group and version.
async fn found(
    client: &Client,
    group_version: &GroupVersion,
) -> Result<Vec<(ApiResource, ApiCapabilities)>, KindsError> {
    let found = discovery::pinned_group(client, group_version);
    match time::timeout(DEADLINE, found).await {
        Ok(Ok(group)) => Ok(group.versioned_resources(&group_version.version)),
        // A definition that does not exist, or not yet.
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(Vec::new()),
        Ok(Err(kube::Error::Discovery(_))) => Ok(Vec::new()),
        Ok(Err(source)) => Err(KindsError::Discover { group_version: group_version.api_version(), source }),
        Err(_elapsed) => Err(KindsError::Late { group_version: group_version.api_version() }),
    }
}

/// The entries of the list. Invalid keys go to `unknown`.
fn listed(text: &str, unknown: &mut Vec<KindsError>) -> Result<Vec<(GroupVersion, Names)>, KindsError> {
    let all = KindList::read(text).map_err(KindsError::Parse)?;
    let mut listed = Vec::new();
    for (name, kinds) in all.group_version_kinds {
        match GroupVersion::from_str(&name) {
            // kube takes anything after the group as version.
            Ok(one) if !one.version.is_empty() && !one.version.contains('/') => {
                listed.push((one, kinds));
            }
            // Does not affect the other entries.
            Ok(_) | Err(_) => unknown.push(KindsError::GroupVersion { name }),
        }
    }
    Ok(listed)
}

fn can_be_labelled(can: &ApiCapabilities) -> bool {
    [verbs::LIST, verbs::WATCH, verbs::PATCH].into_iter().all(|verb| can.supports_operation(verb))
}

/// Namespaces are always labelled, apart from the list.
fn is_namespace(resource: &ApiResource) -> bool {
    resource.group.is_empty() && resource.kind == NAMESPACE
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

    fn resource(kind: &str, verbs: &[&str]) -> (ApiResource, ApiCapabilities) {
        let gvk = kube::core::GroupVersionKind::gvk("", "v1", kind);
        let operations = verbs.iter().map(|verb| (*verb).to_owned()).collect();
        let scope = discovery::Scope::Namespaced;
        (ApiResource::from_gvk(&gvk), ApiCapabilities { scope, subresources: Vec::new(), operations })
    }

    #[test]
    fn the_predecessors_list_is_read() {
        let mut unknown = Vec::new();
        let text = "groupVersionKinds:\n  v1: [Pod, Service]\n  apps/v1: ['*']\n";
        let found = listed(text, &mut unknown).unwrap();
        let found: Vec<_> = found.iter().map(|(of, kinds)| (of.api_version(), kinds)).collect();
        let (all, both) = (vec!["*".to_owned()], vec!["Pod".to_owned(), "Service".to_owned()]);
        assert_eq!(found, [("apps/v1".to_owned(), &all), ("v1".to_owned(), &both)]);
        assert!(listed("\n", &mut unknown).unwrap().is_empty());
        assert!(listed("groupVersions: {}", &mut unknown).is_err());
        assert!(unknown.is_empty());
    }

    #[test]
    fn an_invalid_key_is_reported_and_the_others_are_kept() {
        let mut unknown = Vec::new();
        let found = listed("groupVersionKinds: {a/b/c: [X], v1: [Pod]}", &mut unknown).unwrap();
        assert_eq!(found.len(), 1);
        assert!(matches!(&unknown[..], [KindsError::GroupVersion { name }] if name == "a/b/c"));
    }

    #[test]
    fn kinds_that_cannot_be_labelled_are_reported() {
        let all = [verbs::LIST, verbs::WATCH, verbs::PATCH];
        let v1 = GroupVersion::gv("", "v1");
        let names = ["Pod", "Podd", "Binding", "Namespace"].map(str::to_owned);
        let there = ["Pod", "Secret", "Namespace"].map(|kind| resource(kind, &all));
        let there = there.into_iter().chain([resource("Binding", &["create"])]).collect();
        let mut served = Served::default();
        served.add(&v1, &names, there);
        assert_eq!(served.missing, ["v1 Podd", "v1 Binding"]);
        assert_eq!(served.kinds.keys().collect::<Vec<_>>(), ["pods./v1"]);
        let mut nothing = Served::default();
        nothing.add(&v1, &["*".to_owned()], Vec::new());
        assert_eq!(nothing.missing, ["v1 *"], "the version is not served");
    }
}
