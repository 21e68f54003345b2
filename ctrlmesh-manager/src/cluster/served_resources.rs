//! Discovers which resources the API server serves.

use std::collections::BTreeMap;

use ctrlmesh_common::resource::WILDCARD;
use kube::core::ApiResource;
use kube::discovery::{ApiCapabilities, Scope};
use kube::{Client, Discovery};

/// A resource in the version that the API server prefers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedResource {
    pub resource: ApiResource,
    pub namespaced: bool,
    pub verbs: Vec<String>,
}

/// By group and plural. Empty means unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedResources(BTreeMap<(String, String), ServedResource>);

impl ServedResources {
    /// # Errors
    /// If the API server does not answer; the caller keeps the last result.
    pub async fn discover(client: &Client) -> kube::Result<Self> {
        let discovery = Discovery::new(client.clone()).run_aggregated().await?;
        let mut served = BTreeMap::new();
        for group in discovery.groups() {
            let preferred = group.recommended_resources();
            // The preferred version may lack some of the group's resources.
            let others = group.versions().flat_map(|version| group.versioned_resources(version));
            for (resource, can) in preferred.into_iter().chain(others) {
                let key = (resource.group.clone(), resource.plural.clone());
                served.entry(key).or_insert_with(|| ServedResource::of(resource, can));
            }
        }
        Ok(Self(served))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn all(&self) -> impl Iterator<Item = &ServedResource> {
        self.0.values()
    }

    /// `*` is any group or any resource. While nothing is known, every resource counts as served.
    pub fn has(&self, group: &str, resource: &str) -> bool {
        let is = |wanted: &str, there: &str| wanted == WILDCARD || wanted == there;
        self.0.is_empty() || self.0.keys().any(|(served, plural)| is(group, served) && is(resource, plural))
    }

    pub fn kind(&self, group: &str, resource: &str) -> Option<&str> {
        self.0.get(&(group.to_owned(), resource.to_owned())).map(|served| served.resource.kind.as_str())
    }

    /// Whether the resource is served with these verbs.
    pub fn supports(&self, group: &str, resource: &str, verbs: &[&str]) -> bool {
        self.0.get(&(group.to_owned(), resource.to_owned())).is_some_and(|served| served.supports(verbs))
    }
}

impl ServedResource {
    pub fn supports(&self, verbs: &[&str]) -> bool {
        verbs.iter().all(|verb| self.verbs.iter().any(|can| can == verb))
    }

    fn of(resource: ApiResource, can: ApiCapabilities) -> Self {
        Self { resource, namespaced: can.scope == Scope::Namespaced, verbs: can.operations }
    }
}

/// Resources of namespaces, in version v1, with the verbs that labelling needs: group, plural and kind.
impl<const N: usize> From<[(&str, &str, &str); N]> for ServedResources {
    fn from(served: [(&str, &str, &str); N]) -> Self {
        let all = served.map(|(group, plural, kind)| {
            let gvk = kube::core::GroupVersionKind::gvk(group, "v1", kind);
            let resource = ApiResource::from_gvk_with_plural(&gvk, plural);
            let verbs = ["list", "watch", "patch"].map(str::to_owned).into();
            ((group.to_owned(), plural.to_owned()), ServedResource { resource, namespaced: true, verbs })
        });
        Self(all.into())
    }
}
