//! Matches resources by API group and plural, as RBAC rules do.
//!
//! The version does not count, and a subresource counts as its resource: the object is the same by every path.

use serde::{Deserialize, Serialize};

use crate::names::is_dns_subdomain;

/// What stands for everything, and must then stand alone.
pub const WILDCARD: &str = "*";

/// Some resources of some API groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResourceMatch {
    /// API groups; `""` is the core group, `["*"]` is every group.
    pub api_groups: Vec<String>,
    /// Resources in their plural, lower-case form; `["*"]` is every resource of those groups.
    pub resources: Vec<String>,
}

/// A resource of the API server, or of a member cluster behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceKey<'a> {
    /// The member cluster; `None` for the API server itself.
    pub member: Option<MemberKey<'a>>,
    /// Empty for the core group.
    pub group: &'a str,
    /// In its plural form.
    pub resource: &'a str,
}

/// A list that cannot be matched against. The field is relative to the resource match.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceMatchError {
    /// Nothing is listed.
    #[error("{field}: is empty; name at least one, or \"*\" alone for all")]
    Empty {
        /// `apiGroups` or `resources`.
        field: &'static str,
    },
    /// The wildcard stands beside names.
    #[error("{field}: \"*\" is allowed only alone")]
    WildcardNotAlone {
        /// `apiGroups` or `resources`.
        field: &'static str,
    },
    /// The same name stands twice.
    #[error("{field}: {name:?} is listed twice; every entry must be different")]
    Repeated {
        /// `apiGroups` or `resources`.
        field: &'static str,
        /// What is repeated.
        name: String,
    },
    /// A resource that no API server can serve.
    #[error(
        "resources: {name:?} is not a plural, lower-case resource name of a-z 0-9 -, without subresource (such as \"deployments\")"
    )]
    BadResource {
        /// What was given.
        name: String,
    },
    /// A group that no API server can serve.
    #[error("apiGroups: {name:?} is not a lower-case DNS subdomain (such as \"apps\"), nor \"\" for the core group")]
    BadGroup {
        /// What was given.
        name: String,
    },
}

/// The resource that a name stands for where it may have a subresource: `pods/eviction` is of `pods`.
pub fn without_subresource(name: &str) -> &str {
    name.split_once('/').map_or(name, |(resource, _)| resource)
}

/// The other API group in which the API server serves the same stored objects. `None`: there is none.
///
/// Source: kube-apiserver installs the storage of events in both groups (`pkg/registry/core/rest`,
/// `pkg/registry/events/rest`).
pub fn other_group(group: &str, resource: &str) -> Option<&'static str> {
    match (group, resource) {
        ("", "events") => Some("events.k8s.io"),
        ("events.k8s.io", "events") => Some(""),
        _ => None,
    }
}

/// A member cluster. Two paths may lead to members of the same name, which are two servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberKey<'a> {
    /// The path that leads to it, without escapes.
    pub path: &'a str,
    /// Its name.
    pub name: &'a str,
}

impl<'a> ResourceKey<'a> {
    /// A resource of the API server itself.
    pub const fn of_host(group: &'a str, resource: &'a str) -> Self {
        Self { member: None, group, resource }
    }
}

impl ResourceMatch {
    /// Whether the objects of `resource` are meant, in whatever group the API server serves them.
    pub fn covers_objects(&self, group: &str, resource: &str) -> bool {
        let other = || other_group(group, resource);
        self.covers(group, resource) || other().is_some_and(|group| self.covers(group, resource))
    }

    /// Whether `resource` (without its subresource) of the API group `group` is meant.
    pub fn covers(&self, group: &str, resource: &str) -> bool {
        lists(&self.api_groups, group) && lists(&self.resources, resource)
    }

    /// Whether some resource is meant by both.
    pub fn overlaps(&self, other: &Self) -> bool {
        share(&self.api_groups, &other.api_groups) && share(&self.resources, &other.resources)
    }

    /// Whether the lists can be matched against.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), ResourceMatchError> {
        check_list("apiGroups", &self.api_groups)?;
        check_list("resources", &self.resources)?;
        let plain = |name: &&String| *name != WILDCARD;
        if let Some(name) = self.resources.iter().filter(plain).find(|name| !is_resource(name)) {
            return Err(ResourceMatchError::BadResource { name: name.clone() });
        }
        if let Some(name) = self.api_groups.iter().filter(plain).find(|name| !is_group(name)) {
            return Err(ResourceMatchError::BadGroup { name: name.clone() });
        }
        Ok(())
    }
}

fn lists(names: &[String], name: &str) -> bool {
    names.iter().any(|listed| listed == WILDCARD || listed == name)
}

fn share(one: &[String], other: &[String]) -> bool {
    one.iter().any(|name| lists(other, name)) || lists(one, WILDCARD) && !other.is_empty()
}

fn check_list(field: &'static str, names: &[String]) -> Result<(), ResourceMatchError> {
    if names.is_empty() {
        return Err(ResourceMatchError::Empty { field });
    }
    if names.len() > 1 && names.iter().any(|name| name == WILDCARD) {
        return Err(ResourceMatchError::WildcardNotAlone { field });
    }
    match names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
        Some((_, name)) => Err(ResourceMatchError::Repeated { field, name: name.clone() }),
        None => Ok(()),
    }
}

/// A DNS label (RFC 1035), which is what the API server allows as a plural.
fn is_resource(name: &str) -> bool {
    name.len() <= 63
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && !name.ends_with('-')
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

fn is_group(name: &str) -> bool {
    name.is_empty() || is_dns_subdomain(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::subsequence;

    use super::*;

    const GROUPS: [&str; 4] = ["", "apps", "batch", "web.example.com"];
    const RESOURCES: [&str; 4] = ["pods", "deployments", "jobs", "websites"];

    fn of(groups: &[&str], resources: &[&str]) -> ResourceMatch {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        ResourceMatch { api_groups: owned(groups), resources: owned(resources) }
    }

    #[test]
    fn groups_and_resources_both_have_to_match() {
        let apps = of(&["apps"], &["deployments", "statefulsets"]);
        assert!(apps.covers("apps", "deployments"));
        assert!(!apps.covers("", "deployments"));
        assert!(!apps.covers("apps", "daemonsets"));
        assert!(of(&["*"], &["pods"]).covers("", "pods"));
        assert!(of(&[""], &["*"]).covers("", "pods"));
        assert!(!of(&[""], &["*"]).covers("apps", "deployments"));
    }

    #[test]
    fn events_are_the_same_objects_in_both_their_groups() {
        for group in ["", "events.k8s.io"] {
            let events = of(&[group], &["events"]);
            assert!(events.covers_objects("", "events") && events.covers_objects("events.k8s.io", "events"));
            assert!(!events.covers_objects("apps", "events") && !events.covers_objects("", "pods"));
        }
        let core = of(&[""], &["*"]);
        assert!(core.covers_objects("events.k8s.io", "events") && !core.covers("events.k8s.io", "events"));
    }

    #[test]
    fn overlap_is_symmetric_and_sees_wildcards() {
        let cases = [
            (of(&["apps"], &["deployments"]), of(&["apps"], &["statefulsets"]), false),
            (of(&["apps"], &["*"]), of(&["apps"], &["statefulsets"]), true),
            (of(&["*"], &["pods"]), of(&[""], &["*"]), true),
            (of(&["*"], &["*"]), of(&["*"], &["*"]), true),
            (of(&["apps"], &["*"]), of(&["batch"], &["*"]), false),
        ];
        for (one, other, overlap) in cases {
            assert_eq!(one.overlaps(&other), overlap, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one), overlap, "{other:?} {one:?}");
        }
    }

    #[test]
    fn what_cannot_be_matched_is_refused_by_field() {
        let cases = [
            (of(&[], &["pods"]), "apiGroups: is empty"),
            (of(&[""], &[]), "resources: is empty"),
            (of(&["*", ""], &["pods"]), "apiGroups: \"*\" is allowed only alone"),
            (of(&[""], &["pods", "*"]), "resources: \"*\" is allowed only alone"),
            (of(&[""], &["pods", "pods"]), "resources: \"pods\" is listed twice; every entry must be different"),
            (of(&[""], &["pods/log"]), "resources: \"pods/log\" is not"),
            (of(&[""], &["Pods"]), "resources: \"Pods\" is not"),
            (of(&["Apps"], &["pods"]), "apiGroups: \"Apps\" is not"),
        ];
        for (resources, message) in cases {
            let error = resources.check().unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        assert_eq!(of(&["", "apps"], &["*"]).check(), Ok(()));
    }

    /// Some of these names, or the wildcard.
    fn names(of: [&'static str; 4]) -> impl Strategy<Value = Vec<&'static str>> {
        prop_oneof![3 => subsequence(of.to_vec(), 1..=4), 1 => Just(vec![WILDCARD])]
    }

    proptest! {
        #[test]
        fn a_match_covers_what_it_lists_and_overlap_is_common_cover(
            one in (names(GROUPS), names(RESOURCES)),
            other in (names(GROUPS), names(RESOURCES)),
        ) {
            let listed = |names: &[&str], name| names == [WILDCARD] || names.contains(&name);
            let matches = [&one, &other].map(|(groups, resources)| of(groups, resources));
            let mut common = false;
            // A group and a resource that nobody names stand for all that are not named.
            for group in GROUPS.into_iter().chain(["other.example.com"]) {
                for resource in RESOURCES.into_iter().chain(["others"]) {
                    let covered = matches.each_ref().map(|one| one.covers(group, resource));
                    let expected = [&one, &other].map(|(groups, resources)| listed(groups, group) && listed(resources, resource));
                    prop_assert_eq!(covered, expected, "{} of {}", resource, group);
                    common |= covered == [true, true];
                }
            }
            prop_assert_eq!(matches[0].check(), Ok(()));
            prop_assert_eq!(matches[0].overlaps(&matches[1]), common);
            prop_assert_eq!(matches[1].overlaps(&matches[0]), common);
        }
    }
}
