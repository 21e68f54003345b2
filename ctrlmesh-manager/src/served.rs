//! Which resources does the API server serve?

use std::collections::BTreeSet;

use ctrlmesh_common::resource::WILDCARD;
use kube::{Client, Discovery};

/// The resources that are served, each a group and a plural. Empty: it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served(BTreeSet<(String, String)>);

// === impl Served ===

impl Served {
    /// Asks the API server.
    ///
    /// # Errors
    /// Where it does not say: then what it said last holds.
    pub async fn ask(client: &Client) -> kube::Result<Self> {
        let discovery = Discovery::new(client.clone()).run_aggregated().await?;
        let mut served = BTreeSet::new();
        for group in discovery.groups() {
            for version in group.versions() {
                let resources = group.versioned_resources(version).into_iter();
                served.extend(resources.map(|(one, _)| (one.group, one.plural)));
            }
        }
        Ok(Self(served))
    }

    /// Whether there is any such resource; `*` is any group, or any resource. What is not known is taken to be served.
    pub fn has(&self, group: &str, resource: &str) -> bool {
        let is = |wanted: &str, there: &str| wanted == WILDCARD || wanted == there;
        self.0.is_empty()
            || self.0.iter().any(|(served, plural)| is(group, served) && is(resource, plural))
    }
}

impl<const N: usize> From<[(&str, &str); N]> for Served {
    fn from(served: [(&str, &str); N]) -> Self {
        let owned = served.map(|(group, resource)| (group.to_owned(), resource.to_owned()));
        Self(owned.into())
    }
}
