//! Finds the resource that a word means, as kubectl does: by plural, singular, kind or short name, with or without its
//! version and group behind dots.

use kube::core::discovery::v2::{APIGroupDiscovery, APIResourceDiscovery};
use kube::discovery::ApiResource;
use kube::{Client, Error};

/// A resource that the API server has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundResource {
    pub(super) api: ApiResource,
    pub(super) namespaced: bool,
}

/// The first resource that `word` means; `None`: there is none.
///
/// # Errors
/// The API server does not say what it has.
pub(super) async fn find(client: &Client, word: &str) -> Result<Option<FoundResource>, Error> {
    let core = client.list_core_api_versions_aggregated().await?.items;
    let groups = client.list_api_groups_aggregated().await?.items;
    Ok(core.iter().chain(&groups).find_map(|group| in_group(group, word)))
}

/// In the group's preferred version, unless `word` names another.
fn in_group(group: &APIGroupDiscovery, word: &str) -> Option<FoundResource> {
    let name = group.metadata.as_ref().and_then(|metadata| metadata.name.as_deref()).unwrap_or_default();
    let (word, behind) = word.split_once('.').map_or((word, None), |(word, behind)| (word, Some(behind)));
    let is_meant = |version: &str| match behind {
        None => true,
        Some(behind) => behind == name || behind == format!("{version}.{name}") || name.is_empty() && behind == version,
    };
    group.versions.iter().find_map(|version| {
        let of = version.version.as_deref().filter(|of| is_meant(of))?;
        let resource = version.resources.iter().find(|resource| is_called(resource, word))?;
        found(name, of, resource)
    })
}

fn is_called(resource: &APIResourceDiscovery, word: &str) -> bool {
    let kind = resource.response_kind.as_ref().and_then(|kind| kind.kind.as_deref());
    let names = [resource.resource.as_deref(), resource.singular_resource.as_deref(), kind];
    let short = resource.short_names.iter().map(String::as_str);
    names.into_iter().flatten().chain(short).any(|name| name.eq_ignore_ascii_case(word))
}

fn found(group: &str, version: &str, resource: &APIResourceDiscovery) -> Option<FoundResource> {
    let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let api = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version,
        kind: resource.response_kind.as_ref()?.kind.clone()?,
        plural: resource.resource.clone()?,
    };
    Some(FoundResource { api, namespaced: resource.scope.as_deref() == Some("Namespaced") })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group(name: &str) -> APIGroupDiscovery {
        let websites = json!({"resource": "websites", "singularResource": "website", "shortNames": ["ws"],
            "responseKind": {"group": name, "version": "", "kind": "Website"}, "scope": "Namespaced"});
        let versions = ["v2", "v1"].map(|version| json!({"version": version, "resources": [websites]}));
        serde_json::from_value(json!({"metadata": {"name": name}, "versions": versions})).unwrap()
    }

    #[test]
    fn a_word_means_a_resource_by_each_of_its_names() {
        let version = |group_name: &str, word| in_group(&group(group_name), word).map(|found| found.api.api_version);
        for word in ["websites", "website", "Website", "ws", "websites.example.com", "Website.v2.example.com"] {
            assert_eq!(version("example.com", word).as_deref(), Some("example.com/v2"), "{word}");
        }
        assert_eq!(version("example.com", "websites.v1.example.com").as_deref(), Some("example.com/v1"));
        for word in ["site", "websites.example.org", "websites.v3.example.com", "websites."] {
            assert_eq!(version("example.com", word), None, "{word}");
        }
        assert_eq!(version("", "websites.v1").as_deref(), Some("v1"));
        let found = in_group(&group("example.com"), "ws").unwrap();
        assert_eq!((found.api.plural.as_str(), found.namespaced), ("websites", true));
    }
}
