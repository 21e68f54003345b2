//! Matches requests against the rules of a guard.

use ctrlmesh_common::policy::guard::RequestMatch;
use ctrlmesh_common::resource::{WILDCARD, other_group};

use crate::request::RequestInfo;

/// Whether the request is one of these. Requests for other paths than resources' are none.
pub fn matches(these: &[RequestMatch], request: &RequestInfo<'_>) -> bool {
    request.is_resource_request() && these.iter().any(|one| is_matched(one, request))
}

fn is_matched(one: &RequestMatch, request: &RequestInfo<'_>) -> bool {
    is_at(&one.clusters, request.cluster())
        && lists(&one.verbs, request.verb())
        && is_in(&one.api_groups, request)
        && one.resources.iter().any(|listed| names(listed, request.resource(), request.subresource()))
        && lists(&one.namespaces, request.namespace())
}

/// Whether a request to this member cluster, or to the API server itself, is one to these.
fn is_at(clusters: &[String], cluster: Option<&str>) -> bool {
    let Some(cluster) = cluster else { return clusters.is_empty() };
    clusters.iter().any(|listed| match listed.strip_suffix(WILDCARD) {
        Some(beginning) => cluster.starts_with(beginning),
        None => listed == cluster,
    })
}

/// Whether one of these groups has the objects that the request is for.
fn is_in(groups: &[String], request: &RequestInfo<'_>) -> bool {
    let other = || other_group(request.api_group(), request.resource());
    lists(groups, request.api_group()) || other().is_some_and(|other| lists(groups, other))
}

fn lists(names: &[String], name: &str) -> bool {
    names.iter().any(|listed| listed == WILDCARD || listed == name)
}

/// As in admission rules (`admissionregistration.k8s.io`), but that `*` alone covers subresources, too.
fn names(listed: &str, resource: &str, subresource: &str) -> bool {
    match listed.split_once('/') {
        None => listed == WILDCARD || listed == resource && subresource.is_empty(),
        Some((WILDCARD, WILDCARD)) => true,
        Some((of, WILDCARD)) => of == resource && !subresource.is_empty(),
        Some((of, sub)) => (of == WILDCARD || of == resource) && sub == subresource,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &str) -> Vec<String> {
        names.split(',').map(str::to_owned).collect()
    }

    fn one(groups: &str, resources: &str, verbs: &str, namespaces: &str) -> RequestMatch {
        RequestMatch {
            api_groups: list(groups),
            resources: list(resources),
            verbs: list(verbs),
            namespaces: list(namespaces),
            clusters: Vec::new(),
        }
    }

    fn is_matched_by(one: RequestMatch, method: &str, target: &str) -> bool {
        matches(&[one], &RequestInfo::parse(method, target).unwrap())
    }

    #[test]
    fn events_are_matched_in_both_their_groups() {
        for (groups, expected) in [("", true), ("events.k8s.io", true), ("apps", false)] {
            for target in ["/api/v1/namespaces/a/events/e", "/apis/events.k8s.io/v1/namespaces/a/events/e"] {
                assert_eq!(
                    is_matched_by(one(groups, "events", "*", "*"), "GET", target),
                    expected,
                    "{groups} {target}"
                );
            }
        }
    }

    #[test]
    fn resources_and_subresources_are_told_apart() {
        for (listed, [pod, eviction, status]) in [
            ("pods", [true, false, false]),
            ("pods/eviction", [false, true, false]),
            ("*/status", [false, false, true]),
            ("pods/*", [false, true, true]),
            ("services/*", [false, false, false]),
            ("*/*", [true, true, true]),
            ("*", [true, true, true]),
            ("services,pods/status", [false, false, true]),
        ] {
            let matched = ["", "/eviction", "/status"].map(|sub| {
                is_matched_by(one("", listed, "*", "*"), "PUT", &format!("/api/v1/namespaces/a/pods/p{sub}"))
            });
            assert_eq!(matched, [pod, eviction, status], "{listed}");
        }
    }

    #[test]
    fn verbs_are_those_of_kubernetes() {
        let pods = "/api/v1/namespaces/a/pods";
        for (method, target, verb) in [
            ("GET", format!("{pods}/p"), "get"),
            ("GET", pods.to_owned(), "list"),
            ("GET", format!("{pods}?watch=1"), "watch"),
            ("POST", pods.to_owned(), "create"),
            ("PUT", format!("{pods}/p"), "update"),
            ("PATCH", format!("{pods}/p"), "patch"),
            ("DELETE", format!("{pods}/p"), "delete"),
            ("DELETE", pods.to_owned(), "deletecollection"),
        ] {
            assert!(is_matched_by(one("", "pods", verb, "*"), method, &target), "{verb}");
            let others = "get,list,watch,create,update,patch,delete,deletecollection";
            let others: Vec<&str> = others.split(',').filter(|other| *other != verb).collect();
            assert!(!is_matched_by(one("", "pods", &others.join(","), "*"), method, &target), "{verb}");
        }
    }

    #[test]
    fn groups_and_namespaces_are_matched() {
        let deployments = "/apis/apps/v1/namespaces/a/deployments";
        for (groups, namespaces, is_expected) in
            [("apps", "a", true), ("*", "*", true), ("", "a", false), ("apps", "b", false), (",apps", "b,a", true)]
        {
            let rule = one(groups, "deployments", "list", namespaces);
            assert_eq!(is_matched_by(rule, "GET", deployments), is_expected, "{groups:?} {namespaces:?}");
        }
    }

    #[test]
    fn requests_to_members_are_matched_by_their_names() {
        let paths = ["/clusters/{cluster}".parse().unwrap()];
        let every = || one("*", "*", "*", "*");
        let matched = |clusters: &[&str], target: &str| {
            let clusters = clusters.iter().map(|name| (*name).to_owned()).collect();
            let rule = RequestMatch { clusters, ..every() };
            matches(&[rule], &RequestInfo::parse("GET", target).unwrap().behind(&paths).unwrap())
        };
        for (clusters, [host, one, two]) in [
            (&[][..], [true, false, false]),
            (&["*"], [false, true, true]),
            (&["member-*"], [false, true, true]),
            (&["member-1"], [false, true, false]),
            (&["other", "member-2"], [false, false, true]),
            (&["member"], [false, false, false]),
        ] {
            let targets = ["/api/v1/pods", "/clusters/member-1/api/v1/pods", "/clusters/member-2/api/v1/pods"];
            assert_eq!(targets.map(|target| matched(clusters, target)), [host, one, two], "{clusters:?}");
        }
    }

    #[test]
    fn only_a_wildcard_covers_requests_without_a_namespace() {
        for target in ["/api/v1/pods", "/api/v1/nodes"] {
            assert!(is_matched_by(one("", "*", "list", "*"), "GET", target));
            assert!(!is_matched_by(one("", "*", "list", "a"), "GET", target));
        }
    }

    #[test]
    fn paths_that_are_no_resources_are_not_matched() {
        for target in ["/healthz", "/api", "/apis/apps/v1", "/version"] {
            assert!(!is_matched_by(one("*", "*", "*", "*"), "GET", target));
        }
    }
}
