//! Discovers which resources the API server serves.

use std::collections::BTreeMap;

use ctrlmesh_common::resource::WILDCARD;
use kube::{Client, Discovery};

/// Kinds by group and plural. Empty means unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedResources(BTreeMap<(String, String), String>);

impl ServedResources {
    /// # Errors
    /// If the API server does not answer; the caller keeps the last result.
    pub async fn discover(client: &Client) -> kube::Result<Self> {
        let discovery = Discovery::new(client.clone()).run_aggregated().await?;
        let mut served = BTreeMap::new();
        for group in discovery.groups() {
            for version in group.versions() {
                let resources = group.versioned_resources(version).into_iter();
                served.extend(resources.map(|(one, _)| ((one.group, one.plural), one.kind)));
            }
        }
        Ok(Self(served))
    }

    /// `*` is any group or any resource. While nothing is known, every resource counts as served.
    pub fn has(&self, group: &str, resource: &str) -> bool {
        let is = |wanted: &str, there: &str| wanted == WILDCARD || wanted == there;
        self.0.is_empty() || self.0.keys().any(|(served, plural)| is(group, served) && is(resource, plural))
    }

    pub fn kind(&self, group: &str, resource: &str) -> Option<&str> {
        self.0.get(&(group.to_owned(), resource.to_owned())).map(String::as_str)
    }
}

impl<const N: usize> From<[(&str, &str, &str); N]> for ServedResources {
    fn from(served: [(&str, &str, &str); N]) -> Self {
        let owned = |text: &str| text.to_owned();
        let owned = served.map(|(group, name, kind)| ((owned(group), owned(name)), owned(kind)));
        Self(owned.into())
    }
}
