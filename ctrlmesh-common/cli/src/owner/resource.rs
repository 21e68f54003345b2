//! Finds the resource that a word means, as kubectl does: by plural, singular, kind or short name, with or without its
//! version and group behind dots.

use kube::core::discovery::v2::{APIGroupDiscovery, APIResourceDiscovery};
use kube::discovery::ApiResource;
use kube::{Client, Error};

use crate::cluster;

/// A resource that the API server has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundResource {
    pub(crate) api: ApiResource,
    pub(crate) namespaced: bool,
}

/// The resources that a word may mean. The first one is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meanings {
    pub(crate) first: FoundResource,
    /// Of other groups, as `PLURAL.GROUP`. The user may mean one of them.
    pub(crate) others: Vec<String>,
}

/// What `word` may mean, in the order in which the API server lists its groups; `None`: there is no such resource.
///
/// # Errors
/// The API server does not say what it has.
pub(crate) async fn find(client: &Client, word: &str) -> Result<Option<Meanings>, Error> {
    Ok(meanings(&cluster::groups(client).await?, word))
}

/// A short name counts only where no resource is called so in full.
fn meanings(groups: &[APIGroupDiscovery], word: &str) -> Option<Meanings> {
    let by = |is_called: IsCalled| groups.iter().filter_map(|group| in_group(group, word, is_called)).collect();
    let mut found: Vec<FoundResource> = by(is_called_in_full);
    if found.is_empty() {
        found = by(is_called_for_short);
    }
    let mut found = found.into_iter();
    let first = found.next()?;
    let others = found.map(|FoundResource { api, .. }| format!("{}.{}", api.plural, api.group)).collect();
    Some(Meanings { first, others })
}

/// Whether a resource has this name.
type IsCalled = fn(&APIResourceDiscovery, &str) -> bool;

/// In the group's preferred version, unless `word` names another.
fn in_group(group: &APIGroupDiscovery, word: &str, is_called: IsCalled) -> Option<FoundResource> {
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

fn is_called_in_full(resource: &APIResourceDiscovery, word: &str) -> bool {
    let kind = resource.response_kind.as_ref().and_then(|kind| kind.kind.as_deref());
    let names = [resource.resource.as_deref(), resource.singular_resource.as_deref(), kind];
    names.into_iter().flatten().any(|name| name.eq_ignore_ascii_case(word))
}

fn is_called_for_short(resource: &APIResourceDiscovery, word: &str) -> bool {
    resource.short_names.iter().any(|name| name.eq_ignore_ascii_case(word))
}

fn found(group: &str, version: &str, resource: &APIResourceDiscovery) -> Option<FoundResource> {
    let api = cluster::api_resource(group, version, resource)?;
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

    fn version(name: &str, word: &str) -> Option<String> {
        meanings(&[group(name)], word).map(|all| all.first.api.api_version)
    }

    #[test]
    fn a_word_means_a_resource_by_each_of_its_names() {
        for word in ["websites", "website", "Website", "ws", "websites.example.com", "Website.v2.example.com"] {
            assert_eq!(version("example.com", word).as_deref(), Some("example.com/v2"), "{word}");
        }
        assert_eq!(version("example.com", "websites.v1.example.com").as_deref(), Some("example.com/v1"));
        for word in ["site", "websites.example.org", "websites.v3.example.com", "websites."] {
            assert_eq!(version("example.com", word), None, "{word}");
        }
        assert_eq!(version("", "websites.v1").as_deref(), Some("v1"));
        let found = meanings(&[group("example.com")], "ws").unwrap().first;
        assert_eq!((found.api.plural.as_str(), found.namespaced), ("websites", true));
    }

    #[test]
    fn the_first_group_is_meant_and_the_others_are_named() {
        let groups = ["example.org", "example.com", "example.net"].map(group);
        for word in ["websites", "ws"] {
            let all = meanings(&groups, word).unwrap();
            assert_eq!(all.first.api.group, "example.org");
            assert_eq!(all.others, ["websites.example.com", "websites.example.net"], "{word}");
        }
        let all = meanings(&groups, "websites.example.com").unwrap();
        assert_eq!((all.first.api.group.as_str(), all.others.len()), ("example.com", 0));
    }

    #[test]
    fn a_full_name_counts_before_a_short_one() {
        let mut full = group("example.com");
        full.versions[0].resources[0].resource = Some("ws".to_owned());
        let all = meanings(&[group("example.org"), full], "ws").unwrap();
        assert_eq!((all.first.api.group.as_str(), all.others.len()), ("example.com", 0));
    }
}
