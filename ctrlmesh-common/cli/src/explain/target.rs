//! Builds the path and query of a request, as clients send it.
//!
//! Pure.

use ctrlmesh_common::selector::Labels;
use ctrlmesh_request::rewrite::selector::escaped;
use kube::core::ApiResource;

use super::args::Verb;

/// The version in a path, where only the group counts.
const ANY_VERSION: &str = "v1";

/// A request for a resource.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    /// The path that leads to a member; empty for the API server itself.
    pub(super) behind: &'a str,
    pub(super) verb: Verb,
    pub(super) api: &'a ApiResource,
    /// `None`: across namespaces, or for what is in none.
    pub(super) namespace: Option<&'a str>,
    /// `None`: the request names no object.
    pub(super) name: Option<&'a str>,
    pub(super) subresource: Option<&'a str>,
    pub(super) labels: Option<&'a str>,
    pub(super) fields: Option<&'a str>,
}

/// What a request writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written<'a> {
    pub(super) group: &'a str,
    pub(super) resource: &'a str,
    /// Empty where the object itself is written.
    pub(super) subresource: &'a str,
    /// `None` for an object of cluster scope.
    pub(super) namespace: Option<&'a str>,
    /// Empty where the request does not say it.
    pub(super) name: &'a str,
    /// Labels of the namespace, or of an object of cluster scope its own. `None`: they cannot be read.
    pub(super) labels: Option<&'a Labels>,
}

impl Asked<'_> {
    pub(super) fn target(&self) -> String {
        let ApiResource { group, version, plural, .. } = self.api;
        // The name of what is created stands in the body.
        let name = self.name.filter(|_| self.verb != Verb::Create || self.subresource.is_some());
        let path = self.behind.to_owned()
            + &path(group, version, self.namespace, [Some(plural.as_str()), name, self.subresource]);
        let watch = (self.verb == Verb::Watch).then(|| "watch=true".to_owned());
        let labels = self.labels.map(|labels| format!("labelSelector={}", escaped(labels.as_bytes())));
        let fields = self.fields.map(|fields| format!("fieldSelector={}", escaped(fields.as_bytes())));
        let query: Vec<String> = [watch, labels, fields].into_iter().flatten().collect();
        if query.is_empty() { path } else { format!("{path}?{}", query.join("&")) }
    }
}

/// The path of what is written, in some version.
pub(super) fn of_object(written: &Written<'_>) -> String {
    let or_none = |text| Some(text).filter(|text: &&str| !text.is_empty());
    let names = [Some(written.resource), or_none(written.name), or_none(written.subresource)];
    path(written.group, ANY_VERSION, written.namespace, names)
}

fn path(group: &str, version: &str, namespace: Option<&str>, names: [Option<&str>; 3]) -> String {
    let start = if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
    let namespace = namespace.map(|namespace| format!("/namespaces/{}", escaped(namespace.as_bytes())));
    let names = names.into_iter().flatten().map(|name| format!("/{}", escaped(name.as_bytes())));
    [start].into_iter().chain(namespace).chain(names).collect()
}

#[cfg(test)]
mod tests {
    use ctrlmesh_request::request::RequestInfo;

    use super::*;

    fn api(group: &str) -> ApiResource {
        let api_version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
        let (kind, plural) = ("Site".to_owned(), "sites".to_owned());
        ApiResource { group: group.to_owned(), version: "v1".to_owned(), api_version, kind, plural }
    }

    #[test]
    fn every_verb_is_classified_as_itself() {
        let api = api("web.example.com");
        for verb in [
            Verb::Get,
            Verb::List,
            Verb::Watch,
            Verb::Create,
            Verb::Update,
            Verb::Patch,
            Verb::Delete,
            Verb::DeleteCollection,
        ] {
            let name = (!verb.is_of_collection()).then_some("one");
            let asked = Asked {
                behind: "",
                verb,
                api: &api,
                namespace: Some("shop"),
                name,
                subresource: None,
                labels: None,
                fields: None,
            };
            let target = asked.target();
            let info = RequestInfo::parse(verb.method(), &target).unwrap();
            let in_path = name.filter(|_| verb != Verb::Create);
            assert_eq!(info.verb(), verb.name(), "{target}");
            let said = (info.api_group(), info.namespace(), info.resource(), info.name());
            assert_eq!(said, ("web.example.com", "shop", "sites", in_path.unwrap_or_default()));
        }
    }

    #[test]
    fn selectors_are_escaped() {
        let api = api("");
        let asked = Asked {
            behind: "",
            verb: Verb::Watch,
            api: &api,
            namespace: None,
            name: None,
            subresource: None,
            labels: Some("a in (b,c)"),
            fields: Some("metadata.name=x"),
        };
        let expected = "/api/v1/sites?watch=true&labelSelector=a%20in%20%28b%2Cc%29&fieldSelector=metadata.name%3Dx";
        assert_eq!(asked.target(), expected);
        let status = Asked {
            verb: Verb::Patch,
            namespace: Some("shop"),
            name: Some("one"),
            subresource: Some("status"),
            labels: None,
            fields: None,
            ..asked
        };
        assert_eq!(status.target(), "/api/v1/namespaces/shop/sites/one/status");
    }
}
